# One word per task; each task does all its own set-up in .venv from nothing but Python 3.10+ and a C/C++ compiler.
#
#   make demo    serve real prompts with two workers, round robin against E2; writes demo-out/
#   make demo-docs  the same, and the README's table of it
#   make test    the test suite
#   make check   ruff, mypy, cython-lint
#   make asan    the core's tests under AddressSanitizer and UndefinedBehaviorSanitizer, in build/asan
#   make tsan    threads of every kind on one scheduler under ThreadSanitizer, in build/tsan
#   make test-free-threaded   the core's tests and threads of every kind on CPython without its lock, in .venv-free
#                (PYTHON_FREE_THREADED=path, else python3.14t or python3.13t; skipped where there is none)
#   make leaks   a million operations: does memory stay flat, and is it what the scheduler says it is
#   make chaos   ten minutes of faults on workers, routers and their network, under load
#   make soak    a thousand streaming clients before a gateway, hanging up at random, for a minute (ARGS=--servers)
#   make fuzz    a million damaged inputs for every decoder (hours; ARGS="--target wire" for one)
#   make test-live  real SGLang and vLLM workers, installed into .engines (7 GB) the first time
#   make bench-live  ways to place requests over real engines (it goes on with what is kept; ARGS=--anew on another machine); docs/results-live.md
#   make test-ray   the router inside a real Ray cluster, in .venv-ray (600 MB; 3 minutes the first time)
#   make bench-ray  Preble's router against Ray Serve's own (40 minutes); writes its section of docs/results.md
#   make build   the compiled core, in place
#   make bench   every benchmark and its peers, three times (a quarter to half an hour); writes docs/benchmarks.md's tables and the README's
#   make paper        the paper's evaluation in simulation, and the contest (one to two hours): docs/results.md and its figures
#   make agents       its page on agents and tenants alone (15 CPU minutes): docs/agents.md
#   make paper-quick  the same with a tenth of the requests (4 minutes), into build/paper-quick
#   make instructions            instructions per operation against the baseline (valgrind); fails at 5 % more
#   make instructions-renew REASON="..."   a new baseline
#   make quickstart  type the commands of docs/quickstart.md, installation included, in a new directory
#   make wheel       source distribution and a wheel of this Python, into dist/
#   make wheel-test  that wheel in empty environments: examples, a worker fleet, the cheap extras (ARGS=--all-extras)
#   make wheels      source distribution and manylinux wheels of every Python (cibuildwheel: needs docker or podman)
#   make docs        the documentation as pages, into build/site; a broken link fails
#   make clean   remove what these made
#
# PYTHON chooses the interpreter, ARGS adds arguments: `make test ARGS="-k radix"`, `make demo ARGS="--engine simulated"`.
# JOBS is how many processes share the tests' files, 1 for a debugger: `make test JOBS=1 ARGS="-k radix --pdb"`.

PYTHON ?= python3
ARGS ?=
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n : 4)))
SHARED := $(if $(filter-out 0 1,$(JOBS)),-n $(JOBS) --dist loadfile)
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
RAY := .venv-ray
FREE := .venv-free
FREE_PIP := $(FREE)/bin/python -m pip --disable-pip-version-check --quiet
PYTHON_FREE_THREADED ?= $(shell command -v python3.14t || command -v python3.13t)
RAY_PIP := $(RAY)/bin/python -m pip --disable-pip-version-check --quiet
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := setup.py $(shell find preble -name '*.pyx' -o -name '*.pxd')

.PHONY: wheel wheels wheel-test docs quickstart
.PHONY: demo demo-docs test test-free-threaded test-live bench-live test-ray bench-ray check asan tsan leaks chaos soak fuzz build bench paper paper-quick agents peers instructions instructions-renew clean
.DELETE_ON_ERROR:

demo: $(VENV)/built
	$(BIN)/preble demo --workdir demo-out $(ARGS)

demo-docs: demo
	$(BIN)/python -m benchmarks.common.readme --demo demo-out/demo.json

test: $(VENV)/built
	$(BIN)/python -m pytest $(SHARED) $(ARGS)

ifeq ($(PYTHON_FREE_THREADED),)
test-free-threaded:
	@echo "left out: no CPython without its lock here; PYTHON_FREE_THREADED=path names one"
else
test-free-threaded: $(FREE)/installed
	$(FREE)/bin/python -m tests.stress.free_threaded $(ARGS)
endif

test-live: $(VENV)/built
	$(BIN)/python tests/live/install.py --engine sglang
	$(BIN)/python tests/live/install.py --engine vllm
	PREBLE_LIVE_TESTS=1 $(BIN)/python -m pytest tests/live --timeout=1200 $(ARGS)

bench-live: $(VENV)/built peers
	$(BIN)/python tests/live/install.py --engine sglang
	$(BIN)/python tests/live/install.py --engine vllm
	$(BIN)/python -m benchmarks.live.run_arms --docs $(ARGS)

test-ray: $(RAY)/built
	$(RAY)/bin/python -m pytest tests/integrations/test_ray_serve.py tests/integrations/test_ray_fleet.py tests/integrations/test_ray_docs.py $(ARGS)

# Prompts are text there, so the router needs a tokenizer.
bench-ray: $(RAY)/built
	@$(RAY_PIP) install -c constraints.txt tokenizers
	$(RAY)/bin/python -m benchmarks.ray.bench_ray --json benchmarks/results/ray.json --docs $(ARGS)

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" cython-lint preble  # it starts pycodestyle by name

