"""`preble top`: frames of states made up here, and the command before a real gateway."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from preble import GlobalScheduler
from preble.cli import top
from preble.errors import InvalidInput, TransportError
from preble.scheduling.records import DecisionRecording
from tests.support.gateway import Client, GatewayProcess
from tests.support.paths import ROOT
from tests.support.transport import HANG_SECONDS, WorkerProcess

frames = pytest.importorskip("preble.cli.top_screen", reason="needs rich: pip install 'preble[top]'")

NASTY = "[red]x[/red]\x1b[2J"


def worker(name: str, state: str = "ready") -> dict[str, Any]:
    """A worker as the gateway reports it."""
    numbers = {"load": 0.5, "waiting": 3, "running": 2, "kv": 0.25, "hit": None}
    return {"id": name, "state": state, **numbers, "history": {"load": [0.0, 0.5, 1.0], "hit": [None, 0.5]}}


def state(*workers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """All of it."""
    fleet = {"requests_per_second": 7.25, "hit": 0.5, "first_token_p50": 0.012, "first_token_p99": 2.5, "waiting": 3.0}
    fleet |= {"errors": 0.0125, "output_tokens_per_second": 1234.5}
    fleet |= {"seconds_per_token_p50": 0.016, "seconds_per_token_p99": 0.05}
    chosen = {"queue_seconds": 0.25, "prefill_seconds": 0.02, "others_seconds": 1.5, "decode_seconds": 0.04}
    chosen |= {"eviction_seconds": 0.0, "balance_seconds": 0.09, "credit_seconds": 0.0, "total_seconds": 1.9}
    decision = {"seconds_ago": 3.4, "worker": "a", "reason": "exploit", "prompt_tokens": 1234, "outcome": None}
    prefix = {"name": "c0ffee00", "prefix_tokens": 4096, "requests": 9, "load": 0.3, "holders_count": 9}
    return {
        "tick": 5,
        "tick_seconds": 0.01,
        "uptime_seconds": 3725.0,
        "gateway": {"ready": True, "draining": False},
        "totals": {"policy": "e2", "live_requests": 4},
        "fleet": fleet,
        "workers": list(workers),
        "workers_left_out": 0,
        "decisions": [{**decision, "chosen": {**chosen, "matched_tokens": 1000}}],
        "prefixes": [{**prefix, "holders": [{"worker": "a"}, {"worker": "b"}]}],
        "events": [
            {"seconds_ago": 65.0, "kind": "worker", "worker": "b", "before": "ready", "after": "lost", "why": "x"}
        ],
        **more,
    }


def printed(told: dict[str, Any]) -> str:
    """One frame as text, as wide as a test's terminal is."""
    stream = io.StringIO()
    frames.TopScreen(stream).print(told)
    return stream.getvalue()


def framed(told: dict[str, Any], width: int, height: int = 40) -> list[str]:
    """One frame as lines, for a terminal of that size."""
    stream = io.StringIO()
    frames.Console(file=stream, width=width).print(frames.frame(told, width, height))
    return stream.getvalue().splitlines()


def test_a_frame_has_the_fleet_the_workers_and_what_happened() -> None:
    text = printed(state(worker("a"), worker("b", "lost")))
    assert "ready  1 of 2 workers  policy e2  up 1 h 2 min" in text
    assert "7.2 requests/s  4 live  1,234 tokens/s  errors 1.2%  3 waiting" in text
    assert "cached 50%  first token 12 ms (p99 2.5 s)  per token 16 ms (p99 50 ms)" in text
    lines = text.splitlines()
    first, second = (next(i for i, line in enumerate(lines) if line.startswith(name)) for name in ("b  ", "a  "))
    assert first < second, "trouble comes first"
    assert re.search(r"^a +ready +50% +▁▅█ +3 +2 +25% +- ", lines[second])
    assert re.search(r"3 s ago +a +exploit +1,000/1,234 .*running", text)
    assert re.search(r"c0ffee00 +4,096 +9 +30% +a, b and 7 more", text)
    assert re.search(r"1 min ago +lost +b \(was ready\) x", text)


