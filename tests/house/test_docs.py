"""What the pages name exists: commands, options, configuration keys, metrics, messages, extras. Their code runs.

Links are checked by `make docs`, what the quick start's commands do by test_quickstart.py.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import io
import re
import runpy
import shlex
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from preble import GlobalScheduler, Router, cli
from preble.config import SchedulerConfig
from preble.gateway.migration.counterparts import SUBJECTS, of_router
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])
# Options of SGLang's and vLLM's servers, of systemctl, useradd and docker.
FOREIGN_OPTIONS = {
    *("--api-key", "--kv-events-config", "--load-publish-endpoint", "--incremental-streaming-output"),
    *("--enable-prompt-tokens-details", "--enable-cache-report", "--now", "--system", "--tag", "--file"),
    *("--disaggregation-mode", "--kv-transfer-config", "--enable-priority-scheduling", "--scheduling-policy"),
    "--disable-gil",  # of CPython's configure
    *("--from-file", "--reuse-values"),  # of kubectl and helm
}
# What Python or a compiler says, not Preble.
FOREIGN_MESSAGES = {"No such file or directory", "No module named 'preble._core.manual_clock'"}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return page.name


def blocks(page: Path, language: str = r"\w*") -> list[str]:
    """The fenced blocks of a language, indented ones too."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text_of(page), re.M | re.S)
    return [re.sub(rf"^{indent}", "", body, flags=re.M) for indent, body in found]


def commands(page: Path) -> Iterator[list[str]]:
    """Every `preble COMMAND ...` that a block reports to type, without what the shell takes for itself."""
    for block in blocks(page):
        for line in block.replace("\\\n", " ").split("\n"):
            for part in re.split(r"&&|[|&>]|2>", line):
                words = shlex.split(part, comments=True) if part.strip().startswith("preble ") else []
                if len(words) > 1:
                    yield words


def quoted(page: Path) -> set[str]:
    """What stands in backticks outside the blocks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```$", "", text_of(page), flags=re.M | re.S)))


@cache
def options_of(command: str) -> set[str]:
    """The options of a sub-command."""
    parser = cli.build_parser([command])
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return set(commands.choices[command]._option_string_actions)


# --- commands and options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))], ids=name_of)
def test_every_command_of_a_page_is_one_that_preble_understands(page: Path) -> None:
    for words in commands(page):
        arguments = [word for word in words[1:] if word != "..."]
        args = cli.build_parser(arguments).parse_args(arguments)
        assert args.command in cli.COMMANDS


def test_commands_are_found_on_the_pages_that_have_them() -> None:
    found = {page.name: len(list(commands(page))) for page in PAGES}
    for name in ("quickstart.md", "simulator.md", "operating.md", "gateway.md", "deploy.md", "README.md"):
        assert found[name], f"no command was found on {name}"


@cache
def options_of_the_repository() -> frozenset[str]:
    """Those of `preble`, of its benchmarks and of programs among the tests."""
    known = set().union(*map(options_of, cli.COMMANDS)) | {"--version"}
    for folder in ("benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            known |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', path.read_text(encoding="utf-8")))
    return frozenset(known)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    known = options_of_the_repository() | FOREIGN_OPTIONS
    if page.name == "migrating.md":
        known |= set(of_router("sglang-router")) | set(of_router("smg")) | set(of_router("vllm-router"))
    named = set(re.findall(r"(?<![\w|-])--[a-z][a-z0-9-]*[a-z0-9](?![\w>-])", text_of(page)))
    assert not named - known, f"{page.name} names options that do not exist: {sorted(named - known)}"


# --- the gateway's names ----------------------------------------------------------------------------------------------


def gateway_keys() -> set[str]:
    """Keys of the gateway's file; those of the scheduler with and without `scheduler.`."""
    config = pytest.importorskip("preble.gateway.core.config", exc_type=ImportError)
    scheduler = set(SchedulerConfig.__dataclass_fields__)
    return {".".join(path) for path in config.FIELDS} | scheduler


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_scheduler_key_that_a_page_names_exists(page: Path) -> None:
    named = {text for text in quoted(page) if re.fullmatch(r"scheduler\.[a-z]+_[a-z_]+", text)}
    known = gateway_keys() | {f"scheduler.{name}" for name in dir(GlobalScheduler)}
    assert named <= known, sorted(named - known)


def test_the_page_of_options_is_what_they_say_of_themselves() -> None:
    pytest.importorskip("preble.gateway.core.config", exc_type=ImportError)
    from tests.gateway.options_page import PAGE, written

    page = text_of(PAGE)
    assert written(page) == page, "run: python -m tests.gateway.options_page"


def test_the_table_of_metrics_is_what_they_say_of_themselves() -> None:
    pytest.importorskip("uvicorn")
    from tests.gateway.metrics_page import PAGE, written

    page = text_of(PAGE)
    assert written(page) == page, "run: python -m tests.gateway.metrics_page"


