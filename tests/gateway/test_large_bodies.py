"""Large bodies and long texts: who waits for whom, what is given up when its client leaves, what is refused early."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from preble import ManualClock
from preble.errors import QueueFull
from preble.gateway.api import schemas
from preble.gateway.api.schemas import (
    ChatRequest,
    CompletionRequest,
    ExplainRequest,
    GenerateRequest,
    decode,
    ids_of,
    prompts_of,
)
from preble.gateway.app import make_app
from preble.gateway.core.byte_budget import SMALL_BYTES, ByteBudget
from preble.gateway.core.config import GatewayConfig
from preble.gateway.core.gateway import Gateway
from preble.gateway.core.http_errors import ApiError
from preble.gateway.core.metrics import Metrics
from preble.gateway.text import text_queue
from preble.gateway.text.text_queue import TextQueue
from preble.gateway.text.tokenizing import SLICE_CHARACTERS, PromptTooLong, TextCodec
from preble.router import Router
from tests.support.gateway import END, USER, make_tokenizer
from tests.support.transport import HANG_SECONDS, asynchronous, until


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextCodec]:
    """A tokenizer of one token a byte."""
    codec = TextCodec(make_tokenizer(tmp_path_factory.mktemp("model")), threads=1)
    yield codec
    codec.close()


# --- the order of texts -----------------------------------------------------------------------------------------------


class Work:
    """Texts that are tokenised when they are let."""

    def __init__(self, threads: int = 1, waiting_max: int = 100) -> None:
        self.queue = TextQueue(threads, waiting_max)
        self.begun: list[str] = []
        self.stopped: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def put(self, name: str, characters: int) -> asyncio.Task[str]:
        """A text of that length."""
        gate = self._gates[name] = threading.Event()

        def work(stop: threading.Event) -> str:
            self.begun.append(name)
            gate.wait(HANG_SECONDS)
            if stop.is_set():
                self.stopped.append(name)
            return name

        return asyncio.ensure_future(self.queue.run(characters, work))

    async def let(self, *names: str) -> None:
        """Let these be done, each when it has begun."""
        for name in names:
            await until(lambda name=name: name in self.begun, f"{name} has begun")  # type: ignore[misc]
            self._gates[name].set()


@asynchronous
async def test_short_texts_go_first_and_what_is_long_is_not_overtaken_for_ever() -> None:
    work = Work()
    first = work.put("first", 10)
    await until(lambda: work.begun, "the thread is taken")
    waiting = [work.put("long", 1000), work.put("short", 10)]
    later = [work.put(f"later-{i}", 400) for i in range(4)]
    await asyncio.sleep(0)
    await work.let("first", "short", "later-0", "later-1")
    late = work.put("late", 700)  # ahead of it by length, behind it by what was served meanwhile
    await asyncio.sleep(0)
    await work.let("later-2", "later-3", "long", "late")
    await asyncio.gather(first, *waiting, *later, late)
    assert work.begun.index("short") == 1 and work.begun.index("long") < work.begun.index("late")
    work.queue.close()


@asynchronous
async def test_long_texts_have_one_thread_and_never_that_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_queue, "LONG_CHARACTERS", 100)
    work = Work(threads=2)
    long = [work.put(f"long-{i}", 1000 + i) for i in range(3)]
    await until(lambda: work.begun, "one has begun")
    short = [work.put(f"short-{i}", 10) for i in range(3)]
    await work.let("short-0", "short-1", "short-2")
    assert await asyncio.gather(*short) == ["short-0", "short-1", "short-2"]
    assert [name for name in work.begun if name.startswith("long")] == ["long-0"]
    await work.let("long-0", "long-1", "long-2")
    await asyncio.gather(*long)
    work.queue.close()


@asynchronous
async def test_texts_that_nobody_wants_are_taken_out_and_give_their_place_back() -> None:
    work = Work(waiting_max=2)
    running = work.put("running", 10)
    await until(lambda: work.begun, "the thread is taken")
    gone, stays = work.put("gone", 1), work.put("stays", 2)
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="2 texts wait"):
        await work.put("too many", 1)
    running.cancel()
    gone.cancel()
    await asyncio.wait([running, gone])
    last = work.put("last", 3)
    await asyncio.sleep(0)
    await work.let("running", "stays", "last")
    assert await asyncio.gather(stays, last) == ["stays", "last"]
    assert work.stopped == ["running"] and "gone" not in work.begun
    work.queue.close()


# --- texts that do not fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a" * (8 << 20), f"a{END}" * (2 << 20), "a " * (4 << 20)])
def test_a_text_that_cannot_fit_is_given_up_after_few_of_its_tokens(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    tokenised = 0
    encode = TextCodec._encode_batch

    def counted(self: TextCodec, texts: Any) -> Any:
        nonlocal tokenised
        tokenised += sum(map(len, texts))
        return encode(self, texts)

    monkeypatch.setattr(TextCodec, "_encode_batch", counted)

    async def ask() -> None:
        await codec.encode(text, tokens_max=1000)

    with pytest.raises(PromptTooLong, match="the model takes 1000 tokens"):
        asyncio.run(ask())
    assert tokenised <= 2 * SLICE_CHARACTERS


@asynchronous
async def test_a_chat_that_cannot_fit_is_given_up_too(codec: TextCodec) -> None:
    with pytest.raises(PromptTooLong):
        await codec.encode_chat([{"role": "user", "content": "a" * 5000}], tokens_max=1000)
    fits = await codec.encode_chat([{"role": "user", "content": "a" * 500}], tokens_max=1000)
    assert len(fits) < 1000


@asynchronous
async def test_a_text_in_slices_has_the_tokens_of_the_whole(codec: TextCodec) -> None:
    text = f"{USER}ab" + "c" * (3 * SLICE_CHARACTERS) + f"{END}d"
    ids = await codec.encode(text, tokens_max=len(text))
    assert ids.tolist() == codec._tokenizer.encode(text).ids


# --- bodies that are large --------------------------------------------------------------------------------------------


MANY = 1 << 20


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b'{"prompt": [' + b"[1]," * MANY + b"[1]]}", "prompt has more than 1024 prompts"),
        (b'{"prompt": [' + b"[]," * MANY + b"[]]}", r"prompt has more than 1024 prompts"),
        (b'{"prompt": [' + b'"",' * MANY + b'""]}', "prompt has more than 1024 prompts"),
        (b'{"prompt": [' + b"{}," * MANY + b"{}]}", r"prompt\[0\] must be text or a list of token ids"),
        (b'{"prompt": [' + b"1," * MANY + b"1]}", "the model takes 1000 tokens"),
        (b'{"prompt": [[1], [' + b"1," * MANY + b"1]]}", "the model takes 1000 tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_it_is_taken_apart(
    body: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    class Counting:
        """A decoder of token ids that counts them."""

        def decode(self, data: bytes) -> list[int]:
            nonlocal made
            ids = json.loads(data)
            made += len(ids)
            return list(ids) or [1]

    monkeypatch.setattr(schemas, "_IDS", Counting())
    with pytest.raises(ApiError, match=complaint):
        prompts_of(decode(body, CompletionRequest).prompt, "prompt", 1000)
    assert made <= 1024


def test_a_chat_has_a_bounded_number_of_messages() -> None:
    body = b'{"messages": [' + b'{"role":"user"},' * schemas.MESSAGES_MAX + b'{"role":"user"}]}'
    with pytest.raises(ApiError, match="length <= 16384"):
        decode(body, ChatRequest)


def test_a_field_that_asks_for_something_is_refused_without_taking_it_apart() -> None:
    body = b'{"prompt": "a", "logprob_token_ids": [' + b"{}," * MANY + b"{}]}"
    with pytest.raises(ApiError, match="logprob_token_ids is not supported"):
        decode(body, CompletionRequest)
    fields = {"logprob_token_ids": [], "n": 1, "length_penalty": 1.0, "vllm_xargs": None, "metadata": {"a": "b"}}
    request: Any = decode(json.dumps({"prompt": "a", **fields}).encode(), CompletionRequest)
    assert not bytes(request.logprob_token_ids) and not bytes(request.length_penalty), "they keep no body"
    assert not bytes(request.metadata), "it keeps no body"
    assert decode(b'{"text": "a", "sampling_params": {"beam_width": 1}}', GenerateRequest).sampling_params is not None


@pytest.mark.parametrize(
    ("given", "wanted", "several"),
    [
        ('"a, [b]"', ["a, [b]"], False),
        ("[1, 2 ,3]", [[1, 2, 3]], False),
        (r' [ "q\"],[\\" , "\u00e9",[4 ,5] ] ', ['q"],[\\', "é", [4, 5]], True),
        ("[[7]]", [[7]], True),
    ],
)
def test_prompts_come_in_all_their_forms(given: str, wanted: list[Any], several: bool) -> None:
    found = prompts_of(decode(b'{"prompt":%s}' % given.encode(), CompletionRequest).prompt, "prompt", 1000)
    assert [one if isinstance(one, str) else one.tolist() for one in found.given] == wanted
    assert found.several is several


@pytest.mark.parametrize(
    "given",
    ["7", "{}", "null", "[]", "[[]]", "[1,[2]]", "[[[1]]]", '[1,"a"]', '["a",1]', "[-1]", "[2147483648]", "[1e3]"],
)
def test_prompts_of_no_form_are_refused_by_name(given: str) -> None:
    with pytest.raises(ApiError) as caught:
        prompts_of(decode(b'{"prompt":%s}' % given.encode(), CompletionRequest).prompt, "prompt", 1000)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith("prompt")
    raw = decode(b'{"token_ids":%s}' % given.encode(), ExplainRequest).token_ids
    with pytest.raises(ApiError):
        ids_of(bytes(raw), "token_ids", 1000)


def test_bodies_share_a_bound_that_small_ones_never_meet() -> None:
    budget = ByteBudget(1000)
    with budget.share() as first:
        first.hold(SMALL_BYTES + 5000)  # alone, whatever its size
        with budget.share() as small:
            small.hold(SMALL_BYTES)
        with budget.share() as second, pytest.raises(ApiError, match="1000 bytes") as caught:
            second.hold(SMALL_BYTES + 1)
        assert caught.value.status == 503
        assert budget.bytes_used == 5000
    with budget.share() as first, budget.share() as second:
        first.hold(SMALL_BYTES + 500)
        second.hold(SMALL_BYTES + 500)
        with pytest.raises(ApiError):
            first.hold(SMALL_BYTES + 501)
        assert budget.bytes_used == 500, "who is refused makes room at once"
        second.hold(SMALL_BYTES + 1000)
    assert budget.bytes_used == 0


# --- clients that leave, and what is refused --------------------------------------------------------------------------


class Freed:
    """Notes its end."""

    def __init__(self, ends: list[str]) -> None:
        self._ends = ends

    def __del__(self) -> None:
        self._ends.append("freed")


class NotedPart(bytes):
    """A part of a body that notes its end."""

    freed: Freed


class NeverDone:
    """A tokenizer that is still at it."""

    def __init__(self) -> None:
        self.began, self.given_up = asyncio.Event(), False
        self.ends: list[str] = []

    async def encode(self, text: str, **given: Any) -> Any:
        """As `TextCodec.encode`."""
        held = Freed(self.ends)
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up = isinstance(held, Freed)

    async def encode_chat(self, messages: Any, **given: Any) -> Any:
        """As `TextCodec.encode_chat`."""
        await self.encode("")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/generate", {"text": ["x", "y"]}),
        ("/v1/preble/explain", {"prompt": "x"}),
    ],
)
@pytest.mark.parametrize("request_seconds", [None, HANG_SECONDS])
@asynchronous
async def test_a_prompt_is_given_up_when_its_client_leaves(
    path: str, body: Any, request_seconds: float | None, uncollected: None
) -> None:
    codec: Any = NeverDone()
    router = Router([])
    await router.start(min_workers=0)
    gateway = Gateway(router, codec, GatewayConfig(request_seconds=request_seconds), Metrics(ManualClock()))
    app = make_app(gateway)
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await codec.began.wait()
        assert gateway.bodies.bytes_used == max(0, len(json.dumps(body)) - SMALL_BYTES)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    await app(scope_of(path), receive, send)
    assert codec.given_up and gateway.bodies.bytes_used == 0
    await asyncio.sleep(0)  # the loop lets go of who was cancelled
    assert set(codec.ends) == {"freed"}, "nothing waits for a collection of garbage"
    await router.close()


def scope_of(path: str) -> dict[str, Any]:
    """A POST without headers."""
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    return {**scope, "headers": [], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}


@pytest.mark.parametrize("request_seconds", [None, HANG_SECONDS])
@asynchronous
async def test_what_came_of_a_body_that_is_refused_is_freed_at_once(
    request_seconds: float | None, uncollected: None
) -> None:
    """It stayed until a collection of garbage: of 24 bodies at once some 40 MB, beside the 64 MiB of a bound."""
    router = Router([])
    await router.start(min_workers=0)
    gateway = Gateway(router, None, GatewayConfig(request_seconds=request_seconds), Metrics(ManualClock()))
    app = make_app(gateway)
    ends: list[str] = []
    statuses: list[int] = []
    parts = 0

    async def receive() -> Any:
        nonlocal parts
        await asyncio.sleep(0)
        parts += 1
        part = NotedPart(b" " * (100 << 10))
        part.freed = Freed(ends)
        return {"type": "http.request", "body": part, "more_body": True}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    with gateway.bodies.share() as other:
        other.hold(gateway.bodies.bytes_max - (200 << 10))
        await app(scope_of("/v1/completions"), receive, send)
    assert statuses == [503] and parts >= 3 and ends == ["freed"] * parts
    await router.close()