asan: $(VENV)/installed
	$(BIN)/python -m tests.stress.sanitize $@ $(SHARED) $(ARGS)

tsan: $(VENV)/installed
	$(BIN)/python -m tests.stress.sanitize $@ $(ARGS)

leaks: $(VENV)/built
	$(BIN)/python -m tests.stress.leaks $(ARGS)

chaos: $(VENV)/built
	$(BIN)/python -m tests.stress.chaos --seconds 600 $(ARGS)

soak: $(VENV)/built
	$(BIN)/python -m tests.stress.gateway_soak $(ARGS)

# Where atheris has no wheel, a seeded generator damages the inputs instead.
fuzz: $(VENV)/built
	@$(PIP) install atheris==3.0.0 || echo "atheris cannot be installed; going on without"
	$(BIN)/python -m tests.stress.fuzz $(ARGS)

build: $(VENV)/built

bench: $(VENV)/built peers
	$(BIN)/python -m benchmarks.decision.bench_schedule --everything --runs 3 --json benchmarks/results/everything.json --docs $(ARGS)
	$(BIN)/python -m benchmarks.common.readme

paper: $(VENV)/built
	$(BIN)/python -m benchmarks.paper.run $(ARGS)
	$(BIN)/python -m benchmarks.paper.agents
	$(BIN)/python -m benchmarks.common.readme

agents: $(VENV)/built
	$(BIN)/python -m benchmarks.paper.agents $(ARGS)

paper-quick: $(VENV)/built
	$(BIN)/python -m benchmarks.paper.run --quick $(ARGS)

instructions: $(VENV)/built
	$(BIN)/python -m benchmarks.decision.instructions

instructions-renew: $(VENV)/built
	$(BIN)/python -m benchmarks.decision.instructions --renew "$(REASON)"

quickstart: $(VENV)/created
	rm -rf build/quickstart
	$(PYTHON) tests/packaging/quickstart.py build/quickstart

# The wheel is built from the source distribution, so that one lacking a file cannot pass.
wheel: $(VENV)/installed
	rm -rf dist build/wheel
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir build/wheel .
	$(BIN)/python tests/packaging/repair.py build/wheel dist

wheel-test: wheel
	$(BIN)/python tests/packaging/wheel_test.py dist $(ARGS)

wheels: $(VENV)/installed
	@docker info >/dev/null 2>&1 || podman info >/dev/null 2>&1 || \
		{ echo "make wheels builds in manylinux containers: it needs docker or podman, running. make wheel does not"; exit 1; }
	$(PIP) install -c constraints.txt cibuildwheel
	rm -rf dist
	$(BIN)/python -m build --sdist --outdir dist .
	CIBW_CONTAINER_ENGINE=$$(docker info >/dev/null 2>&1 && echo docker || echo podman) \
		$(BIN)/cibuildwheel --platform linux --output-dir dist dist/preble-*.tar.gz

docs: $(VENV)/installed
	$(BIN)/python docs/outside.py build/pages
	$(BIN)/zensical build --strict --clean

peers: $(PEERS)/installed

# A peer that cannot be installed is left out of the tables with a message; the next call tries again.
$(PEERS)/installed: benchmarks/requirements-peers.txt
	@echo "Installing the peers into $(PEERS), once (about 1 minute)"
	$(PYTHON) -m venv $(PEERS)
	@grep -v '^#' $< | { failed=; while read -r peer; do \
		$(PEERS)/bin/python -m pip --disable-pip-version-check --quiet install "$$peer" || \
			{ failed=1; echo "$$peer cannot be installed; what needs it will be left out"; }; \
		done; test -n "$$failed" || touch $@; }

# Nothing but the extra `ray` and what runs tests: the page's example must not need more.
$(RAY)/built: pyproject.toml constraints.txt $(SOURCES)
	@echo "Installing Ray and the core into $(RAY), once (about 2 minutes)"
	$(PYTHON) -m venv $(RAY)
	$(RAY_PIP) install -c constraints.txt setuptools Cython wheel
	PREBLE_SKIP_CORE=1 $(RAY_PIP) install -c constraints.txt --no-build-isolation -e ".[ray]" pytest pytest-timeout hypothesis
	$(RAY)/bin/python setup.py --quiet build_ext --inplace
	@touch $@

# What the core needs, and what runs its tests. msgspec refuses 3.13t, and later hypothesis needs Rust there.
$(FREE)/installed: constraints.txt
	@echo "Installing what the core needs for $(PYTHON_FREE_THREADED) into $(FREE), once (about 3 minutes)"
	$(PYTHON_FREE_THREADED) -m venv $(FREE)
	$(FREE_PIP) install -c constraints.txt setuptools Cython wheel numpy msgpack pytest pytest-timeout
	$(FREE_PIP) install "hypothesis<6.141"
	-$(FREE_PIP) install -c constraints.txt msgspec
	@touch $@

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
	PREBLE_SKIP_CORE=1 $(PIP) install -c constraints.txt --no-build-isolation -e ".[torch,attach,gateway,epp,kubernetes,dns,otel,top,bench,test,dev,mistral,docs,build]"
	@touch $@

$(VENV)/built: $(SOURCES) $(VENV)/installed
	@echo "Compiling the core"
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(RAY) $(FREE) build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find preble tests examples benchmarks \( -name '*.so' -o -name '__pycache__' \) -prune -exec rm -rf {} +
