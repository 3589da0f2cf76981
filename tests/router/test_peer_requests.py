"""What a router makes of other routers' requests: as they happen, and of a past that it was not there for. No process;
those are in test_several_routers."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from preble import GlobalScheduler, PrefixEvicted, WorkerSpec
from preble.router.peer_requests import PeerRequests
from preble.types import BlockRemoved, CacheEvent, PrefixStored, RequestEnded, RequestPlaced, RequestPrefilled

OWN = "a"


def life(router: str, request_id: str, tokens: Sequence[int] = (1, 2, 3)) -> list[CacheEvent]:
    """All that is reported of a request."""
    return [
        RequestPlaced(router, request_id, tokens, None, 8),
        RequestPrefilled(router, request_id, 0),
        RequestEnded(router, request_id, 5),
    ]


def test_what_happens_is_passed_on_but_for_this_routers_own() -> None:
    peers = PeerRequests(OWN)
    other = [*life("b", "1"), BlockRemoved((7,))]
    assert [*peers.take([*other[:2], *life(OWN, "1"), *other[2:]], past=False)] == other
    assert peers.counters.peer_requests == 1
    assert peers.caught_up() == []


def test_a_request_that_was_over_is_no_load_and_its_prompt_is_known() -> None:
    peers = PeerRequests(OWN)
    assert [*peers.take(life("b", "1"), past=True)] == [PrefixStored((1, 2, 3)), life("b", "1")[2]]
    assert peers.caught_up() == []
    assert peers.counters.peer_requests_past == 1 and peers.counters.peer_requests == 0


def test_a_request_that_still_runs_is_booked_once_the_past_is_over() -> None:
    peers = PeerRequests(OWN)
    placed, prefilled, ended = life("b", "1")
    waiting = RequestPlaced("b", "2", (4, 5))
    assert [*peers.take([placed, waiting], past=True)] == []
    assert [*peers.take([prefilled], past=True)] == [PrefixStored((1, 2, 3))]
    assert peers.caught_up() == [placed, prefilled, waiting]
    assert [*peers.take([ended], past=False)] == [ended]


def test_its_own_past_reports_what_is_cached_and_books_nothing() -> None:
    """What it had running there before a break runs elsewhere now."""
    peers = PeerRequests(OWN)
    assert [*peers.take(life(OWN, "1")[:2], past=True)] == [PrefixStored((1, 2, 3))]
    assert [*peers.take(life(OWN, "2"), past=True)] == [PrefixStored((1, 2, 3))]
    assert peers.caught_up() == []


def test_after_a_break_the_past_ends_what_was_booked_before_it() -> None:
    peers = PeerRequests(OWN)
    placed, prefilled, ended = life("b", "1")
    assert [*peers.take([placed], past=False)] == [placed]
    assert [*peers.take([prefilled, ended, BlockRemoved((7,))], past=True)] == [prefilled, ended, BlockRemoved((7,))]


def test_one_that_is_reported_again_during_a_break_and_ends_in_it_is_booked_no_more() -> None:
    """Regression: a worker repeats old requests when another router comes, and the end was taken for the repeat's."""
    peers, scheduler = PeerRequests(OWN), GlobalScheduler([WorkerSpec("w")])
    placed, prefilled, ended = life("b", "1")
    scheduler.apply("w", peers.take([placed, prefilled], past=False))
    assert scheduler.stats()["peer_bookings"] == 1
    scheduler.apply("w", peers.take([placed, prefilled, ended], past=True))
    scheduler.apply("w", peers.caught_up())
    assert scheduler.stats()["peer_bookings"] == scheduler.stats()["live_requests"] == 0
    scheduler.check()


def test_over_the_bound_the_oldest_that_wait_are_dropped_and_counted() -> None:
    peers = PeerRequests(OWN, max_waiting=2)
    for number in "123":
        assert [*peers.take(life("b", number)[:1], past=True)] == []
    assert [event.request_id for event in peers.caught_up() if isinstance(event, RequestPlaced)] == ["2", "3"]
    assert peers.counters.peer_requests_dropped == 1


def test_a_worker_that_is_another_one_has_no_past() -> None:
    peers = PeerRequests(OWN)
    assert [*peers.take(life("b", "1")[:1], past=True)] == []
    peers.begin()
    assert peers.caught_up() == []


# --- against the plain meaning ----------------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.booleans()), max_size=40)


