"""Two real workers of each engine behind a router: answers, hits, evictions, and workers that die or hang mid-stream.

Run by `make test-live`. The tests of one engine share its two workers and run in the order they stand here: caches are
empty at first, and the last ones kill. Figures are printed for the record.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from preble import Router, SamplingParams
from preble._radix import RadixTree
from preble.errors import InvalidInput
from preble.gateway.text.tokenizing import TextCodec
from preble.router.request import StreamChunk
from preble.types import Grammar
from tests.live.live_fleet import (
    CAPACITY_TOKENS,
    ENGINES_DIR,
    LOGS,
    LiveWorker,
    answers,
    ask_directly,
    model_dir,
    prompts,
    python_of,
)
from tests.live.live_servers import tools_model_dir, without_blanks
from tests.support.gateway import GatewayProcess
from tests.support.transport import assert_bookings_are_even, collect, fast, until

DOCUMENTS, TURNS, PROMPT_TOKENS, SHORT, LONG, STREAMS = 40, 4, 700, 6, 150, 4
LENGTHS = (LONG, 300, 600, 1200)  # of streams that are to run at once
LIMIT_SECONDS, WAIT_SECONDS = 900.0, 300.0  # of a story; of one thing in it


@dataclass
class Fleet:
    """Two workers of one engine, the prompts, and what the engine says to them when asked directly."""

    engine: str
    block_size: int
    workers: list[LiveWorker]
    asked: list[list[int]]
    short: list[list[int]]
    long: list[list[int]]

    def run(self, story: Callable[[Router], Awaitable[None]]) -> None:
        """Run a story with a router, on a loop of its own."""

        async def told() -> None:
            config = fast(suspect_after_seconds=4.0, give_up_seconds=600.0, resume_seconds=120.0)
            endpoints = [worker.endpoint for worker in self.workers]
            async with Router(endpoints, config=config) as router:
                await eventually(
                    lambda: not router.fleet.unusable and len(router.scheduler.workers) == 2, "both are ready"
                )
                await story(router)
                await eventually(lambda: router.stats()["live_requests"] == 0, "all requests have ended")
                assert_bookings_are_even(router)

        asyncio.run(asyncio.wait_for(told(), LIMIT_SECONDS))


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Start both workers and ask the engine itself, all at once."""
    engine = request.param
    if not python_of(engine).exists():
        pytest.skip(f"no {engine} in {ENGINES_DIR}: run tests/live/install.py --engine {engine}")
    asked = prompts(DOCUMENTS, TURNS, PROMPT_TOKENS)
    questions = [(ids, SHORT) for ids in asked] + [(ids, LONG) for ids in asked[:STREAMS]]
    workers = [LiveWorker(engine, number) for number in range(2)]
    for worker in workers:
        worker.log.unlink(missing_ok=True)
        worker.start()
    asking = ask_directly(engine, questions)
    try:
        told = answers(engine, asking)
        for worker in workers:
            worker.wait()
        block_size = 16 if engine == "sglang" else 32
        yield Fleet(engine, block_size, workers, asked, told[: len(asked)], told[len(asked) :])
    finally:
        asking.kill()
        codes = [worker.stop() for worker in workers]
    assert codes == [0, 0], "workers drain on SIGTERM"


def sampling(new: int) -> SamplingParams:
    """Greedy, and exactly so many tokens."""
    return SamplingParams(max_new_tokens=new, ignore_eos=True)


