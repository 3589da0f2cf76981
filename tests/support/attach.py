"""What the tests of attached servers share: an engine's event publisher with real sockets, which can lose, cut and
start again, and SGLang's and vLLM's HTTP servers as far as Preble speaks with them.

The formats are those of SGLang 0.5.23 and vLLM 0.32.0, read from their sources and compared with what real ones
answered.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgpack
import zmq
import zmq.asyncio
from aiohttp import web

from tests.support.transport import expected_tokens

BLOCK = 4
CHUNKS = 8  # of a prefill that takes time
END = b"\xff" * 8


def batch(seconds: float, *events: Any) -> bytes:
    """A batch as an engine writes it."""
    return bytes(msgpack.packb([float(seconds), list(events), 0]))


class FakePublisher:
    """An engine's publisher: PUB and, unless `replay` is False, the socket that replays what it keeps.

    `with_topic`: whether replies hold the topic frame. `kept`: batches it keeps. `cut_after`: replies after which the
    next replay breaks off, without an end. `drop_once`: batches that the next replay leaves out, as a full queue does.
    `mute`: replays are not answered.
    """

    def __init__(
        self,
        *,
        with_topic: bool = True,
        kept: int = 10_000,
        replay: bool = True,
        ports: tuple[int, int] = (0, 0),
        topic: bytes = b"kv",
    ) -> None:
        self.context = zmq.asyncio.Context()
        self.topic = topic
        self.with_topic = with_topic
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self.next_seq = 0
        self.cut_after = 0
        self.drop_once: set[int] = set()
        self.mute = False
        self.asked: list[int] = []
        self.subscribed = asyncio.Event()
        # A PUB that shows who subscribes, so that no test need wait for a while.
        self.publisher = self.context.socket(zmq.XPUB)
        self.publisher.xpub_verbose = 1
        self.router = self.context.socket(zmq.ROUTER)
        self.ports = tuple(
            self._bind(socket, port) for socket, port in zip((self.publisher, self.router), ports, strict=True)
        )
        self.endpoint = f"tcp://127.0.0.1:{self.ports[0]}"
        self.replay_endpoint = f"tcp://127.0.0.1:{self.ports[1]}" if replay else ""
        self._tasks = [asyncio.ensure_future(loop) for loop in (self._subscriptions(), self._replays())]

    @staticmethod
    def _bind(socket: zmq.asyncio.Socket, port: int) -> int:
        socket.linger = 0
        socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        return int(socket.last_endpoint.rsplit(b":", 1)[1])

    async def _subscriptions(self) -> None:
        while True:
            if (await self.publisher.recv())[:1] == b"\x01":
                self.subscribed.set()

    async def _replays(self) -> None:
        while True:
            identity, empty, start = await self.router.recv_multipart()
            assert empty == b"" and len(start) == 8, "the publisher takes identity, empty, number"
            self.asked.append(int.from_bytes(start, "big"))
            if self.mute:
                continue
            dropped, self.drop_once = self.drop_once, set()
            replies = [(n, payload) for n, payload in self.buffer if n >= self.asked[-1] and n not in dropped]
            cut, self.cut_after = self.cut_after, 0
            for seq, payload in replies[: cut or None]:
                await self._reply(identity, self.topic, seq.to_bytes(8, "big"), payload)
            if not cut:
                await self._reply(identity, b"", END, b"")

    async def _reply(self, identity: bytes, topic: bytes, seq: bytes, payload: bytes) -> None:
        await self.router.send_multipart([identity, b"", *([topic] if self.with_topic else []), seq, payload])

    async def publish(self, payload: bytes, *, lose: bool = False) -> int:
        """Publish and keep a batch; `lose` it on the way. Returns its number."""
        seq = self.next_seq
        self.next_seq += 1
        self.buffer.append((seq, payload))
        if not lose:
            await self.send(seq, payload)
        return seq

    async def send(self, seq: int, payload: bytes) -> None:
        """Send a frame, whatever it says."""
        await self.publisher.send_multipart([self.topic, seq.to_bytes(8, "big"), payload])

    async def close(self) -> None:
        """Vanish."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.context.destroy(linger=0)


