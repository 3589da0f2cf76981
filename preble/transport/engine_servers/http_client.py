"""One running SGLang or vLLM server over HTTP. Owns the client: what is asked, how streams are read, and the bounds on
what is accepted; what a server's answers say of it is `server_info`'s, cache events are `kv_event_subscriber`'s.

    server = EngineServer("http://host:30000")
    info = await server.info()
    async for piece in server.generate(token_ids, sampling, request_id="r"):
        ...                                     # piece.token_ids, piece.cached_tokens, piece.finish_reason

|          | SGLang (0.5.23 read and run)          | vLLM (0.32 read and run)                                     |
|----------|---------------------------------------|--------------------------------------------------------------|
| generate | POST /generate, input_ids             | POST /v1/completions, prompt = ids, return_token_ids         |
| abort    | POST /abort_request, connection closed| connection closed                                            |
| rank     | routed_dp_rank in the body            | header X-data-parallel-rank                                  |
| load     | GET /v1/loads                         | GET /metrics                                                 |
| well?    | the same                              | GET /health                                                  |
| hit      | meta_info.cached_tokens, at once      | usage, at the end, with --enable-prompt-tokens-details       |

Needs aiohttp (the extra `attach`). Bodies and lines have a largest size; an answer that does not fit its form raises
`ProtocolError` and is never quoted, as it may hold parts of prompts. Belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...errors import (
    EngineError,
    HandshakeRefused,
    InvalidInput,
    MissingExtra,
    ProtocolError,
    QueueFull,
    TransportError,
)
from ...types import Claim, SamplingParams, TokenLogprob
from ..worker_address import check_worker_address, is_server
from .kv_event_codec import LoadReport
from .metrics_text import samples
from .request_forms import TokenIds, read_sglang_logprobs, read_vllm_logprobs, server_request
from .server_info import (
    RANKS_MAX,
    ServedName,
    ServerInfo,
    ServerOptions,
    digits,
    served_names,
    sglang_info,
    vllm_info,
)
from .tls import client_context

if TYPE_CHECKING:
    import aiohttp

# Headers that name the trace of what a task does; sent along with its requests.
TRACE_HEADERS: ContextVar[Mapping[str, str]] = ContextVar("TRACE_HEADERS", default=MappingProxyType({}))

_INT31, _INT63 = 2**31 - 1, 2**63 - 1
_METRICS_PATH = "/metrics"
_JSON_BYTES_MAX = 1 << 20  # of an answer that is no text of metrics
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_DONE = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # a share, in spite of its name; the older one last
_LOADS: tuple[str, ...] = (  # in the order of LoadReport's fields
    *("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens", "dp_rank"),
    "num_waiting_uncached_tokens",
)
_TEXT_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class ServerPiece:
    """New output tokens of a stream. `cached_tokens` comes once: with the first piece (SGLang) or the last (vLLM), or
    never. `finish_reason`, with the last: "stop", "length" or "abort". `logprobs`: one for each token, if wanted."""

    token_ids: tuple[int, ...]
    cached_tokens: int | None = None
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class EngineServer:
    """The server at `url`. Open from the first call until `close`."""

    def __init__(self, url: str, options: ServerOptions | None = None) -> None:
        if not is_server(url):
            raise InvalidInput(f"url must be http://HOST:PORT, got {url!r}")
        check_worker_address(url)
        self.url = url.rstrip("/")
        self.options = options or ServerOptions()
        self.connections = 0  # that were made for questions; one more: the server, or something before it, closed one
        self._known: ServerInfo | None = None
        self._session: aiohttp.ClientSession | None = None
        self._questions: aiohttp.ClientSession | None = None  # apart, so that its connections are only asked by

    # --- life ---------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close every connection; streams still read end with `TransportError`. Idempotent."""
        sessions, self._session, self._questions = (self._session, self._questions), None, None
        for session in sessions:
            if session is not None:
                await session.close()

    async def __aenter__(self) -> EngineServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = self._new_session()
        return self._session

    def _asked_by(self) -> aiohttp.ClientSession:
        if self._questions is None or self._questions.closed:
            trace = _aiohttp().TraceConfig()
            trace.on_connection_create_end.append(self._count_connection)
            self._questions = self._new_session(trace_configs=[trace])
        return self._questions

    async def _count_connection(self, *_: object) -> None:
        self.connections += 1

    def _new_session(self, **more: Any) -> aiohttp.ClientSession:
        client = _aiohttp()
        # Compressed, a body's size would say nothing of what becomes of it; it is not asked for, and not undone.
        headers = {"Accept-Encoding": "identity"}
        if self.options.api_key:
            headers["Authorization"] = f"Bearer {self.options.api_key}"
        # Requests are bounded by their owner, and a health question must never wait behind streams.
        timeout = client.ClientTimeout(total=None, sock_connect=self.options.answer_seconds)
        tls = client_context(self.options.ca_file) if self.url.startswith("https") else True
        connector = client.TCPConnector(limit=0, ssl=tls)
        session: aiohttp.ClientSession = client.ClientSession(
            connector=connector, headers=headers, timeout=timeout, auto_decompress=False, **more
        )
        return session

    # --- server info --------------------------------------------------------------------------------------------------

    async def info(self) -> ServerInfo:
        """Ask the server what it is; every call asks anew.

        Raises `TransportError` if it does not answer, `ProtocolError` if with something else, `HandshakeRefused` if it
        is no server we know or does not let us in, naming the flag or option that would.
        """
        status, body = await self._get("/server_info")
        if status == 200 and isinstance(answer := _json(body), Mapping) and "max_total_num_tokens" in answer:
            info = sglang_info(self.url, answer, self.options)
            info = replace(info, served=served_names(await self._get_json("/v1/models")))
            self._known = await self._with_metrics(info)
            return self._known
        self._check_usable(status)
        status, body = await self._get("/v1/models")
        self._check_usable(status)
        models = _json(body) if status == 200 else None
        version = await self._get_json("/version")
        if not isinstance(models, Mapping) or not isinstance(version, Mapping) or "version" not in version:
            raise HandshakeRefused(f"{self.url} is neither SGLang (/server_info) nor vLLM (/v1/models and /version)")
        status, metrics = await self._get(_METRICS_PATH)
        sources = await self._get_json("/kv_event_sources")
        self._known = await asyncio.to_thread(  # there may be megabytes of metrics
            vllm_info,
            self.url,
            models,
            metrics.decode("utf-8", "replace") if status == 200 else "",
            sources if isinstance(sources, Mapping) else {},
            str(version["version"]),
            self.options,
        )
        return self._known

    async def _with_metrics(self, info: ServerInfo) -> ServerInfo:
        """The same with what its metrics say, which it can be attached without: what is wrong with them is advice."""
        try:
            status, body = await self._get(_METRICS_PATH)
        except TransportError as error:
            return replace(info, advice=(*info.advice, f"{_METRICS_PATH}: {error}"))
        return await asyncio.to_thread(info.with_metrics, body.decode("utf-8", "replace")) if status == 200 else info

    async def served(self) -> tuple[ServedName, ...]:
        """The names that /v1/models lists now: adapters come and go. Raises `TransportError` if it does not answer."""
        return served_names(await self._get_json("/v1/models"))

    async def metrics(self) -> str | None:
        """The text of its /metrics now, None where it has none. Raises `TransportError` if it does not answer."""
        status, body = await self._get(_METRICS_PATH)
        return body.decode("utf-8", "replace") if status == 200 else None

    def _check_usable(self, status: int) -> None:
        if status >= 500:
            raise TransportError(f"{self.url} answers {status}: it fails, or is not ready yet")
        if status in (401, 403):
            raise HandshakeRefused(f"{self.url} answers {status}: give ServerOptions.api_key as its --api-key is")

    async def _engine(self) -> ServerInfo:
        return self._known or await self.info()

    async def load(self) -> tuple[LoadReport, ...]:
        """Requests running and waiting for each rank; () if the server is alive and does not say. Raises
        `TransportError` if it is not well. SGLang's own health question computes a token, so it is asked this only."""
        info = await self._engine()
        if info.engine == "sglang":
            status, body = await self._get("/v1/loads?include=core")
            if status == 404:
                await self._check_health()
                return ()
            self._check_well(status)
            return _sglang_loads(_json(body))
        await self._check_health()
        status, body = await self._get(_METRICS_PATH)
        return await asyncio.to_thread(_vllm_loads, body, info.kv_capacity_tokens) if status == 200 else ()

    async def check(self) -> tuple[LoadReport, ...] | None:
        """Whether the server is well, by what costs it least: its load where that is it, None where it was not asked
        for that: vLLM writes all of its metrics for it, and nothing for /health. Raises as `load`."""
        if (await self._engine()).engine == "sglang":
            return await self.load()
        await self._check_health()
        return None

    async def _check_health(self) -> None:
        status, _ = await self._get("/health")
        self._check_well(status)

    def _check_well(self, status: int) -> None:
        if status != 200:
            raise TransportError(f"{self.url} answers {status} when asked how it is")

    # --- requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        token_ids: TokenIds,
        sampling: SamplingParams | None = None,
        *,
        request_id: str,
        rank: int | None = None,
        salt: str = "",
        lora: str = "",
        claim: Claim | None = None,
    ) -> AsyncIterator[ServerPiece]:
        """Stream the output for 1-D prompt token ids; `sampling.max_new_tokens` tokens at most, from here on.

        `request_id` must be unused at the server. `rank`: the data-parallel rank to run on. `salt` and `lora` keep
        caches apart. `claim`: its class is the request's priority where the server serves by that. Closing the
        iterator, or cancelling who reads it, closes the connection, at which the engine aborts; call `abort` as well
        where it must stop at once.

        Raises `InvalidInput` (the server refuses the request as such), `QueueFull`, `EngineError` (404, 501),
        `TransportError` (broken off, or the server failed: another may do), `ProtocolError` (an answer that is none).
        """
        info = await self._engine()
        sampling = sampling or SamplingParams()
        path, headers, body = server_request(info, token_ids, sampling, request_id, rank, salt, lora, claim)
        wanted = sampling.logprobs
        stream = _SglangStream(info.cumulative, wanted) if info.engine == "sglang" else _VllmStream(wanted)
        client = _aiohttp()
        try:
            async with self._http().post(
                self.url + path, json=body, headers={**TRACE_HEADERS.get(), **headers}, allow_redirects=False
            ) as response:
                if response.status != 200:
                    most = min(self.options.max_body_bytes, _JSON_BYTES_MAX)
                    raise self._refusal(response.status, await self._read(response, most))
                async for line in self._lines(response):
                    piece = stream.take(line)
                    if piece is not None:
                        yield piece
                    if stream.ended:
                        return
                if stream.last is not None:
                    yield stream.last
                    return
        except (client.ClientError, asyncio.TimeoutError, OSError) as error:
            raise TransportError(f"{self.url} broke off: {type(error).__name__}") from error
        raise TransportError(f"{self.url} ended the stream before the request's end")

    async def abort(self, request_id: str) -> None:
        """Ask the engine to stop a request; unknown ids do nothing. Raises `TransportError`. vLLM has no such question:
        there closing the stream is all."""
        info = await self._engine()
        if info.engine == "sglang":
            await self._ask(self._http(), "POST", "/abort_request", {"rid": request_id})

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The data lines of a stream of server-sent events, without `data:`; the one that says done ends them."""
        self._check_plain(response)
        waiting = bytearray()
        async for received in response.content.iter_any():
            waiting += received
            *lines, rest = waiting.split(b"\n")
            if len(rest) > self.options.max_line_bytes or any(len(x) > self.options.max_line_bytes for x in lines):
                raise ProtocolError(f"{self.url} sent a line of more than {self.options.max_line_bytes} bytes")
            waiting = rest
            for line in lines:
                data = bytes(line[5:]).strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    return
                if data:
                    yield data

    def _refusal(self, status: int, body: bytes) -> Exception:
        """The error for an answer that is no stream. Its text may quote the prompt, so it is not shown."""
        if status in (400, 413, 422):
            return InvalidInput(f"{self.url} refuses the request ({status}): {_complaint(body)}")
        if status in (429, 503):
            return QueueFull(f"{self.url} takes no more requests ({status})")
        if status in (401, 403, 404, 405, 501):
            return EngineError(f"{self.url} answers {status}: its API key, or this request, is not for it")
        return TransportError(f"{self.url} failed ({status})")

    # --- small questions ----------------------------------------------------------------------------------------------

    async def _get(self, path: str) -> tuple[int, bytes]:
        return await self._ask(self._asked_by(), "GET", path, None)

    async def _get_json(self, path: str) -> Any:
        """The answer, None if there is none at this path."""
        status, body = await self._get(path)
        return _json(body) if status == 200 else None

    async def _ask(self, session: aiohttp.ClientSession, method: str, path: str, body: Any) -> tuple[int, bytes]:
        client = _aiohttp()
        limit = client.ClientTimeout(total=self.options.answer_seconds)
        for attempt in (1, 2):
            try:
                async with session.request(
                    method, self.url + path, json=body, timeout=limit, allow_redirects=False
                ) as response:
                    most = self.options.max_body_bytes
                    most = most if path == _METRICS_PATH else min(most, _JSON_BYTES_MAX)
                    return response.status, await self._read(response, most)
            except asyncio.TimeoutError as error:
                raise TransportError(f"no answer from {self.url} in {self.options.answer_seconds} s") from error
            except client.ClientConnectionError as error:
                # A kept connection that the server has just closed says nothing about the server.
                if attempt == 2 or isinstance(error, client.ClientConnectorError):
                    raise Unreachable(f"{self.url} cannot be reached: {_reason(error)}") from error
            except client.ClientError as error:
                raise ProtocolError(f"{self.url} does not speak HTTP: {type(error).__name__}") from error
        raise AssertionError("the second attempt returns or raises")

    async def _read(self, response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
        """A body of bounded size."""
        self._check_plain(response)
        body = bytearray()
        with contextlib.suppress(asyncio.IncompleteReadError):
            async for part in response.content.iter_any():
                body += part
                if len(body) > bytes_max:
                    raise ProtocolError(f"{self.url} sent a body of more than {bytes_max} bytes")
        return bytes(body)

    def _check_plain(self, response: aiohttp.ClientResponse) -> None:
        """Raise `ProtocolError` for a body that is compressed: nobody asked for that."""
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ProtocolError(f"{self.url} sent a compressed body, which it was not asked for")


def _reason(error: Exception) -> str:
    """Why there is no connection, as far as the system says."""
    cause = getattr(error, "os_error", None)
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused, nothing listens there"
    certificate = getattr(error, "certificate_error", None)
    if certificate is not None:
        return f"its certificate is not accepted ({getattr(certificate, 'verify_message', certificate)})"
    if isinstance(cause, socket.gaierror):
        return f"unknown host ({cause.strerror})"
    return type(error).__name__


class Unreachable(TransportError):
    """Nobody listens there, or the connection is cut: the server is gone, not slow."""


# --- the two stream forms ---------------------------------------------------------------------------------------------


class _SglangStream:
    """`{"output_ids": [...], "meta_info": {...}}` a line; the ids so far, or with a flag of the server only the new."""

    def __init__(self, cumulative: bool, logprobs: int | None) -> None:
        self.ended = False
        self.last: ServerPiece | None = None  # none is kept back
        self._cumulative = cumulative
        self._logprobs = logprobs
        self._have = 0
        self._hit_reported = False

    def take(self, line: bytes) -> ServerPiece | None:
        answer = _answer_of(line)
        meta = answer.get("meta_info")
        if not isinstance(meta, Mapping):
            raise ProtocolError("stream: meta_info must be an object")
        ids = _token_ids(answer.get("output_ids"), "output_ids")
        fresh = ids[self._have :] if self._cumulative else ids
        if self._cumulative and len(ids) < self._have:
            raise ProtocolError(f"stream: output_ids shrank from {self._have} to {len(ids)}")
        logprobs = read_sglang_logprobs(meta, self._have if self._cumulative else 0, self._logprobs)
        self._have += len(fresh)
        reason = _sglang_reason(meta.get("finish_reason"))
        self.ended = reason is not None
        if not fresh and reason is None:
            return None
        cached, self._hit_reported = None if self._hit_reported else _count(meta.get("cached_tokens")), True
        return ServerPiece(fresh, cached, reason, logprobs)


class _VllmStream:
    """OpenAI completions with token ids; the hit comes with the usage, after the last token, so that one is kept back
    until then."""

    def __init__(self, logprobs: int | None) -> None:
        self.ended = False
        self.last: ServerPiece | None = None  # what ends the stream if no usage comes
        self._logprobs = logprobs

    def take(self, line: bytes) -> ServerPiece | None:
        answer = _answer_of(line)
        choices, usage = answer.get("choices"), answer.get("usage")
        if not isinstance(choices, list) or len(choices) > 1:
            raise ProtocolError("stream: choices must be a list of at most one")
        if not choices:
            if self.last is None:
                return None
            self.ended = True
            return replace(self.last, cached_tokens=_usage_cached(usage))
        choice = choices[0]
        if not isinstance(choice, Mapping):
            raise ProtocolError("stream: a choice must be an object")
        reason = choice.get("finish_reason")
        if reason is not None and reason not in ("stop", "length", "abort"):
            raise TransportError("the engine ended the request for no reason that we know")
        if reason == "abort":
            raise TransportError("the engine aborted the request")
        ids = choice.get("token_ids")
        if ids is None and (choice.get("text") or reason == "length"):
            raise HandshakeRefused("the server does not return token ids (return_token_ids, vLLM 0.10.2 on)")
        tokens = _token_ids(ids or [], "token_ids")
        logprobs = read_vllm_logprobs(choice.get("logprobs"), self._logprobs) if tokens else ()
        piece = ServerPiece(tokens, None, reason, logprobs)
        if reason is not None:
            self.last = piece
            return None
        return piece if piece.token_ids else None


def _sglang_reason(answer: Any) -> str | None:
    if answer is None:
        return None
    kind = answer.get("type") if isinstance(answer, Mapping) else None
    if kind == "abort":
        raise _stream_error({"message": "aborted", "code": answer.get("status_code")})
    if kind not in ("stop", "length"):
        raise ProtocolError("stream: finish_reason.type must be stop, length or abort")
    return str(kind)


def _stream_error(answer: Any) -> Exception:
    code = answer.get("code") if isinstance(answer, Mapping) else None
    if code in (400, 413, 422):
        return InvalidInput(f"the engine refuses the request ({code})")
    if code in (429, 503):
        return QueueFull(f"the engine takes no more requests ({code})")
    return TransportError(f"the engine gave the request up ({code if type(code) is int else 'no code'})")


def _usage_cached(usage: Any) -> int | None:
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    return _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None


# --- reading what was sent --------------------------------------------------------------------------------------------


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError(f"an answer of {len(body)} bytes is no JSON") from None


def _answer_of(line: bytes) -> Mapping[str, Any]:
    """What a line of a stream says. Raises the error that it reports."""
    answer = _json(line)
    if not isinstance(answer, Mapping):
        raise ProtocolError("stream: a line must be a JSON object")
    if "error" in answer:
        raise _stream_error(answer["error"])
    return answer


def _token_ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token <= _INT31 for token in value):
        raise ProtocolError(f"stream: {name} must be a list of ints in [0, {_INT31}]")
    return tuple(value)


def _count(value: Any) -> int | None:
    """A number of tokens; None where the server reports none, or nonsense."""
    return value if type(value) is int and 0 <= value <= _INT31 else None


def _complaint(body: bytes) -> str:
    """The kind of error a server names, never its text."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return "no reason given"
    error = answer.get("error", answer) if isinstance(answer, Mapping) else None
    kind = error.get("type") if isinstance(error, Mapping) else None
    return kind[:_TEXT_SHOWN_CHARS] if isinstance(kind, str) else "no reason given"