class Streams:
    """Long requests at once; each result is the beginning that the engine was asked directly for."""

    def __init__(self, router: Router, fleet: Fleet, new: int) -> None:
        self.new = new
        self.started = [0] * STREAMS
        self.tasks = [
            asyncio.ensure_future(self._one(router, number, fleet.asked[number])) for number in range(STREAMS)
        ]

    async def _one(self, router: Router, number: int, prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        async for chunk in router.generate(prompt, sampling(self.new)):
            assert chunk.index == len(tokens), "each token once, none left out"
            tokens += chunk.token_ids
            self.started[number] = len(tokens)
        assert len(tokens) == self.new
        return tokens[:LONG]

    def one_has_ended(self) -> bool:
        """Whether they no longer run all."""
        return any(task.done() for task in self.tasks)


async def streams_running(router: Router, fleet: Fleet) -> list[asyncio.Task[list[int]]]:
    """Long requests, each with some tokens already and none at its end. Where one ends before all have begun, because
    something else has the cores, longer ones are started."""
    for new in LENGTHS:
        streams = Streams(router, fleet, new)

        def may_go_on(streams: Streams = streams) -> bool:
            return min(streams.started) > 5 or streams.one_has_ended()

        await eventually(may_go_on, "all streams have begun")
        if not streams.one_has_ended():
            return streams.tasks
        assert await asyncio.gather(*streams.tasks) == fleet.long
    raise AssertionError(f"of {STREAMS} streams of {LENGTHS[-1]} tokens one has ended before all have begun")


async def eventually(condition: Callable[[], Any], what: str) -> None:
    """Wait for something that engines do when they get to it."""
    await until(condition, what, WAIT_SECONDS)


def busy_worker(router: Router, fleet: Fleet) -> LiveWorker:
    """The worker with most requests."""
    live = router.scheduler.stats()["workers"]
    name = max(live, key=lambda worker: live[worker]["live_requests"])
    return next(worker for worker in fleet.workers if name == f"{worker.engine}-{worker.number}")


def test_real_prompts_are_answered_as_by_the_engine_itself_and_hit_as_predicted(fleet: Fleet) -> None:
    """All documents together are more than both caches hold, so some are evicted before they come back."""
    tree = RadixTree()
    everything = tree.add_worker(1 << 30)
    for ids in fleet.asked:
        tree.insert(ids, 0.0, worker=everything)
    distinct = tree.worker_tokens(everything)
    assert distinct > 2 * CAPACITY_TOKENS, "evictions are certain"
    exact, hits, wrong = 0, 0, []

    async def story(router: Router) -> None:
        nonlocal exact, hits
        for number, ids in enumerate(fleet.asked):
            estimated = router.scheduler.match(ids).matched_tokens
            tokens, chunks = await collect(router.generate(ids, sampling(SHORT)))
            assert tokens == fleet.short[number], f"prompt {number}"
            predicted = min(estimated.get(chunks[0].worker, 0), len(ids) - 1) // fleet.block_size * fleet.block_size
            exact += predicted == chunks[0].cached_tokens
            hits += chunks[0].cached_tokens > 0
            if predicted != chunks[0].cached_tokens:
                wrong.append((number, len(ids), predicted, chunks[0].cached_tokens))
        stats = router.scheduler.stats()["workers"]
        sources = {name: worker["cache_source"] for name, worker in stats.items()}
        assert set(sources.values()) == {"events"}, "what is estimated comes from the engine's own events"

    fleet.run(story)
    share = exact / len(fleet.asked)
    record(
        fleet,
        "replay",
        {"requests": len(fleet.asked), "tokens": distinct, "exact": share, "hits": hits, "wrong": wrong},
    )
    assert hits > 0, "something was cached"
    assert share >= 0.99, f"(prompt, tokens, predicted, reported): {wrong}"


def test_streams_at_once_and_aborts(fleet: Fleet) -> None:
    """Streams that share batches are answered alike; those that nobody wants any more leave the engine."""

    async def story(router: Router) -> None:
        tasks = await streams_running(router, fleet)
        tasks[0].cancel()
        told = await asyncio.gather(*tasks[1:])
        assert told == fleet.long[1:]
        idle = list(router.fleet.workers.values())
        await eventually(
            lambda: all(w.pong and w.pong.running + w.pong.waiting == 0 for w in idle), "the engines are idle"
        )

    fleet.run(story)


def test_what_engines_have_beside_plain_sampling_reaches_them(fleet: Fleet) -> None:
    """Each field shows in the answer, and a grammar that is none is the request's fault."""
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    prompt = fleet.asked[0]

    async def story(router: Router) -> None:
        async def ask(**fields: Any) -> tuple[list[int], list[StreamChunk]]:
            return await collect(router.generate(prompt, SamplingParams(**{"max_new_tokens": 12, **fields})))

        async def said(**fields: Any) -> str:
            return tokenizer.decode((await ask(**fields))[0])

        plain, _ = await ask(ignore_eos=True)
        first = plain[0]
        for fields in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}):
            punished, _ = await ask(ignore_eos=True, **fields)
            assert punished[0] == first and len(set(punished)) > len(set(plain)), fields
        assert (await ask(logit_bias={77: 100.0}))[0] == [77] * 12
        assert len((await ask(stop_token_ids=(first,), min_new_tokens=5))[0]) >= 5
        assert (await ask(temperature=1.0, top_k=1, ignore_eos=True))[0] == plain
        assert (await ask(temperature=1.0, min_p=1.0, ignore_eos=True))[0] == plain
        tokens, chunks = await ask(logprobs=2, ignore_eos=True)
        logprobs = [one for chunk in chunks for one in chunk.logprobs]
        best = [(token, one.logprob) for token, one in zip(tokens, logprobs, strict=True)]
        assert tokens == plain and [one.top[0] for one in logprobs] == best, "greedy takes the likeliest"
        assert await said(grammar=Grammar("regex", "(yes|no)")) in ("yes", "no")
        assert await said(grammar=Grammar("choice", '["red", "blue"]')) in ("red", "blue")
        assert await said(grammar=Grammar("ebnf", 'root ::= "ab" | "cd"')) in ("ab", "cd")
        assert (await said(grammar=Grammar("json_schema", '{"type": "object"}'))).startswith("{")
        with pytest.raises(InvalidInput, match="refuses the request, which asks for regex"):
            await ask(grammar=Grammar("regex", "((("))

    fleet.run(story)


