"""The class that Ray loads, over stand-ins for Ray's own classes: what it returns for each kind of request, and what it
does with Ray's calls. Needs no ray; with a real cluster it is tried in `test_ray_serve`.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from preble.errors import InvalidConfig, MissingExtra
from preble.integrations.booking_exchange import BookingExchange
from preble.integrations.replica_scheduler import UNREPORTED_SECONDS

MODULE = "preble.integrations.ray_serve"


class Id:
    def __init__(self, name: str) -> None:
        self.name = name

    def to_full_id_str(self) -> str:
        return self.name


class Locality:
    def apply_locality_routing(self, pending_request: Any = None) -> set[Any]:
        return {one.replica_id for one in self.near}


class Multiplex:
    def apply_multiplex_routing(self, pending_request: Any = None) -> set[Any]:
        model = pending_request.metadata.multiplexed_model_id
        return {one.replica_id for one in self.all if model in one.models}


class Base:
    """What the router uses of Ray's base class."""

    def __init__(self) -> None:
        self._deployment_id = SimpleNamespace(name="engine")
        self.all: list[Any] = []
        self.near: list[Any] = []
        self.full: set[str] = set()
        self._pending_requests_by_id: dict[str, Any] = {}

    def _get_pending_request_matching_internal_request_id(self, request_metadata: Any = None) -> Any:
        return self._pending_requests_by_id.get(request_metadata.internal_request_id)

    def _fulfill_next_pending_request(self, replica: Any, request_metadata: Any = None) -> None:
        found = self._get_pending_request_matching_internal_request_id(request_metadata)
        if found is not None:
            found.future.set_result(replica)
            self._pending_requests_by_id.pop(request_metadata.internal_request_id, None)

    async def _choose_replica_for_request(self, pending_request: Any, *, is_retry: bool = False) -> Any:
        groups = await self.choose_replicas(self.all, pending_request)  # type: ignore[attr-defined]
        return groups[0][0]

    def select_available_replicas(self, candidates: list[Any]) -> list[Any]:
        return [one for one in candidates if one.replica_id.name not in self.full]

    def update_replicas(self, replicas: list[Any]) -> None:
        self.all = self.near = list(replicas)

    def on_replica_actor_died(self, replica_id: Id) -> None:
        self.all = [one for one in self.all if one.replica_id is not replica_id]