def rendered_metrics() -> str:
    """What a gateway that has just been made shows at /metrics."""
    pytest.importorskip("uvicorn")
    from preble.gateway.core.config import GatewayConfig
    from preble.gateway.core.gateway import Gateway
    from preble.gateway.core.metrics import Metrics

    async def render() -> bytes:
        metrics = Metrics(time.monotonic)
        router = Router([], scheduler=GlobalScheduler(["a"]))
        await router.start(min_workers=0)
        try:
            gateway = Gateway(router, None, GatewayConfig(), metrics)
            return metrics.render(router.scheduler, router.stats(), gateway.stats())
        finally:
            await router.close()

    return asyncio.run(render()).decode()


def test_every_metric_that_a_page_names_is_shown() -> None:
    text = rendered_metrics()
    families = set(re.findall(r"^# TYPE (preble_\w+)", text, re.M)) | {
        "preble_process_up"
    }  # shown by several processes
    known = families | {name.removesuffix("_total") for name in families}
    for page in PAGES:
        named = {text for text in quoted(page) if re.fullmatch(r"preble_[a-z_]+[a-z]", text)}
        unknown = {name for name in named if name not in known and name.removesuffix("_total") not in known}
        assert not unknown, f"{page.name} names metrics that are not shown: {sorted(unknown)}"
    assert len([name for name in quoted(DOCS / "operating.md") if name in known]) >= 10


# --- other routers ----------------------------------------------------------------------------------------------------


def test_the_page_of_other_routers_has_the_table_that_command_lines_are_read_by() -> None:
    from tests.gateway.migration.page import PAGE, written

    page = text_of(PAGE)
    assert written(page) == page, "run: python -m tests.gateway.migration.page"


def test_what_the_table_offers_instead_are_keys_of_ours() -> None:
    named = {key for rows in SUBJECTS.values() for row in rows for key in row.key.split()}
    assert len(named) > 20 and named <= gateway_keys(), sorted(named - gateway_keys())


@pytest.mark.parametrize("name", ["gateway"])
def test_a_pages_configuration_is_one_that_the_gateway_takes(name: str, tmp_path: Path) -> None:
    sources = pytest.importorskip("preble.gateway.core.config_sources", exc_type=ImportError)
    block = blocks(DOCS / f"{name}.md", "yaml")[0]
    (tmp_path / "gateway.yaml").write_text(block)
    assert sources.load(tmp_path / "gateway.yaml", {}, {}).config.workers


# --- messages ---------------------------------------------------------------------------------------------------------


def said_by_preble() -> list[str]:
    """Every piece of text in Preble's own modules."""
    texts = []
    for path in (ROOT / "preble").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_every_message_in_troubleshooting_is_one_of_prebles() -> None:
    texts = said_by_preble()
    rows = [row.split("|")[1] for row in text_of(DOCS / "troubleshooting.md").splitlines() if row.startswith("| ")]
    messages = {message for cell in rows for message in re.findall(r"`([^`]+)`", cell)} - FOREIGN_MESSAGES
    assert len(messages) > 20
    known = {f"preble {command}" for command in cli.COMMANDS} | options_of("serve") | FOREIGN_OPTIONS
    unsaid = {one for one in messages if one not in known and not any(one in text for text in texts)}
    assert not unsaid, f"nothing says {sorted(unsaid)}"


# --- code and extras --------------------------------------------------------------------------------------------------


def test_the_first_example_of_embedding_prints_what_the_page_says() -> None:
    (first, *others), (shown,) = blocks(DOCS / "embedding.md", "python"), blocks(DOCS / "embedding.md", "text")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(first, "embedding.md", "exec"), {})
    assert printed.getvalue() == shown
    for other in others:
        compile(other, "embedding.md", "exec")


def test_the_index_lists_the_extras_that_there_are() -> None:
    project = text_of(ROOT / "pyproject.toml").partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", project, re.M))
    table = text_of(DOCS / "index.md").partition("| extra | for |")[2]
    assert {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])} == extras


# --- links --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=name_of)
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    """From the page's own folder, as in the repository. A page in a folder once broke `make docs` alone."""
    links = re.findall(r"\]\((?!\w+:)([^)#\s]+)", re.sub(r"```.*?```", "", text_of(page), flags=re.S))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_pages_keep_links_between_themselves(tmp_path: Path) -> None:
    """Those to files outside of docs/ become names: the made pages do not hold them. Code is left alone."""
    outside = runpy.run_path(str(DOCS / "outside.py"))
    source = DOCS / "experiments" / "one-price.md"
    code = "\n```\n[a](b)\n```\n"
    text = "[the rule](../e2.md#x), [its figures](../../README.md) and [`README.md`](../../README.md#x)"
    assert outside["page"](text + code, source) == (
        "[the rule](../e2.md#x), its figures (`README.md`) and `README.md`" + code
    )
    with pytest.raises(FileNotFoundError, match="one-price.md: no file for the link to none.png"):
        outside["page"]("![a picture](none.png)", source)
    outside["copied"](tmp_path / "pages")
    made = {path.relative_to(tmp_path / "pages") for path in (tmp_path / "pages").rglob("*.md")}
    assert made == {path.relative_to(DOCS) for path in DOCS.rglob("*.md")}