def test_a_state_that_only_a_newer_gateway_knows_is_shown_first() -> None:
    lines = printed(state(worker("a", "lost"), worker("b", "asleep"))).splitlines()
    first, second = (next(i for i, line in enumerate(lines) if line.startswith(name)) for name in ("b  ", "a  "))
    assert first < second and "asleep" in lines[first]


def test_a_decision_has_the_terms_of_its_price_where_there_is_room() -> None:
    heading, row = decision_lines(framed(state(worker("a")), 120))
    names = "queue prefill others decode eviction balance credit total first"
    assert heading.split()[4:] == names.split()
    assert row.endswith("  250 ms    20 ms   1.5 s   40 ms      0 ms    90 ms    0 ms  1.9 s  running")
    heading, row = decision_lines(framed(state(worker("a")), 80))
    assert heading.split() == ["decided", "worker", "why", "cached/prompt", "total", "first"]
    assert row.split()[-2:] == ["s", "running"] and "\u2026" not in heading + row, "nothing is cut off"


def test_what_lies_below_the_gpus_memory_is_shown_where_there_is_any() -> None:
    told = state({**worker("a"), "away_tokens": 123_456}, {**worker("b"), "away_tokens": 0})
    told["fleet"]["loaded"] = 0.125
    told["decisions"][0]["chosen"]["loading_seconds"] = 0.03
    lines = framed(told, 129)
    text = "\n".join(lines)
    assert "cached 50% (12% of it loaded)  first token" in text
    assert re.search(r"^worker +state +load +queue +running +kv +below +hit", text, re.MULTILINE)
    assert re.search(r"^a +ready +50% +\S+ +3 +2 +25% +123,456 +- ", text, re.MULTILINE)
    heading, row = decision_lines(lines)
    names = "queue prefill loading others decode eviction balance credit total first"
    assert heading.split()[4:] == names.split()
    assert re.search(r"250 ms +20 ms +30 ms +1\.5 s ", row) and "\u2026" not in heading + row
    assert decision_lines(framed(told, 128))[0].split()[4:] == ["total", "first"], "there is no room for one more"
    plain = "\n".join(framed(state(worker("a")), 129))
    assert not re.search("below|load(ed|ing)", plain)


def source(name: str, **more: Any) -> dict[str, Any]:
    """A source of discovery as the gateway reports it."""
    found = {"ready": 3, "not_ready": 1, "terminating": 0}
    servers = {"serving": 2, "withheld": 1, "draining": 0}
    return {
        "source": name,
        "age_seconds": 4.2,
        "has_answered": True,
        "servers": servers,
        "named": 4,
        "found": found,
        "left_out": 0,
        "unusable": {},
        "workers": {"ready": 3},
        "refused": {},
        "is_doubted": False,
        "failures": 0,
        "failing": "",
        "keep_failing": "",
        **more,
    }


def test_discovery_is_shown_where_servers_are_looked_for() -> None:
    told = state(worker("a"))
    assert "discovery" not in printed(told)
    failing = source("dns:_http._tcp.x", has_answered=False, age_seconds=None, failures=2, failing="no answer for x")
    wrong = source("file:/a", left_out=1, unusable={NASTY: "no URL"}, workers={"refused": 1}, is_doubted=True)
    told["gateway"]["discovery"] = [source("kubernetes:llm/app=vllm"), failing, wrong]
    lines = framed(told, 160)
    at = next(i for i, line in enumerate(lines) if line.startswith("discovery"))
    assert lines[at].split() == ["discovery", "answered", "found", "ready", "taken", "refused", "why"]
    first, second, third = lines[at + 1 : at + 4]
    assert re.search(r"^kubernetes:llm/app=vllm +in step +4 s ago +4 +3 +3 +0 *$", first)
    assert re.search(r"^dns:_http\._tcp\.x +no answer +- +- +- +3 +0 +failed 2 times: no answer for x *$", second)
    assert re.search(r"^file:/a +doubted +4 s ago +4 +3 +3 +2 +'\[red\]x\[/red\]\\x1b", third)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"has_answered": False, "age_seconds": None}, "asking"),
        ({"has_answered": False, "age_seconds": 9.0, "failing": "x"}, "kept list"),
        ({"failing": "x"}, "no answer"),
        ({"is_doubted": True}, "doubted"),
        ({}, "in step"),
    ],
)
def test_a_source_stands_as_on_the_live_page(more: dict[str, Any], word: str) -> None:
    assert frames.source_word(source("a", **more)) == word