class Metric:
    def __init__(self, name: str, **rest: Any) -> None:
        self.seen: list[str] = []

    def inc(self, tags: dict[str, str]) -> None:
        self.seen.append(tags["choice"])


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`ray_serve`, imported over the stand-ins, and forgotten afterwards."""
    serve, metrics = ModuleType("ray.serve.request_router"), ModuleType("ray.util.metrics")
    names = {"LocalityMixin": Locality, "MultiplexMixin": Multiplex, "RequestRouter": Base}
    for name, value in {**names, "PendingRequest": object, "ReplicaID": Id, "RunningReplica": object}.items():
        setattr(serve, name, value)
    metrics.Counter = Metric  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, serve.__name__, serve)
    monkeypatch.setitem(sys.modules, metrics.__name__, metrics)
    for parent in ("ray", "ray.serve", "ray.util"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    sys.modules.pop(MODULE, None)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def replica(name: str, *models: str, **stats: Any) -> Any:
    return SimpleNamespace(replica_id=Id(name), models=models, replica_metadata={}, routing_stats=stats)


def pending(body: Any, call_id: str = "call", model: str = "") -> Any:
    metadata = SimpleNamespace(internal_request_id=call_id, multiplexed_model_id=model)
    context = SimpleNamespace(should_backoff=False)
    future: Any = asyncio.get_running_loop().create_future()
    return SimpleNamespace(args=[body], kwargs={}, metadata=metadata, routing_context=context, future=future)


PROMPT = {"prompt": list(range(300))}


async def started(module: ModuleType, **kwargs: Any) -> Any:
    router = module.PrebleRequestRouter()
    router.initialize_state(**{"read_seconds": 30.0, "share": False, **kwargs})
    router.update_replicas([replica("a", "lora"), replica("b", "lora"), replica("c")])
    return router


def test_without_ray_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray.serve", "ray.serve.request_router"):
        monkeypatch.setitem(sys.modules, name, None)
    sys.modules.pop(MODULE, None)
    with pytest.raises(MissingExtra, match=r"preble\[ray\]"):
        importlib.import_module(MODULE)


def test_a_prompt_has_one_first_choice_and_its_siblings_the_same(module: ModuleType) -> None:
    async def ask() -> None:
        router = await started(module)
        homes = set()
        for number in range(4):
            request = pending({"prompt": [*range(300), 1000 + number]}, str(number))
            (first,), rest = await router.choose_replicas(router.all, request)
            assert request.routing_context.should_backoff
            assert len({first.replica_id, *(one.replica_id for one in rest)}) == 3
            router.on_request_routed(request, first.replica_id, None)
            router.on_request_completed(first.replica_id, str(number))
            homes.add(first.replica_id)
        assert len(homes) == 1
        stats = router.stats()
        assert (stats["choice_scheduled"], stats["open_bookings"], stats["events_of"]) == (4, 0, [])
        assert router._choices.seen == ["scheduled"] * 4

    asyncio.run(ask())


def test_each_of_several_calls_with_one_id_gets_the_replica_chosen_for_it(module: ModuleType) -> None:
    async def ask() -> None:
        router = await started(module)
        calls = [pending({"prompt": [1000 * number, *range(300)]}, "shared") for number in range(4)]
        router._pending_requests_by_id["shared"] = calls[0]

        async def route(call: Any) -> Any:
            (first,), _ = await router.choose_replicas(router.all, call)
            await asyncio.sleep(0)
            router._fulfill_next_pending_request(first, call.metadata)
            return first

        chosen = await asyncio.gather(*(route(call) for call in reversed(calls)))
        assert [call.future.result() for call in reversed(calls)] == chosen

    asyncio.run(ask())


def test_a_full_replica_is_left_out_and_a_refusal_goes_elsewhere(module: ModuleType) -> None:
    async def ask() -> None:
        router = await started(module)
        request = pending(PROMPT)
        (first,), _ = await router.choose_replicas(router.all, request)
        router.full = {first.replica_id.name}
        (second,), _ = await router.choose_replicas(router.all, request)
        assert second is not first
        assert router.stats()["open_bookings"] == 1
        router.full = {"a", "b", "c"}
        (third,), _ = await router.choose_replicas(router.all, request)
        assert third not in (first, second)

    asyncio.run(ask())


def failing_extractor(args: Any, kwargs: Any) -> None:
    raise RuntimeError(args)


@pytest.mark.parametrize(
    ("kwargs", "body", "why"),
    [
        ({}, "no body", "no_tokens"),
        ({}, {"prompt": "text without a tokenizer"}, "refused"),
        ({}, {"prompt": [-1]}, "refused"),
        ({"extractor": f"{__name__}:failing_extractor"}, PROMPT, "failed"),
    ],
)
def test_without_tokens_two_replicas_nearby_are_tried(
    module: ModuleType, kwargs: dict[str, Any], body: Any, why: str
) -> None:
    async def ask() -> None:
        router = await started(module, **kwargs)
        router.near = router.all[:2]
        (group,) = await router.choose_replicas(router.all, pending(body))
        assert {one.replica_id.name for one in group} == {"a", "b"}
        assert router.stats()[f"choice_{why}"] == 1
        assert router.stats()["open_bookings"] == 0

    asyncio.run(ask())


HELD = threading.Event()


def held_extractor(args: Any, kwargs: Any) -> None:
    HELD.wait()


def test_slow_prompts_and_too_many_of_them_are_routed_without_tokens(module: ModuleType) -> None:
    async def ask() -> list[Any]:
        HELD.clear()
        router = module.PrebleRequestRouter()
        router.initialize_state(extractor=f"{__name__}:held_extractor", threads=1, queue_max=2, read_seconds=0.05)
        router.update_replicas([replica("a"), replica("b")])
        try:
            groups = await asyncio.gather(*(router.choose_replicas(router.all, pending(PROMPT)) for _ in range(3)))
        finally:
            HELD.set()
        stats = router.stats()
        assert (stats["choice_slow_prompt"], stats["choice_queue_full"]) == (2, 1)
        return groups

    assert [len(group) for (group,) in asyncio.run(ask())] == [2, 2, 2]


def test_a_request_for_a_model_goes_where_the_model_is(module: ModuleType) -> None:
    async def ask() -> None:
        router = await started(module)
        groups = await router.choose_replicas(router.all, pending(PROMPT, model="lora"))
        assert {one.replica_id.name for group in groups for one in group} == {"a", "b"}
        match = router._scheduler.scheduler.match
        known = [match(PROMPT["prompt"], namespace=name).known_tokens > 0 for name in (("lora", "lora"), None)]
        assert known == [True, False]
        assert await router.choose_replicas(router.all, pending(PROMPT, model="nobody's")) == [[]]
        assert router.stats()["choice_no_replica_known"] == 1

    asyncio.run(ask())


def test_without_a_request_two_replicas_are_named(module: ModuleType) -> None:
    async def ask() -> None:
        router = await started(module)
        (group,) = await router.choose_replicas(router.all)
        assert len(group) == 2
        assert router.stats()["choice_no_request"] == 1

    asyncio.run(ask())


def test_a_caller_who_goes_away_leaves_no_booking(module: ModuleType) -> None:
    async def ask() -> None:
        router = await started(module)
        request = pending(PROMPT)
        await router.choose_replicas(router.all, request)
        assert router.stats()["open_bookings"] == 1
        request.future.cancel()
        await asyncio.sleep(0)
        assert router.stats()["open_bookings"] == 0

    asyncio.run(ask())


def test_a_place_that_is_only_asked_for_is_booked_for_a_while(module: ModuleType) -> None:
    """Ray reports no end of what it does not send itself; of what it does, it does."""

    async def ask() -> None:
        router = await started(module)
        sent, asked = pending(PROMPT, "sent"), pending({"prompt": list(range(5000, 5300))}, "asked")
        chosen = await router._choose_replica_for_request(sent)
        await router.choose_replicas(router.all, asked)
        now = router._scheduler._clock()
        router._scheduler._clock = lambda: now + UNREPORTED_SECONDS + 1.0
        router._scheduler.tick()
        stats = router.stats()
        assert (stats["open_bookings"], stats["bookings_ended_unreported"]) == (1, 1)
        router.on_request_completed(chosen.replica_id, "sent")
        assert router.stats()["open_bookings"] == 0
        router._scheduler.check()

    asyncio.run(ask())


def test_a_request_that_is_given_up_while_its_prompt_is_read_is_not_booked(module: ModuleType) -> None:
    async def ask() -> None:
        router = await started(module)
        first, second = pending(PROMPT), pending(PROMPT)
        await router.choose_replicas(router.all, first)
        for request in (first, second):
            request.future.cancel()
            await router.choose_replicas(router.all, request)
        stats = router.stats()
        assert (stats["choice_too_late"], stats["open_bookings"]) == (2, 0)

    asyncio.run(ask())


def test_two_routers_of_a_deployment_receives_of_each_other(module: ModuleType) -> None:
    async def ask() -> None:
        exchange = BookingExchange()

        async def connect() -> Any:
            return exchange

        one, two = module.PrebleRequestRouter(), module.PrebleRequestRouter()
        for router in (one, two):
            router.initialize_state(read_seconds=30.0)
            router._exchange._connect = connect
            router.update_replicas([replica("a"), replica("b"), replica("c")])
        request = pending({"prompt": list(range(3000))}, "first")
        (first,), _ = await one.choose_replicas(one.all, request)
        while not two.stats()["open_bookings"]:
            await asyncio.sleep(0.005)
        one.on_request_routed(request, first.replica_id, None)
        one.on_request_completed(first.replica_id, "first")
        while two.stats()["open_bookings"]:
            await asyncio.sleep(0.005)
        (second,), _ = await two.choose_replicas(two.all, pending({"prompt": list(range(3000))}, "second"))
        assert second.replica_id.name == first.replica_id.name
        one.update_replicas([])
        assert one.stats()["open_bookings"] == 0
        assert one._exchange._task is None, "a deployment that is gone is still listened for"
        two.update_replicas([])

    asyncio.run(asyncio.wait_for(ask(), 60.0))


def test_a_dead_replica_is_forgotten_with_its_bookings(module: ModuleType) -> None:
    async def ask() -> None:
        router = await started(module)
        request = pending(PROMPT)
        (first,), _ = await router.choose_replicas(router.all, request)
        router.on_replica_actor_died(first.replica_id)
        stats = router.stats()
        assert first.replica_id.name not in stats["replicas"]
        assert (stats["bookings_of_removed"], stats["open_bookings"]) == (1, 0)
        (second,), _ = await router.choose_replicas(router.all, request)
        assert second is not first

    asyncio.run(ask())


def test_what_a_replica_reports_is_used_and_nonsense_is_counted(module: ModuleType) -> None:
    async def ask() -> None:
        router = await started(module)
        told = replica("a", kv_capacity_tokens=9000, kv_event_metadata={"endpoint": "ipc:///nowhere", "block_size": 8})
        router.update_replicas([told, replica("b", block_size="eight")])
        specs = router._scheduler.scheduler.workers
        assert (specs["a"].kv_capacity_tokens, specs["a"].block_size) == (9000, 8)
        assert specs["b"].kv_capacity_tokens == 200_000
        stats = router.stats()
        assert (stats["metadata_refused"], stats["events_of"]) == (1, ["a"])
        router._events.close()

    asyncio.run(ask())


def test_an_error_in_the_bookings_stops_no_call_of_rays(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        router = await started(module)

        def broken(replica: str, call_id: str) -> bool:
            raise RuntimeError

        monkeypatch.setattr(router._scheduler, "completed", broken)
        router.on_request_completed(Id("a"), "call")
        assert router.stats()["hook_failed"] == 1

    asyncio.run(ask())


@pytest.mark.parametrize(
    "kwargs", [{"extractor": "none"}, {"unheard_of": 1}, {"config": {"unheard_of": 1}}, {"threads": 0}]
)
def test_wrong_options_are_refused_by_name(module: ModuleType, kwargs: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(kwargs.get("config", kwargs)))):
        module.PrebleRequestRouter().initialize_state(**kwargs)