class FakeServer:
    """An SGLang ("sglang") or vLLM ("vllm") server on the test's own loop; it answers what the simulated engine would.

    It caches whole blocks, publishes them as its engine does and counts hits by them, each rank for itself. `on_token`,
    when given, is asked before each output token: what it returns is sent instead. `awake` cleared, it answers nobody;
    `freeze` hangs its engine only.
    """

    def __init__(
        self,
        kind: str,
        *,
        ranks: int = 1,
        events: bool = True,
        api_key: str = "",
        life: int = 1,
        port: int = 0,
        host: str = "127.0.0.1",
        publishers: Sequence[FakePublisher] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.tls = tls
        self.kind = kind
        self.ranks = ranks
        self.events = events
        self.api_key = api_key
        self.life = life
        self.port = port
        self.host = host
        self.publishers = publishers if publishers is not None else consecutive_publishers(ranks)
        self.awake = asyncio.Event()
        self.awake.set()
        self.works = asyncio.Event()
        self.works.set()
        self.tokens_made = 0
        self.before_prefill: Callable[[Sequence[int]], Awaitable[object] | None] = lambda prompt: None
        self.prefill_seconds = 0.0
        self.blocks_taken = 0  # by prompts so far, as vLLM's metrics show it
        self._frozen_text = ""
        self._held_port: socket.socket | None = None
        self.on_token: Callable[[int], bytes | None] | None = None
        self.pause_seconds = 0.0
        self.lie_tokens = 0
        self.answers: dict[str, Any] = {}  # path -> (status, body) sent instead
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.aborted: list[str] = []
        self.cut_off = 0
        self.running = 0
        self.cached: list[dict[tuple[int, ...], int]] = [{} for _ in range(ranks)]
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"

    async def start(self) -> FakeServer:
        self.let_go()
        app = web.Application(middlewares=[self._meet], client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.001, handler_cancellation=True)  # 0: no limit
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, ssl_context=self.tls)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def kill(self, *, keep_port: bool = False) -> None:
        """Drop every connection and close the port. With `keep_port` nobody else gets it until `let_go` or the next
        `kill`: on a busy machine another test's socket has it within milliseconds, and is taken for this server."""
        runner, self._runner = self._runner, None
        self.let_go()
        if runner is not None:
            await runner.cleanup()
            self._held_port = hold(self.host, self.port) if keep_port else None
        for publisher in self.publishers:
            await publisher.close()
        self.publishers = ()

    def let_go(self) -> None:
        """Give the port of a killed server to whoever wants it, such as its successor."""
        held, self._held_port = self._held_port, None
        if held is not None:
            held.close()

    def freeze(self) -> None:
        """The engine makes no token any more, and what the server says of it stays what it was."""
        self._frozen_text = self._metrics_text()
        self.works.clear()

    def thaw(self) -> None:
        """It goes on."""
        self._frozen_text = ""
        self.works.set()

    # --- answers ------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _meet(self, request: web.Request, handler: Any) -> web.StreamResponse:
        await self.awake.wait()
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path in self.answers:
            status, body = self.answers[request.path]
            return web.Response(status=status, body=body)
        response: web.StreamResponse = await handler(request)
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        answer = getattr(self, f"_{self.kind}_{request.path.strip('/').replace('/', '_')}", None)
        if answer is None:
            return web.Response(status=404)
        result = await answer(request)
        return result if isinstance(result, web.StreamResponse) else web.json_response(result)

    async def _sglang_server_info(self, _: web.Request) -> Any:
        first = self.publishers[0]
        described = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": first.ports[0], "topic": "kv"}
        described |= {"block_size": BLOCK, "dp_size": self.ranks, "replay_endpoint_port_base": first.ports[1]}
        return {
            **{"version": "0.5.23", "served_model_name": "tiny", "page_size": BLOCK, "context_length": 4096},
            **{"max_total_num_tokens": 50_000, "max_running_requests": 8, "dp_size": self.ranks},
            "startup_time": {"scheduler_e2e": 5.0 + self.life},
            "kv_events": described if self.events else None,
        }

    async def _sglang_v1_loads(self, _: web.Request) -> Any:
        load = {"num_running_reqs": self.running, "num_waiting_reqs": 0, "num_used_tokens": 0}
        return {"loads": [{**load, "dp_rank": rank, "max_total_num_tokens": 50_000} for rank in range(self.ranks)]}

    async def _sglang_abort_request(self, request: web.Request) -> Any:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _vllm_v1_models(self, _: web.Request) -> Any:
        return {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 4096}]}

    async def _vllm_version(self, _: web.Request) -> Any:
        return {"version": "0.32.0"}

    async def _vllm_health(self, _: web.Request) -> Any:
        return web.Response()

    async def _vllm_metrics(self, _: web.Request) -> Any:
        return web.Response(text=self._frozen_text or self._metrics_text())

    def _metrics_text(self) -> str:
        lines = ["# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig"]
        for rank in range(self.ranks):
            cache = f'block_size="{BLOCK}",cache_dtype="auto",engine="{rank}",num_gpu_blocks="12500"'
            lines.append(f"vllm:cache_config_info{{{cache}}} 1.0")
            for name in ("running", "waiting"):
                lines.append(f'vllm:num_requests_{name}{{engine="{rank}",model_name="tiny"}} {float(self.running)}')
            lines.append(f'vllm:generation_tokens_total{{engine="{rank}",model_name="tiny"}} {float(self.tokens_made)}')
            share = self.blocks_taken % 1000 / 1000
            lines.append(f'vllm:kv_cache_usage_perc{{engine="{rank}",model_name="tiny"}} {share}')
        lines.append(f"process_start_time_seconds {1.7e9 + self.life}")
        return "\n".join(lines) + "\n"

    async def _vllm_kv_event_sources(self, _: web.Request) -> Any:
        return {
            str(rank): {
                **{"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"},
                **{"endpoint": f"tcp://*:{one.ports[0]}", "replay_endpoint": f"tcp://*:{one.ports[1]}"},
            }
            for rank, one in enumerate(self.publishers if self.events else ())
        }

    # --- generating ---------------------------------------------------------------------------------------------------

    async def _sglang_generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        choose = body["sampling_params"]
        count, rank = choose["max_new_tokens"], body.get("routed_dp_rank") or 0

        def line(tokens: list[int], cached: int) -> dict[str, Any]:
            reason = {"type": "length", "length": count} if len(tokens) == count else None
            meta = {"id": body.get("rid"), "cached_tokens": cached, "finish_reason": reason, "dp_rank": rank}
            meta["prompt_tokens"] = len(body["input_ids"])
            return {"text": None, "output_ids": tokens, "meta_info": {**meta, "completion_tokens": len(tokens)}}

        return await self._stream(request, body, body["input_ids"], count, rank, line)

    async def _vllm_v1_completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["return_token_ids"] and body["stream_options"] == {"include_usage": True}
        count, rank = body["max_tokens"], int(request.headers.get("X-data-parallel-rank", 0))

        def line(tokens: list[int], _: int) -> dict[str, Any]:
            choice = {"index": 0, "text": "?", "finish_reason": "length" if len(tokens) == count else None}
            return {"id": "cmpl-1", "object": "text_completion", "choices": [{**choice, "token_ids": tokens[-1:]}]}

        return await self._stream(request, body, body["prompt"], count, rank, line)

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        prompt: list[int],
        count: int,
        rank: int,
        line: Callable[[list[int], int], dict[str, Any]],
    ) -> web.StreamResponse:
        self.bodies.append(body)
        self.headers.append(request.headers)
        cached = self.hit(prompt, rank) + self.lie_tokens
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        try:
            await self._store(prompt, rank)
            await self._prefill(prompt)
            tokens: list[int] = []
            for token in expected_tokens(prompt, count):
                instead = self.on_token(len(tokens)) if self.on_token is not None else None
                await self.works.wait()
                self.tokens_made += 1
                tokens.append(token)
                await response.write(instead or b"data: " + json.dumps(line(tokens, cached)).encode() + b"\n\n")
                await asyncio.sleep(self.pause_seconds)
                await self.awake.wait()
            if self.kind == "vllm":
                usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": cached}}
                await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.cut_off += 1
            raise
        finally:
            self.running -= 1
        return response

    async def _prefill(self, prompt: Sequence[int]) -> None:
        """Chunk by chunk, which takes blocks."""
        if (prepared := self.before_prefill(prompt)) is not None:
            await prepared
        for _ in range(CHUNKS if self.prefill_seconds else 0):
            await asyncio.sleep(self.prefill_seconds / CHUNKS)
            self.blocks_taken += 1

    def hit(self, prompt: Sequence[int], rank: int = 0) -> int:
        """Tokens of a prompt that are cached, its last never."""
        hit = 0
        while hit + BLOCK < len(prompt) and tuple(prompt[: hit + BLOCK]) in self.cached[rank]:
            hit += BLOCK
        return hit

    async def _store(self, prompt: Sequence[int], rank: int) -> None:
        """Cache a prompt's whole blocks, and say so."""
        known, parent = self.cached[rank], None
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            prefix = tuple(prompt[:end])
            if prefix not in known:
                known[prefix] = len(known) + 1 + 1_000_000 * self.life
                fields = {"block_hashes": [known[prefix]], "parent_block_hash": parent, "block_size": BLOCK}
                event = {"type": "BlockStored", **fields, "token_ids": list(prefix[-BLOCK:]), "lora_id": None}
                await self.publishers[rank].publish(batch(1000.0 * self.life + len(known), event))
            parent = known[prefix]


def hold(host: str, port: int) -> socket.socket | None:
    """Keep a port without listening there; None where somebody has it already."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of its last owner may linger
    try:
        held.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # whoever comes next shares it with nobody
    except OSError:
        held.close()
        return None
    return held


def consecutive_publishers(count: int) -> list[FakePublisher]:
    """Publishers on ports that follow each other, as those of an engine's ranks do."""
    for _ in range(100):
        made = [FakePublisher()]
        try:
            for rank in range(1, count):
                made.append(FakePublisher(ports=(made[0].ports[0] + rank, made[0].ports[1] + rank)))
        except zmq.ZMQError:
            for publisher in made:
                publisher.context.destroy(linger=0)
            continue
        return made
    raise AssertionError("no free ports in a row")