def decision_lines(lines: list[str]) -> list[str]:
    """The heading of the decisions, and the first of them."""
    at = next(i for i, line in enumerate(lines) if line.startswith("decided"))
    return [line.rstrip() for line in lines[at : at + 2]]


def test_the_terms_that_are_shown_are_those_of_a_price() -> None:
    """What the gateway sends of a decision has each of them, and they add up."""
    sched = GlobalScheduler(["a", "b"], record=DecisionRecording())
    sched.schedule([1] * 500)
    chosen = asdict(sched.records()[0].chosen)
    assert sum(chosen[name] for name in frames.PRICE_TERMS) == pytest.approx(chosen["total_seconds"], rel=1e-12)
    assert chosen["total_seconds"] > 0


def test_names_are_neither_markup_nor_orders_to_the_terminal() -> None:
    text = printed(state(worker(NASTY)))
    assert "\x1b" not in text and "[red]x[/red]\\x1b" in text


def test_a_frame_fits_the_terminal_and_counts_what_it_leaves_out() -> None:
    told = state(*(worker(f"w{i:03}") for i in range(100)))
    told |= {name: told[name] * 40 for name in ("decisions", "prefixes", "events")}
    told["gateway"]["discovery"] = [source(f"file:/{number}") for number in range(frames.SOURCES_MAX + 2)]
    assert any(line.startswith("and 2 more") for line in framed(told, 200, 50)), "sources that are not shown"
    del told["gateway"]["discovery"][2:]
    for height in (24, 50):
        lines = framed(told, 200, height)
        assert len(lines) <= height + 2
        assert (
            sum(line.startswith("w") and line[1].isdigit() for line in lines)
            + int(re.search(r"and (\d+) more", "\n".join(lines)).group(1))
            == 100
        )


def test_frames_take_the_terminal_over_and_give_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120"), ("LINES", "40")):
        monkeypatch.setenv(name, value)
    master, terminal = pty.openpty()
    parts: list[bytes] = []
    reader = threading.Thread(target=read_to_the_end, args=(master, parts))
    reader.start()
    with open(terminal, "w", encoding="utf-8") as stream, frames.TopScreen(stream) as screen:
        screen.show(state(worker("a")), "it does not answer")
    reader.join()
    os.close(master)
    written = b"".join(parts).decode()
    assert written.index("\x1b[?1049h") < written.index("it does not answer") < written.index("\x1b[?1049l")


def read_to_the_end(master: int, parts: list[bytes]) -> None:
    """What is written to a terminal until it is closed, which Linux reports by an error."""
    with contextlib.suppress(OSError):
        while part := os.read(master, 1 << 16):
            parts.append(part)


def test_every_kind_of_event_has_words() -> None:
    plan = {"kind": "replica", "phase": "began", "prefix_tokens": 512, "from_worker": "a", "to_worker": "b"}
    plan |= {"reason": "hot", "why": None}
    assert frames.event_words(plan) == ("replica began", "512 tokens, a -> b: hot")
    ended = {**plan, "phase": "ended", "why": "expired"}
    assert frames.event_words(ended) == ("replica ended", "512 tokens, a -> b: expired")
    assert frames.event_words({"kind": "policy", "before": "e2", "after": "random"}) == (
        "policy",
        "random instead of e2",
    )


# --- the command ------------------------------------------------------------------------------------------------------


