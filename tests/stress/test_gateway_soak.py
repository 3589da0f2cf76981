"""A small soak of the gateway: what `make soak` does for a minute with a thousand clients, with a hundred; and
whether its examination would see what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress import gateway_soak

IDLE = {"preble_leases_active": 0.0, "preble_choices_live": 0.0, "preble_generations_live": 0.0}
IDLE |= {"preble_tasks": 7.0, "process_open_fds": 30.0, 'preble_worker_requests{worker="a"}': 0.0}


@pytest.mark.parametrize("servers", [False, True])
def test_clients_that_hang_up_leave_nothing_behind(tmp_path: Path, servers: bool) -> None:
    assert gateway_soak.soak(100, 120.0, 400, seed=1, directory=tmp_path, servers=servers) == []


@pytest.mark.parametrize("name", list(IDLE))
def test_each_thing_that_stays_behind_is_named(name: str) -> None:
    assert gateway_soak.left_behind(IDLE, IDLE) == []
    (found,) = gateway_soak.left_behind(IDLE | {name: IDLE[name] + 1}, IDLE)
    assert found.startswith(name)


def test_memory_may_move_a_little_and_not_grow() -> None:
    name = "process_resident_memory_bytes"
    assert gateway_soak.grown({name: 100e6}, {name: 110e6}) == []
    assert gateway_soak.grown({name: 100e6}, {name: 120e6}) == [f"{name} went from 100000000 to 120000000"]


@pytest.mark.parametrize(
    ("answer", "whole"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n", False),
        (b"HTTP/1.1 503 no\r\n\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", False),
        (b'HTTP/1.1 200 OK\r\n\r\n{"error"}data: [DONE]\n\n\r\n0\r\n\r\n', False),
    ],
)
def test_a_whole_answer_is_reported_from_a_broken_one(answer: bytes, whole: bool) -> None:
    assert gateway_soak.is_whole(answer) is whole