def test_the_openai_client_is_answered_through_the_gateway(fleet: Fleet, tmp_path: Path) -> None:
    """Ids, text and a chat, whole and streamed, say what the engine itself says."""
    endpoints = [worker.endpoint for worker in fleet.workers]
    gateway = GatewayProcess("--workers", *endpoints, "--tokenizer", str(model_dir()), log=tmp_path / "log")
    codec = TextCodec(model_dir(), threads=1)
    said = [codec.decode(tokens) for tokens in fleet.short]
    greedy = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    try:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as api:
            model = api.models.list().data[0].id
            for ids, expected in zip(fleet.asked[:DOCUMENTS], said[:DOCUMENTS], strict=True):
                reply = api.completions.create(model=model, prompt=ids, max_tokens=SHORT, **greedy)
                assert (reply.choices[0].text, reply.choices[0].finish_reason) == (expected, "length")
                assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), SHORT)
            again = api.completions.create(model=model, prompt=ids, max_tokens=SHORT, **greedy)
            whole_blocks = (len(ids) - 1) // fleet.block_size * fleet.block_size
            assert again.usage.prompt_tokens_details.cached_tokens == whole_blocks
            stream = api.completions.create(model=model, prompt=fleet.asked[0], max_tokens=LONG, stream=True, **greedy)
            parts = [event.choices[0].text for event in stream]
            assert len(parts) > LONG // 10 and "".join(parts) == codec.decode(fleet.long[0])
            chat = [{"role": "user", "content": "Which module reads files line by line?"}]
            whole = api.chat.completions.create(model=model, messages=chat, max_tokens=SHORT, **greedy)
            events = api.chat.completions.create(model=model, messages=chat, max_tokens=SHORT, stream=True, **greedy)
            assert "".join(event.choices[0].delta.content or "" for event in events) == whole.choices[0].message.content
    finally:
        codec.close()
        code = gateway.stop()
    assert code == 0