def command(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`preble top ARGS...`."""
    return subprocess.run(
        [sys.executable, "-m", "preble.cli", "top", *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={**(environment or {}), "PYTHONPATH": str(ROOT), "COLUMNS": "160", "PATH": "/usr/bin"},
    )


def test_once_prints_the_fleet_of_a_real_gateway_and_asks_for_a_key_where_one_is_needed(tmp_path: Path) -> None:
    process = WorkerProcess("--id", "the-worker", time_scale=0.01)
    config, key = tmp_path / "gateway.toml", tmp_path / "key"
    config.write_text('admin_keys = ["operators-only"]\n')
    key.write_text("operators-only\n")
    gateway = GatewayProcess("--workers", process.endpoint, "--config", str(config), log=tmp_path / "log")
    try:
        client = Client(gateway.address, "operators-only")
        client.call("POST", "/v1/completions", {"model": "simulated", "prompt": [1, 2, 3], "max_tokens": 2})
        client.close()
        refused = command("--url", gateway.url, "--once")
        assert refused.returncode == 1 and "wants an admin key" in refused.stderr
        for arguments, environment in (
            (["--key-file", str(key)], {}),
            ([], {top.KEY_VARIABLE: "operators-only"}),
        ):
            shown = command("--url", gateway.url, "--once", *arguments, environment=environment)
            assert shown.returncode == 0, shown.stderr
            assert re.search(r"^the-worker +ready", shown.stdout, re.MULTILINE)
            assert "explore" in shown.stdout
    finally:
        gateway.stop()
        process.stop()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--url", "nonsense"], 2, "--url must be like"),
        (["--url", "ftp://x"], 2, "--url must be like"),
        (["--url", "http://127.0.0.1:9"], 1, "does not answer"),
        (["--key-file", "/nowhere"], 2, "--key-file: /nowhere cannot be read"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], code: int, said: str) -> None:
    done = command(*arguments, "--once")
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr and done.stderr.count("\n") == 1


# --- asking -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted() -> Iterator[Any]:
    """A server that answers what `answers` has next, and keeps what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append(self.path)
            status, body = server.answers.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server: Any = HTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.answers = [], []
    server.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_short_history_is_asked_for(scripted: Any) -> None:
    asking = top.Asking(scripted.url, "")
    scripted.answers += [(200, json.dumps({"tick": tick}).encode()) for tick in (100, 100, 101)]
    assert [asking.state()["tick"] for _ in range(2)] == [100, 101]
    path = "/v1/preble/state"
    assert scripted.asked == [path, *(f"{path}?after={100 - top.HISTORY_TICKS}" for _ in range(2))]


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (404, b"", "is it a gateway"),
        (500, b"", "see its log"),
        (200, b"<html>", "does not answer"),
        (200, b"[]", "no gateway"),
    ],
)
def test_what_is_no_answer_is_said(scripted: Any, status: int, body: bytes, said: str) -> None:
    scripted.answers.append((status, body))
    with pytest.raises(TransportError, match=said):
        top.Asking(scripted.url, "").state()


def test_a_gateway_that_stops_answering_is_shown_with_its_age(scripted: Any) -> None:
    told = json.dumps(state(worker("a"))).encode()
    scripted.answers += [(200, told)] * 2
    seen: list[str] = []

    class Screen:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing to give back."""

        def show(self, told: dict[str, Any], trouble: str) -> None:
            seen.append(trouble)
            if len(seen) == 2:
                raise KeyboardInterrupt

    asking = top.Asking(scripted.url, "")
    first = asking.state()
    times = iter([10.0, 11.0, 14.0, 15.0])
    scripted.answers[:] = [(503, b""), (200, told)]
    with pytest.raises(KeyboardInterrupt):
        top._show_for_good(asking, first, Screen(), lambda: next(times))
    assert seen[0].endswith("(what is shown is 1 s old)") and seen[1] == ""


def test_a_key_comes_from_the_file_else_from_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(top.KEY_VARIABLE, "from-the-variable")
    file = tmp_path / "key"
    file.write_text("  from-the-file \nmore\n")
    assert (top._key(None), top._key(file)) == ("from-the-variable", "from-the-file")
    file.write_bytes(b"\xff")
    with pytest.raises(InvalidInput, match="--key-file"):
        top._key(file)
