"""Attached servers as real processes that are stopped, killed and started again on their port."""

from __future__ import annotations

import asyncio
import signal

from preble import Router, SamplingParams
from preble.transport.engine_servers.watch import ON_TIME_MIN, STALLED, UNSTARTED
from tests.support.server_process import ServerProcess
from tests.support.transport import (
    FirstByName,
    assert_bookings_are_even,
    asynchronous,
    collect,
    expected_tokens,
    fast,
    until,
)

PROMPT = list(range(100, 141))
LONG, SHORT = SamplingParams(max_new_tokens=60), SamplingParams(max_new_tokens=4)


@asynchronous
async def test_a_stopped_server_is_left_and_taken_again_and_a_restarted_one_has_no_marks() -> None:
    made = await asyncio.gather(*(asyncio.to_thread(ServerProcess, "sglang") for _ in range(2)))
    first, second = sorted(made, key=lambda server: f"127.0.0.1:{server.port}")
    name = f"127.0.0.1:{first.port}"
    config = fast(heartbeat_seconds=0.1, hung_after_seconds=1.0, suspect_after_seconds=3.0, give_up_seconds=60.0)
    router = Router.attach(first.url, second.url, policy=FirstByName(), config=config)
    await router.start()
    stuck = router.fleet.workers[first.url]
    try:
        streams = [asyncio.ensure_future(collect(router.generate([n, *PROMPT], LONG))) for n in range(3)]
        await until(lambda: router.counters.output_tokens >= 10, "all are under way")
        first.signal(signal.SIGSTOP)
        for n, (tokens, chunks) in enumerate(await asyncio.gather(*streams)):
            assert tokens == expected_tokens([n, *PROMPT], 60) and chunks[-1].worker != name
        assert stuck.state == "suspect" and stuck.counters.losses == 0
        first.signal(signal.SIGCONT)
        await until(lambda: stuck.state == "ready", "it answers again")
        _, chunks = await collect(router.generate(PROMPT, SHORT))
        assert chunks[0].worker == name and router.scheduler.match(PROMPT).matched_tokens[name] == 40

        first.kill()
        again = await asyncio.to_thread(ServerProcess, "sglang", port=first.port, life=2)
        made.append(again)
        await until(lambda: stuck.counters.restarts == 1 and stuck.state == "ready", "it is known to be another")
        assert router.scheduler.match(PROMPT).matched_tokens.get(name, 0) == 0
        await until(lambda: not router.stats()["live_requests"], "requests ended")
        assert_bookings_are_even(router)
    finally:
        await router.close()
        for server in made:
            server.signal(signal.SIGCONT)
            server.kill()


@asynchronous
async def test_an_engine_that_hangs_behind_a_living_front_is_left_and_one_that_is_merely_slow_is_not() -> None:
    """Once before a request has had a token, and once in the midst of streams; the front goes on to answer."""
    made = await asyncio.gather(*(asyncio.to_thread(ServerProcess, "vllm") for _ in range(2)))
    first, second = sorted(made, key=lambda server: f"127.0.0.1:{server.port}")
    names = [f"127.0.0.1:{server.port}" for server in (first, second)]
    config = fast(heartbeat_seconds=0.1, hung_after_seconds=0.5, suspect_after_seconds=10.0, give_up_seconds=60.0)
    router = Router.attach(first.url, second.url, policy=FirstByName(), config=config)
    await router.start()
    stuck = router.fleet.workers[first.url]
    try:
        known = (collect(router.generate([n, *PROMPT], LONG)) for n in range(ON_TIME_MIN))
        await asyncio.gather(*known)  # it is known to work
        await first.switch(signal.SIGUSR2)  # prefills take much longer than a token is waited for
        _, chunks = await collect(router.generate(PROMPT, SHORT))
        assert chunks[-1].worker == names[0] and stuck.counters.suspect_spells == 0
        await first.switch(signal.SIGUSR2)
        await first.switch(signal.SIGUSR1)
        tokens, chunks = await collect(router.generate(PROMPT, SHORT))
        assert tokens == expected_tokens(PROMPT, 4) and {chunk.worker for chunk in chunks} == {names[1]}
        assert (stuck.state, stuck.why, stuck.counters.losses) == ("suspect", UNSTARTED, 0)
        await first.switch(signal.SIGUSR1)
        await until(lambda: stuck.state == "ready", "it makes tokens again")

        before = router.counters.output_tokens
        streams = [asyncio.ensure_future(collect(router.generate([n, *PROMPT], LONG))) for n in range(3)]
        await until(lambda: router.counters.output_tokens >= before + 10, "all are under way")
        await first.switch(signal.SIGUSR1)
        for n, (tokens, chunks) in enumerate(await asyncio.gather(*streams)):
            assert tokens == expected_tokens([n, *PROMPT], 60) and chunks[-1].worker == names[1]
        assert (stuck.state, stuck.why, stuck.counters.losses) == ("suspect", STALLED, 0)
        await first.switch(signal.SIGUSR1)
        await until(lambda: stuck.state == "ready", "it makes tokens again")
        await until(lambda: not router.stats()["live_requests"], "requests ended")
        assert_bookings_are_even(router)
    finally:
        await router.close()
        for server in made:
            server.kill()
