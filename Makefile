# One word per task; each task does all its own set-up in .venv from nothing but Python 3.10+ and a C/C++ compiler.
#
#   make demo    serve real prompts with two workers, round robin against E2; writes demo-out/
#   make test    the test suite
#   make check   ruff, mypy, cython-lint
#   make asan    the core's tests under AddressSanitizer and UndefinedBehaviorSanitizer, in build/asan
#   make tsan    threads of every kind on one scheduler under ThreadSanitizer, in build/tsan
#   make leaks   a million operations: does memory stay flat, and is it what the scheduler says it is
#   make build   the compiled core, in place
#   make clean   remove what these made
#
# PYTHON chooses the interpreter, ARGS adds arguments: `make test ARGS="-k radix"`, `make demo ARGS="--engine simulated"`.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := setup.py $(wildcard preble/*.pyx preble/*.pxd preble/*.h)

.PHONY: demo test check asan tsan leaks build clean
.DELETE_ON_ERROR:

demo: $(VENV)/built
	$(BIN)/preble demo --workdir demo-out $(ARGS)

test: $(VENV)/built
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" cython-lint preble  # it starts pycodestyle by name

asan tsan: $(VENV)/installed
	$(BIN)/python tests/stress/sanitize.py $@ $(ARGS)

leaks: $(VENV)/built
	$(BIN)/python tests/stress/leaks.py $(ARGS)

build: $(VENV)/built

# The stamps make a second call fast: a step runs again only if what it was made from is newer.
$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Preble needs Python 3.10 or newer; $(PYTHON) is not. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed: pyproject.toml constraints.txt $(VENV)/created
	@echo "Installing what Preble needs into $(VENV), once (about 2 minutes)"
	$(PIP) install -c constraints.txt setuptools Cython wheel
	$(PIP) install -c constraints.txt torch==2.13.0
	PREBLE_SKIP_CORE=1 $(PIP) install -c constraints.txt --no-build-isolation -e ".[torch,bench,test,dev]"
	@touch $@

$(VENV)/built: $(SOURCES) $(VENV)/installed
	@echo "Compiling the core"
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

clean:
	rm -rf $(VENV) build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find preble tests examples benchmarks \( -name '*.so' -o -name '__pycache__' \) -prune -exec rm -rf {} +
