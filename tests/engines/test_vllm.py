"""What is asked of vLLM's engine object, which versions differ in. vLLM itself is not needed: real ones are in
tests/live."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from preble.engines.vllm import VllmBackend
from preble.errors import EngineError
from preble.transport.engine_servers.server_info import EventSource
from tests.support.transport import asynchronous

GIVEN = EventSource("ipc:///tmp/events", "ipc:///tmp/replay", "kv-events")


def backend_of(engine: Any) -> VllmBackend:
    backend = VllmBackend.__new__(VllmBackend)
    backend._engine, backend._events = engine, GIVEN
    return backend


def test_a_vllm_that_names_no_event_sources_publishes_where_it_was_told_to() -> None:
    """0.20.2 has no `get_kv_event_sources`, which a worker asked for."""
    assert backend_of(SimpleNamespace())._event_sources() == [GIVEN]


def test_a_vllm_that_names_them_is_followed_rank_by_rank() -> None:
    named = {
        1: SimpleNamespace(endpoint="tcp://b", replay_endpoint=None),
        0: SimpleNamespace(endpoint="tcp://a", replay_endpoint="tcp://c"),
    }
    engine = SimpleNamespace(get_kv_event_sources=lambda: named)
    found = [(one.endpoint, one.replay_endpoint) for one in backend_of(engine)._event_sources()]
    assert found == [("tcp://a", "tcp://c"), ("tcp://b", "")]


@asynchronous
async def test_several_ranks_of_such_a_vllm_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2))
    engine = SimpleNamespace(vllm_config=config)
    module = ModuleType("vllm.v1.engine.async_llm")
    module.AsyncLLM = SimpleNamespace(from_engine_args=lambda *_, **__: engine)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", module)
    backend = backend_of(None)
    backend._arguments = None
    monkeypatch.setattr(backend, "_stat_logger", lambda: None)
    with pytest.raises(EngineError, match="ranks publish cache events"):
        await backend.start()
