"""Sessions: which headers and fields name one, which of them counts, and where the hint arrives. Starts no process."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from preble import GlobalScheduler, ManualClock, SamplingParams
from preble.errors import InvalidInput
from preble.gateway.core import sessions
from preble.gateway.core.metrics import Metrics
from preble.gateway.core.request_context import RequestContext
from preble.gateway.core.sessions import NO_SESSION, hint_of_headers, with_body
from preble.gateway.text.choices import Choice, ChoiceJob
from preble.router import Router
from preble.scheduling.records import DecisionRecording, from_json, to_json
from preble.transport import wire
from preble.types import SessionHint
from tests.support.transport import FAST, ScriptedWorker, asynchronous


def hint(**headers: str) -> SessionHint:
    """The hint of these headers; a name's underscores stand for hyphens, two of them for one."""
    named = {name.replace("__", "\0").replace("_", "-").replace("\0", "_"): value for name, value in headers.items()}
    return hint_of_headers([(name.encode(), value.encode("latin-1")) for name, value in named.items()])


METADATA = json.dumps({"session_id": "talk", "thread_id": "t2", "parent_thread_id": "t1", "turn_id": "9"})
AGENTS = {
    "Claude Code": (
        {"x_claude_code_session_id": "talk", "x_claude_code_agent_id": "a2", "x_claude_code_parent_agent_id": "a1"},
        SessionHint("talk", "a1", "a2"),
    ),
    "Codex": (
        {"session_id": "talk", "thread_id": "t2", "x_codex_parent_thread_id": "t1", "x_codex_window_id": "w:0"},
        SessionHint("talk", "t1", "t2"),
    ),
    "Codex of before": ({"session__id": "talk", "conversation__id": "other"}, SessionHint("talk")),
    "Codex, its metadata alone": ({"x_codex_turn_metadata": METADATA}, SessionHint("talk", "t1", "t2")),
    "Codex, its window alone": ({"x_codex_window_id": "talk:17"}, SessionHint("talk")),
    "Dynamo": (
        {"x_dynamo_session_id": "talk", "x_dynamo_parent_session_id": "root"},
        SessionHint("talk", "root"),
    ),
    "OpenCode": (
        {"x_session_affinity": "a", "x_session_id": "talk", "x_parent_session_id": "p"},
        SessionHint("talk", "p"),
    ),
    "smg": ({"x_smg_routing_key": "talk"}, SessionHint("talk")),
    "a parent alone": ({"x_parent_session_id": "p"}, SessionHint("", "p")),
    "nobody": ({"accept": "x", "x_request_id": "y"}, NO_SESSION),
}


@pytest.mark.parametrize(("headers", "expected"), AGENTS.values(), ids=AGENTS.keys())
def test_headers_of_agents_become_one_hint(headers: dict[str, str], expected: SessionHint) -> None:
    assert hint(**headers) == expected


TABLES = {"session": sessions.SESSION_HEADERS, "parent": sessions.PARENT_HEADERS, "agent": sessions.AGENT_HEADERS}


@pytest.mark.parametrize(("part", "names"), TABLES.items())
def test_the_first_header_of_each_table_counts_whatever_the_order(part: str, names: tuple[str, ...]) -> None:
    plain = [name for name in names if name != "x-codex-turn-metadata"]
    for first, name in enumerate(plain):
        given = [(one.encode(), one.encode()) for one in reversed(plain[first:])]
        assert getattr(hint_of_headers(given), part) == name


def test_the_tables_are_those_that_the_module_documents() -> None:
    text = " ".join((sessions.__doc__ or "").split())
    for names in TABLES.values():
        assert ", ".join(names) in text


@pytest.mark.parametrize(
    "value", ["", " ", "a b", "a\tb", "x" * 129, "\x7f", "\xe9", "a\r\nset-cookie: b", "\x00"], ids=repr
)
def test_what_is_no_name_is_passed_over_for_the_next_header(value: str) -> None:
    assert hint(x_session_id=value, x_smg_routing_key="talk") == SessionHint("talk")
    assert hint(x_session_id=value) is NO_SESSION
    if value:
        with pytest.raises(InvalidInput, match=r"SessionHint\.parent"):
            SessionHint("a", value)


@pytest.mark.parametrize(
    "value",
    ["", "{", "[]", "7", '{"session_id": 7}', '{"session_id": null}', '{"session_id": "a b"}', "[" * 4000,
     '{"session_id": "talk", "x": "' + "y" * 4096 + '"}'],
    ids=lambda value: value[:24],
)  # fmt: skip
def test_metadata_that_is_none_names_nothing(value: str) -> None:
    assert hint(x_codex_turn_metadata=value) is NO_SESSION


def test_a_header_that_comes_twice_counts_once() -> None:
    assert hint_of_headers([(b"x-session-id", b"a"), (b"x-session-id", b"b")]) == SessionHint("a")


# --- bodies -----------------------------------------------------------------------------------------------------------