def test_a_tool_that_must_be_called_is_called_and_json_is_of_its_schema(fleet: Fleet, tmp_path: Path) -> None:
    """A random model calls a tool, and writes JSON of a schema, because the engine's grammar leaves it nothing else."""
    endpoints = [worker.endpoint for worker in fleet.workers]
    gateway = GatewayProcess("--workers", *endpoints, "--tokenizer", str(tools_model_dir()), log=tmp_path / "log")
    unit = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]}
    unit["additionalProperties"] = False
    tool: Any = {
        "type": "function",
        "function": {"name": "warmth", "description": "How warm it is", "parameters": unit},
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "unit", "schema": unit, "strict": True}}
    asked: Any = {"messages": [{"role": "user", "content": "How warm is it?"}], "max_tokens": 600, "temperature": 0}
    asked["logit_bias"] = without_blanks()
    one_call: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    try:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as api:
            asked["model"] = api.models.list().data[0].id
            for choice in ("required", {"type": "function", "function": {"name": "warmth"}}):
                reply = api.chat.completions.create(
                    tools=[tool], tool_choice=choice, parallel_tool_calls=False, **asked
                ).choices[0]
                # As OpenAI answers: who names the function has asked for its arguments.
                assert reply.finish_reason == ("tool_calls" if choice == "required" else "stop"), reply
                assert reply.message.tool_calls[0].function.name == "warmth"
                assert json.loads(reply.message.tool_calls[0].function.arguments)["unit"] in ("c", "f")
            events = list(api.chat.completions.create(tools=[tool], **one_call, stream=True, **asked))
            calls = [call for event in events for call in event.choices[0].delta.tool_calls or []]
            assert calls[0].function.name == "warmth" and calls[0].id
            assert json.loads("".join(call.function.arguments or "" for call in calls if call.index == 0))
            text = api.chat.completions.create(response_format=wanted, **asked).choices[0].message.content
            assert json.loads(text)["unit"] in ("c", "f")
    finally:
        code = gateway.stop()
    assert code == 0


def test_a_hung_worker_costs_no_token_and_comes_back(fleet: Fleet) -> None:
    async def story(router: Router) -> None:
        tasks = await streams_running(router, fleet)
        hung = busy_worker(router, fleet)
        hung.signal(signal.SIGSTOP)
        try:
            assert await asyncio.gather(*tasks) == fleet.long
        finally:
            hung.signal(signal.SIGCONT)
        await eventually(lambda: not router.fleet.unusable, "the worker is ready again")
        tokens, _ = await collect(router.generate(fleet.asked[0], sampling(SHORT)))
        assert tokens == fleet.short[0]

    fleet.run(story)


def test_a_killed_worker_costs_no_token_and_its_successor_starts_empty(fleet: Fleet) -> None:
    async def story(router: Router) -> None:
        tasks = await streams_running(router, fleet)
        killed = busy_worker(router, fleet)
        killed.kill()
        assert await asyncio.gather(*tasks) == fleet.long
        name = f"{killed.engine}-{killed.number}"
        await asyncio.to_thread(killed.start)
        await asyncio.to_thread(killed.wait)
        address = next(worker for worker in router.fleet.workers.values() if worker.address == killed.endpoint)
        await eventually(lambda: address.state == "ready", "it is back")
        assert address.counters.restarts == 1
        held = [router.scheduler.match(ids).matched_tokens.get(name, 0) for ids in fleet.asked]
        assert max(held) == 0, "nothing is estimated of a cache that died"
        for number in range(DOCUMENTS):
            tokens, _ = await collect(router.generate(fleet.asked[number], sampling(SHORT)))
            assert tokens == fleet.short[number]

    fleet.run(story)


def record(fleet: Fleet, what: str, figures: dict[str, object]) -> None:
    """Keep figures beside the logs."""
    LOGS.mkdir(parents=True, exist_ok=True)
    (LOGS / f"{fleet.engine}-{what}.json").write_text(json.dumps(figures, indent=1) + "\n")
