"""What discovery does about the servers that a source names: the rules one by one, and against a plain model."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from preble.gateway.discovery.known_servers import (
    Change,
    DiscoveryLimits,
    FoundServer,
    KnownServers,
    Readiness,
    reconcile,
)
from preble.transport.engine_servers.server_info import ServerOptions

READY, NOT_READY, TERMINATING = Readiness
LIMITS = DiscoveryLimits(doubt_seconds=30.0, drain_seconds=20.0, servers_max=6)
OPTIONS = [ServerOptions(), ServerOptions(model="m")]


def found(*names: str, readiness: Readiness = READY, options: ServerOptions | None = None) -> dict[str, FoundServer]:
    """An answer that names these servers."""
    return {name: FoundServer(name, options, readiness) for name in names}


@dataclass
class Follower:
    """What a fleet would be if it did what `reconcile` says; it refuses what makes no sense."""

    limits: DiscoveryLimits = LIMITS
    known: KnownServers = field(default_factory=KnownServers)
    fleet: dict[str, str] = field(default_factory=dict)

    def step(self, answer: dict[str, FoundServer], now: float, live: dict[str, int] | None = None) -> list[Change]:
        """One call, and what came of it."""
        self.known, changes = reconcile(self.known, answer, live or {}, now, self.limits)
        for action, server in changes:
            before = self.fleet.get(server.address)
            allowed = {"join": None, "withhold": "serving", "release": "withheld"}
            assert before == allowed[action] if action in allowed else before is not None, (action, before)
            if action == "drain":
                assert before != "draining"
            after = {"join": "serving", "release": "serving", "withhold": "withheld", "drain": "draining"}.get(action)
            if after is None:
                del self.fleet[server.address]
            else:
                self.fleet[server.address] = after
        assert self.fleet == {address: server.phase for address, server in self.known.servers.items()}
        return changes


def actions(changes: list[Change]) -> list[str]:
    """ "join a", ..."""
    return [f"{change.action} {change.found.address}" for change in changes]


def test_servers_that_are_ready_are_joined_and_the_same_answer_changes_nothing() -> None:
    follower = Follower()
    answer = found("a", "b") | found("c", readiness=NOT_READY) | found("d", readiness=TERMINATING)
    assert actions(follower.step(answer, 0.0)) == ["join a", "join b"]
    assert follower.step(answer, 1.0) == []


def test_one_that_terminates_is_drained_and_removed_when_nothing_runs_there() -> None:
    follower = Follower()
    follower.step(found("a", "b", "c"), 0.0)
    ending = found("a", "b") | found("c", readiness=TERMINATING)
    assert actions(follower.step(ending, 1.0)) == ["drain c"]
    assert follower.step(ending, 2.0, {"c": 3}) == []
    assert actions(follower.step(found("a", "b"), 3.0)) == ["remove c"]


def test_a_drain_that_does_not_end_is_cut_off_in_the_end() -> None:
    follower = Follower()
    follower.step(found("a", "b", "c"), 0.0)
    follower.step(found("a", "b"), 1.0, {"c": 1})
    assert follower.step(found("a", "b"), 20.9, {"c": 1}) == []
    assert actions(follower.step(found("a", "b"), 21.0, {"c": 1})) == ["remove c"]


def test_an_empty_answer_after_a_full_one_is_doubted_and_then_followed() -> None:
    follower = Follower()
    follower.step(found("a", "b", "c"), 0.0)
    assert follower.step({}, 10.0) == [] and follower.known.doubted_since == 10.0
    assert follower.step({}, 39.9) == []
    assert actions(follower.step({}, 40.0)) == ["drain a", "drain b", "drain c"]
    assert follower.known.doubted_since is None


def test_a_source_that_flaps_between_nothing_and_everything_loses_nobody() -> None:
    follower = Follower()
    follower.step(found("a", "b", "c"), 0.0)
    for round_ in range(50):
        assert follower.step({}, 20.0 * round_ + 1.0) == []
        assert follower.step(found("a", "b", "c"), 20.0 * round_ + 10.0) == []


def test_a_doubted_answer_still_joins_whom_it_names_and_drains_whom_it_says_to_end() -> None:
    follower = Follower()
    follower.step(found("a", "b", "c"), 0.0)
    answer = found("d") | found("a", readiness=TERMINATING)
    assert actions(follower.step(answer, 1.0)) == ["drain a", "join d"]


def test_one_of_many_that_is_gone_is_drained_at_once() -> None:
    follower = Follower()
    follower.step(found("a", "b"), 0.0)
    assert actions(follower.step(found("a"), 1.0)) == ["drain b"]


def test_one_that_is_not_ready_gets_no_new_requests_until_it_is() -> None:
    follower = Follower()
    follower.step(found("a", "b", "c"), 0.0)
    assert actions(follower.step(found("a", "b") | found("c", readiness=NOT_READY), 1.0)) == ["withhold c"]
    assert actions(follower.step(found("a", "b", "c"), 2.0)) == ["release c"]


def test_where_most_are_not_ready_at_once_their_own_health_decides() -> None:
    """As when the control plane has lost its nodes, and not the nodes their servers."""
    follower = Follower()
    follower.step(found("a", "b", "c"), 0.0)
    follower.step(found("a", "b") | found("c", readiness=NOT_READY), 1.0)
    assert actions(follower.step(found("a", "b", "c", readiness=NOT_READY), 2.0)) == ["release c"]


def test_one_that_comes_back_while_it_drains_is_joined_anew() -> None:
    follower = Follower()
    follower.step(found("a", "b"), 0.0)
    follower.step(found("a"), 1.0, {"b": 1})
    assert actions(follower.step(found("a", "b"), 2.0, {"b": 1})) == ["remove b", "join b"]


def test_one_of_which_something_else_is_said_is_joined_anew() -> None:
    follower = Follower()
    follower.step(found("a", "b", options=OPTIONS[0]), 0.0)
    answer = found("a", options=OPTIONS[1]) | found("b", options=OPTIONS[0])
    assert actions(follower.step(answer, 1.0)) == ["remove a", "join a"]


def test_beyond_the_bound_servers_are_left_out_and_those_that_serve_stay() -> None:
    follower = Follower()
    follower.step(found(*"cdefgh"), 0.0)
    assert follower.step(found(*"abcdefgh"), 1.0) == [] and follower.known.left_out == 2
    assert actions(follower.step(found(*"abcdefg"), 2.0)) == ["drain h"]
    assert actions(follower.step(found(*"abcdefg"), 3.0)) == ["remove h", "join a"]


@dataclass
class NaiveFollower:
    """The rules as sets, one sentence a line."""

    joined: dict[str, ServerOptions | None] = field(default_factory=dict)
    withheld: set[str] = field(default_factory=set)
    drains: dict[str, float] = field(default_factory=dict)
    doubt: float | None = None

    def step(self, answer: dict[str, FoundServer], now: float, live: dict[str, int]) -> None:
        """One look."""
        says = {state: {a for a, one in answer.items() if one.readiness is state} for state in Readiness}
        serving = self.joined.keys() - self.drains.keys()
        gone = serving - answer.keys()
        is_doubted = len(gone) > len(serving - gone)
        self.doubt = (now if self.doubt is None else self.doubt) if is_doubted else None
        if self.doubt is not None and now - self.doubt >= LIMITS.doubt_seconds:
            self.doubt, is_doubted = None, False
        over = {a for a, since in self.drains.items() if not live.get(a) or now - since >= LIMITS.drain_seconds}
        over -= says[READY]
        changed = {a for a in serving & (says[READY] | says[NOT_READY]) if answer[a].options != self.joined[a]}
        unready = serving & says[NOT_READY]
        takes_their_word = len(unready) <= len((serving & answer.keys()) - unready)
        drained = (serving & says[TERMINATING]) | (set() if is_doubted else gone)
        before = set(self.joined)
        for address in over | (changed - says[READY]):
            del self.joined[address]
        self.joined.update((a, answer[a].options) for a in before & says[READY])
        self.drains = {a: since for a, since in self.drains.items() if a in self.joined and a not in says[READY]}
        self.drains.update(dict.fromkeys(drained, now))
        silent = {a for a in self.withheld & gone if is_doubted}
        self.withheld = silent | ((unready - changed) if takes_their_word else set())
        for address, one in answer.items():
            if one.readiness is READY and address not in before and len(self.joined) < LIMITS.servers_max:
                self.joined[address] = one.options

    def phases(self) -> dict[str, str]:
        """What each server is now."""
        kind = {**dict.fromkeys(self.withheld, "withheld"), **dict.fromkeys(self.drains, "draining")}
        return {address: kind.get(address, "serving") for address in self.joined}


SERVERS = st.builds(FoundServer, st.sampled_from("abcdefgh"), st.sampled_from(OPTIONS), st.sampled_from(Readiness))
ANSWERS = st.lists(SERVERS, max_size=8).map(lambda servers: {one.address: one for one in servers})
LOOKS = st.lists(
    st.tuples(
        st.one_of(st.none(), ANSWERS),  # None: the source says what it said before
        st.sampled_from([0.0, 1.0, 7.0, 25.0]),
        st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 2), max_size=8),
    ),
    max_size=30,
)


@settings(max_examples=80, deadline=None)
@given(LOOKS)
def test_whatever_a_source_says_the_fleet_is_what_a_plain_model_says(looks: list) -> None:
    follower, naive, answer, now = Follower(), NaiveFollower(), {}, 0.0
    for said, passed, live in looks:
        answer, now = answer if said is None else said, now + passed
        follower.step(answer, now, live)
        naive.step(answer, now, live)
        assert follower.fleet == naive.phases()
        assert follower.known.doubted_since == naive.doubt
        assert len(follower.fleet) <= LIMITS.servers_max


@settings(max_examples=30, deadline=None)
@given(LOOKS, ANSWERS)
def test_in_the_end_the_fleet_is_what_the_source_says(looks: list, last: dict[str, FoundServer]) -> None:
    follower, now = Follower(), 0.0
    for said, passed, live in looks:
        now += passed
        follower.step({} if said is None else said, now, live)
    for _ in range(3):
        now += LIMITS.doubt_seconds + LIMITS.drain_seconds
        follower.step(last, now)
    ready = {address for address, one in last.items() if one.readiness is READY}
    here = set(follower.fleet)
    assert here - ready <= {a for a, one in last.items() if one.readiness is NOT_READY}, "nobody else is kept"
    assert ready <= here or len(here) == LIMITS.servers_max
    assert not [a for a, phase in follower.fleet.items() if phase == "draining"]