def history(steps: Sequence[tuple[str, int, bool]]) -> list[CacheEvent]:
    """A worker's event stream: each step takes one request of a router further, or ends it before its time; some
    prompts are evicted in between. Ids are never used twice."""
    events: list[CacheEvent] = []
    state: dict[tuple[str, int], tuple[int, int]] = {}  # (router, slot) -> number of the request, how far it is
    for number, (router, slot, leaves) in enumerate(steps):
        request, stage = state.get((router, slot), (number, 0))
        reports = life(router, str(request), [request + 1, request + 2])
        if leaves and stage:
            events.append(RequestEnded(router, str(request)))
            stage = 3
        else:
            events.append(reports[stage])
            stage += 1
        state[router, slot] = (request, stage)
        if stage == 3:
            del state[router, slot]
        if number % 7 == 6:
            events.append(PrefixEvicted([request + 1, request + 2], 0))
    return events


def running(events: Sequence[CacheEvent]) -> dict[tuple[str, str], bool]:
    """The requests of other routers that are not over, and whether they have their first token."""
    found: dict[tuple[str, str], bool] = {}
    for event in events:
        if isinstance(event, RequestPlaced) and event.router != OWN:
            found[event.router, event.request_id] = False
        elif isinstance(event, RequestPrefilled) and (event.router, event.request_id) in found:
            found[event.router, event.request_id] = True
        elif isinstance(event, RequestEnded):
            found.pop((event.router, event.request_id), None)
    return found


def cut(events: Sequence[CacheEvent], sizes: Sequence[int]) -> list[Sequence[CacheEvent]]:
    """The same in batches."""
    batches, at = [], 0
    for size in sizes:
        batches.append(events[at : at + size])
        at += size
    return [*batches, events[at:]]


@given(STEPS, st.integers(0, 20), st.integers(0, 20), st.lists(st.integers(0, 5), max_size=20))
@settings(max_examples=500)
def test_whenever_it_comes_or_comes_back_it_books_what_runs_and_nothing_else(
    steps: list[tuple[str, int, bool]], first: int, second: int, sizes: list[int]
) -> None:
    """It was there until `first`, away until `second`: with `first` 0, it comes late. At the end its scheduler has what
    one has that was there all the time, and booked no request that was over."""
    events = history(steps)
    away = (min(first, len(events)), min(first + second, len(events)))
    peers, reports = PeerRequests(OWN), []
    for batch in cut(events[: away[0]], sizes):
        reports += peers.take(batch, past=False)
    before = len(reports)
    for batch in cut(events[away[0] : away[1]], sizes):
        reports += peers.take(batch, past=True)
    behind = [event for event in reports[before:] if isinstance(event, RequestPlaced)]
    reports += peers.caught_up()
    assert behind == [], "nothing is booked before the past is over"
    assert running(reports) == running(events[: away[1]])
    for batch in cut(events[away[1] :], sizes):
        reports += peers.take(batch, past=False)
    assert running(reports) == running(events)
    assert [e for e in reports if isinstance(e, PrefixEvicted)] == [e for e in events if isinstance(e, PrefixEvicted)]
    scheduler = GlobalScheduler([WorkerSpec("w")])
    scheduler.apply("w", reports)
    stats = scheduler.stats()
    assert stats["peer_bookings"] == stats["live_requests"] == len(running(events))
    booked = {(event.router, event.request_id) for event in reports if isinstance(event, RequestPlaced)}
    ends = [event for event in reports if isinstance(event, RequestEnded)]
    never_booked = [event for event in ends if (event.router, event.request_id) not in booked]
    assert stats["peer_events_ignored"] == len(never_booked), "all else was understood"
    scheduler.check()


@given(STEPS, st.integers(0, 80))
def test_a_late_router_knows_the_prompts_of_the_past_unless_they_were_evicted_since(
    steps: list[tuple[str, int, bool]], late: int
) -> None:
    events = history(steps)[:late]
    peers, reports = PeerRequests(OWN), []
    for event in events:
        reports += peers.take([event], past=True)
    prompts = {(e.router, e.request_id): e.token_ids for e in events if isinstance(e, RequestPlaced)}
    meant = [
        PrefixStored(prompts[e.router, e.request_id]) if isinstance(e, RequestPrefilled) else e
        for e in events
        if isinstance(e, RequestPrefilled | PrefixEvicted) or (isinstance(e, RequestEnded) and e.router != OWN)
    ]
    assert reports == meant
