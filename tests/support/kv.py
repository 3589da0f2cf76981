"""What tests of moved KV share: a network between two workers that does as a test says, an engine whose KV is its
tokens, and workers that move KV in small parts. No test is in here."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable

import numpy as np
import numpy.typing as npt
import zmq

from preble.engines.base import EngineInfo
from preble.errors import EngineError
from tests.support.transport import HANG_SECONDS

PART_TOKENS = 64
_SMALL_PARTS = """
import functools, sys
from preble.transport.kv_transfers import KvLimits
from preble.worker import process
process.WorkerConfig = functools.partial(process.WorkerConfig, kv=KvLimits(part_bytes={part_bytes}))
from preble.cli import main
sys.exit(main())
"""
Judge = Callable[[int, list[bytes]], list[list[bytes]]]


def small_parts_command(token_bytes: int) -> list[str]:
    """`preble worker` with parts of PART_TOKENS tokens, so that short prompts have several."""
    script = _SMALL_PARTS.format(part_bytes=PART_TOKENS * token_bytes)
    return [sys.executable, "-c", script, "worker", "--log-level", "error"]


def all_pass(number: int, parts: list[bytes]) -> list[list[bytes]]:
    """What is sent comes."""
    return [parts]


class KvRelay:
    """Stands between one worker that pulls and its source, in a thread. `judge` is given each answer, counted from 0,
    and says what comes instead. `break_off` closes the connection to who pulls."""

    def __init__(self, target: str, judge: Judge = all_pass) -> None:
        self.judge = judge
        self.answers = 0
        self.asks = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._back = self._context.socket(zmq.DEALER)
        self._front.linger = self._back.linger = 0
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self._back.connect(target)
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-relay", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._back, zmq.POLLIN)
        identity = b""
        while not self._closing.is_set():
            ready = dict(poller.poll(5))
            if self._front in ready:
                identity, *parts = self._front.recv_multipart()
                self.asks += 1
                self._back.send_multipart(parts)
            if self._back in ready:
                answer = self._back.recv_multipart()
                for parts in self.judge(self.answers, answer):
                    self._front.send_multipart([identity, *parts])
                self.answers += 1
        self._context.destroy(linger=0)

    def break_off(self) -> None:
        """Close both connections, at once."""
        self._closing.set()
        self._thread.join(HANG_SECONDS)

    def __enter__(self) -> KvRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self.break_off()


class TokenEngine:
    """An engine that moves KV and computes nothing: the KV of a token is the token, so that one in the wrong place is
    seen. `cached`: one prompt for each namespace."""

    info = EngineInfo("tokens", "tokens", 1000, kv_layout="tokens", kv_token_bytes=4)

    def __init__(self, cached: dict[Hashable, npt.NDArray[np.int32]] | None = None) -> None:
        self.cached = cached or {}
        self.fails = False

    def cached_tokens(self, token_ids: npt.NDArray[np.int32], namespace: Hashable) -> int:
        """As `MovesKv`."""
        known = self.cached.get(namespace, np.zeros(0, np.int32))
        count = min(len(known), len(token_ids))
        differ = np.nonzero(known[:count] != token_ids[:count])[0]
        return int(differ[0]) if len(differ) else count

    def export_kv(self, token_ids: npt.NDArray[np.int32], namespace: Hashable, first: int) -> memoryview:
        """As `MovesKv`."""
        if self.fails:
            raise EngineError("the device is gone")
        end = self.cached_tokens(token_ids, namespace)
        return memoryview(token_ids[first : max(first, end)].tobytes())

    def import_kv(
        self, token_ids: npt.NDArray[np.int32], namespace: Hashable, first: int, data: bytes | memoryview
    ) -> int:
        """As `MovesKv`."""
        if self.fails:
            raise EngineError("the device is gone")
        found = np.frombuffer(data, np.int32)
        assert np.array_equal(found, token_ids[first:]), "KV of other tokens"
        if self.cached_tokens(token_ids, namespace) >= first:
            self.cached[namespace] = np.array(token_ids)
        return self.cached_tokens(token_ids, namespace)