def test_a_field_of_the_body_names_a_session_where_no_header_does() -> None:
    key, user = with_body(NO_SESSION, prompt_cache_key="k"), with_body(NO_SESSION, user="someone@example.org")
    assert key.session.startswith("key-") and user.session.startswith("user-") and len(user.session) == 37
    assert with_body(NO_SESSION, prompt_cache_key="k", user="u") == key
    assert with_body(SessionHint("talk"), prompt_cache_key="k", user="u") == SessionHint("talk")
    assert with_body(SessionHint("", "p", "a"), user="u").parent == "p"
    assert "example" not in user.session, "it may be somebody's name"
    assert key.shared and user.shared, "many conversations may have it"
    assert not with_body(SessionHint("talk"), user="u").shared


@pytest.mark.parametrize("value", [None, "", 7, [], {}, True], ids=repr)
def test_a_field_that_is_no_text_names_nothing(value: Any) -> None:
    assert with_body(NO_SESSION, prompt_cache_key=value, user=value) is NO_SESSION


def test_any_text_of_a_body_becomes_a_name_of_the_same_length() -> None:
    lengths = {len(with_body(NO_SESSION, user=text).session) for text in ("a", "\ud800", "é" * 100_000, "a\r\nb")}
    assert lengths == {37}


# --- where it goes ----------------------------------------------------------------------------------------------------


def test_a_record_keeps_the_session_and_its_line_is_read_again() -> None:
    scheduler = GlobalScheduler(["a", "b"], clock=ManualClock(), record=DecisionRecording())
    named, unnamed = scheduler.schedule([1, 2, 3]), scheduler.schedule([1, 2, 3])
    scheduler.note_session(named.request_id, SessionHint("talk", "root", "agent"))
    scheduler.finish(named.request_id)
    scheduler.note_session(named.request_id, SessionHint("late"))
    scheduler.note_session("nobody", SessionHint("talk"))
    first, second = scheduler.records()
    assert first.session == SessionHint("talk", "root", "agent") and first.outcome is not None
    assert second.session is None
    assert [from_json(to_json(one)) for one in (first, second)] == [first, second]
    older = json.loads(to_json(first))
    del older["session"]["shared"]
    assert from_json(json.dumps(older)) == first
    older = {name: value for name, value in json.loads(to_json(second)).items() if name != "session"}
    assert from_json(json.dumps(older)) == second
    wrong = {**older, "session": {"session": "a b", "parent": "", "agent": ""}}
    with pytest.raises(InvalidInput, match="SessionHint.session"):
        from_json(json.dumps(wrong))
    scheduler.cancel(unnamed.request_id)
    scheduler.check()


def test_without_records_a_session_is_nobodys() -> None:
    scheduler = GlobalScheduler(["a"])
    scheduler.note_session(scheduler.schedule([1]).request_id, SessionHint("talk"))
    assert scheduler.records() == ()


class Noting(GlobalScheduler):
    """It notes the hints that it is asked with."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.hints: list[SessionHint | None] = []

    def schedule(self, *args: Any, **named: Any) -> Any:
        self.hints.append(named.get("session"))
        return super().schedule(*args, **named)


@asynchronous
async def test_a_routed_request_takes_its_session_to_the_decision_and_to_the_record() -> None:
    async def answer(worker: Any, submit: Any) -> None:
        await worker.send(wire.OutputChunk(submit.request_id, 0, (7,), 0, "length"))

    worker = ScriptedWorker(answer)
    scheduler = Noting([], record=DecisionRecording())
    async with Router([worker.endpoint], scheduler=scheduler, config=FAST) as router:
        for session in (SessionHint("talk"), None, NO_SESSION):
            async for _ in router.generate([1, 2, 3], session=session):
                pass
        with pytest.raises(InvalidInput, match="session must be a SessionHint"):
            router.generate([1], session="talk")  # type: ignore[arg-type]
    await worker.close()
    assert [record.session for record in scheduler.records()] == [SessionHint("talk"), None, None]
    assert scheduler.hints == [SessionHint("talk"), None, None]


def test_requests_that_name_a_session_are_counted() -> None:
    metrics = Metrics(ManualClock())
    for session in (SessionHint("talk"), SessionHint("talk", "root"), SessionHint("", "", "agent"), NO_SESSION):
        context = RequestContext("id", 0.0, session=session)
        metrics.request("/workers", 200, 0.1, context)  # it has no choices, and counts for nothing
        context.progress.choices = [Choice(ChoiceJob(0, "id", np.arange(3, dtype=np.int32), SamplingParams()))]
        metrics.request("/v1/completions", 200, 0.1, context)
    lines = [line for line in metrics.own_text().decode().splitlines() if line.startswith("preble_session_requests")]
    assert lines == [
        'preble_session_requests_total{names="session"} 2.0',
        'preble_session_requests_total{names="parent"} 1.0',
        'preble_session_requests_total{names="agent"} 1.0',
    ]