def _sglang_loads(answer: Any) -> tuple[LoadReport, ...]:
    loads = answer.get("loads") if isinstance(answer, Mapping) else None
    if not isinstance(loads, list) or len(loads) > RANKS_MAX or not all(isinstance(load, Mapping) for load in loads):
        raise ProtocolError(f"/v1/loads: loads must be a list of at most {RANKS_MAX} objects")
    return tuple(LoadReport(*(_count(load.get(name)) or 0 for name in _LOADS)) for load in loads)


def _vllm_loads(body: bytes, kv_capacity_tokens: int) -> tuple[LoadReport, ...]:
    """The loads in the text of /metrics, by rank; a number that is none is left out."""
    seen: dict[tuple[str, int], int] = {}
    names = (_RUNNING, _WAITING, *_DONE, *_USED)
    for name, labels, value in samples(body.decode("utf-8", "replace"), names, len(names) * RANKS_MAX):
        rank = digits(labels.get("engine", ""))
        if rank is not None:
            with contextlib.suppress(ValueError, OverflowError):
                size = kv_capacity_tokens if name in _USED else 1
                seen[name, rank] = min(max(int(size * float(value)), 0), _INT63)
    return tuple(
        LoadReport(
            running=min(seen.get((_RUNNING, rank), 0), _INT31),
            waiting=min(seen.get((_WAITING, rank), 0), _INT31),
            used_tokens=min(max(seen.get((name, rank), 0) for name in _USED), kv_capacity_tokens),
            capacity_tokens=kv_capacity_tokens,
            rank=rank,
            done_tokens=sum(seen.get((name, rank), 0) for name in _DONE),
        )
        for rank in sorted({rank for _, rank in seen})
    )


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise MissingExtra("servers over HTTP need aiohttp: pip install 'preble[gateway]'") from error
    return aiohttp
