"""The bookings that policies need: what they say is what a naive count says, and they return to zero whatever happens.

The rules that read them are tested in `policies/test_policies.py`.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pytest

from preble import CostModel, GlobalScheduler, ManualClock, Policy, SchedulerConfig, WorkerSpec
from preble.costs.thresholds import imbalance_share
from preble.errors import DuplicateRequest, InvalidInput, InvalidTokens
from preble.policies.base import RequestView, WorkersView
from preble.policies.known import ActiveBlocks, PaperHistory, PromptSession, WindowCosts
from preble.policies.simple import RoundRobin
from preble.scheduling.policy_state import (
    TRACKERS,
    PaperHistoryTracker,
    SessionTracker,
    WindowCostTracker,
    common_blocks,
    longest_node_end,
    token_bytes,
)
from tests.stress.threads import stress_scheduler

COST = CostModel.preset("mistral-7b/a6000")


class Curious(RoundRobin):
    """Needs every book and remembers what it was reported last."""

    name = reason = "curious"
    needs = tuple(TRACKERS)

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        self.told = dict(request.known)
        return super().score(request, workers)


def curious(workers: int = 2, **config: Any) -> tuple[GlobalScheduler, Curious, ManualClock]:
    policy, clock = Curious(), ManualClock(1000.0)
    specs = [WorkerSpec(f"w{i}", kv_capacity_tokens=100_000) for i in range(workers)]
    sched = GlobalScheduler(specs, policy=policy, cost_model=COST, clock=clock, config=SchedulerConfig(**config))
    return sched, policy, clock


def ask(sched: GlobalScheduler, policy: Curious, prompt: Sequence[int], namespace: Hashable = None) -> dict[str, Any]:
    sched.explain(prompt, namespace=namespace)
    return policy.told


# --- all of them ------------------------------------------------------------------------------------------------------


def naive_blocks(live: dict[Hashable, tuple[str, Hashable, tuple[int, ...]]], worker: str) -> set[Any]:
    """(namespace, all tokens up to the block's end) of each whole block of a worker's live requests."""
    own = [(space, prompt) for name, space, prompt in live.values() if name == worker]
    return {(space, prompt[:end]) for space, prompt in own for end in range(16, len(prompt) + 1, 16)}


class History:
    """A random life of a scheduler whose policy needs every book, beside a plain list of what is live."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.sched, self.policy, self.clock = curious(3, lease_seconds=60.0)
        self.live: dict[Hashable, tuple[str, Hashable, tuple[int, ...]]] = {}
        self.waiting: dict[Hashable, int] = {}
        self.placed = {f"w{i}": 0 for i in range(3)}
        self.booked_at: dict[Hashable, float] = {}
        self.number = 0

    def prompt(self) -> tuple[int, ...]:
        depth = self.chance.randint(1, 6)
        stem = [token for _ in range(depth) for token in [self.chance.randint(1, 2)] * self.chance.choice([8, 16, 20])]
        return (*stem, *range(self.chance.choice([0, 0, 1, 40])))

    def step(self) -> None:
        self.clock.advance(self.chance.random() * 4)
        kind = self.chance.choices(["place", "token", "finish", "cancel", "fleet", "tick"], [9, 4, 6, 2, 1, 1])[0]
        getattr(self, kind)()

    def place(self) -> None:
        prompt, space = self.prompt(), self.chance.choice([None, "tenant"])
        told: ActiveBlocks = ask(self.sched, self.policy, prompt, space)["active_blocks"]
        for worker in self.sched.workers:
            held = naive_blocks(self.live, worker)
            more = naive_blocks({0: (worker, space, prompt)}, worker) - held
            assert (told.blocks[worker], told.new_blocks[worker]) == (len(held), len(more))
            waiting = sum(tokens for name, tokens in self.waiting.items() if self.live[name][0] == worker)
            assert told.prefill_tokens[worker] == waiting
        assert self.policy.told["placed_requests"] == self.placed
        decision = self.sched.schedule(prompt, request_id=self.number, namespace=space)
        self.live[self.number] = decision.worker, space, prompt
        self.waiting[self.number] = decision.prompt_tokens - decision.matched_tokens
        self.booked_at[self.number] = self.clock()
        self.placed[decision.worker] += 1
        self.number += 1

    def any_live(self) -> Hashable:
        return self.chance.choice([*self.live, "nobody"])

    def token(self) -> None:
        name = self.any_live()
        assert self.sched.first_token(name) == (name in self.live)
        self.waiting.pop(name, None)

    def over(self, name: Hashable) -> None:
        self.live.pop(name, None)
        self.waiting.pop(name, None)

    def finish(self) -> None:
        name = self.any_live()
        output = self.chance.choice([None, 0, 7, 90])
        assert self.sched.finish(name, output_tokens=output) == (name in self.live)
        self.over(name)

    def cancel(self) -> None:
        name = self.any_live()
        assert self.sched.cancel(name) == (name in self.live)
        self.over(name)

    def fleet(self) -> None:
        """A worker goes, now and then to come back at once; its requests live on, on nobody's account."""
        name = self.chance.choice([*self.sched.workers])
        orphans = self.sched.remove_worker(name)
        assert set(orphans) == {one for one, (worker, _, _) in self.live.items() if worker == name}
        del self.placed[name]
        for one in orphans:
            self.live[one] = ("gone", *self.live[one][1:])
        if len(self.sched.workers) < 2 or self.chance.random() < 0.5:
            fresh = name if self.chance.random() < 0.5 else f"w{self.number}x{self.chance.randint(0, 9)}"
            self.sched.add_worker(fresh)
            self.placed[fresh] = 0

    def tick(self) -> None:
        self.sched.tick()
        for name in [one for one in self.live if self.booked_at[one] < self.clock() - 60.0]:
            self.over(name)


@pytest.mark.parametrize("seed", range(6))
def test_books_agree_with_a_naive_count_and_return_to_zero(seed: int) -> None:
    """Through cancels, late calls, removed workers, names that come back, and leases that expire."""
    history = History(seed)
    for _ in range(300):
        history.step()
        history.sched.check()
    assert history.sched.stats()["expired_leases"] > 0, "no lease ever expired"
    for name in list(history.live):
        assert history.sched.cancel(name)
    history.clock.advance(500.0)
    told = ask(history.sched, history.policy, [*range(64)])
    active: ActiveBlocks = told["active_blocks"]
    assert set(active.blocks.values()) == set(active.prefill_tokens.values()) == {0}
    assert set(active.new_blocks.values()) == {4}
    window: WindowCosts = told["window_costs"]
    assert set(window.seconds.values()) == {0.0} and set(window.requests.values()) == {0}
    books = history.sched.stats()["policy_state"]
    assert books["active_blocks"] == {"requests": 0, "blocks": 0}
    assert books["window_costs"] == {"requests": 0, "prompts": 0, "dropped": 0}
    assert books["paper_history"]["requests"] == 0
    history.sched.check()


def test_a_decision_that_fails_books_nothing() -> None:
    sched, _, _ = curious()
    sched.schedule([*range(40)], request_id="one")
    before = sched.stats()
    with pytest.raises(DuplicateRequest):
        sched.schedule([*range(40)], request_id="one")
    with pytest.raises(InvalidTokens):
        sched.schedule([-1])
    assert sched.stats() == before
    sched.check()


def test_a_finish_that_claims_too_much_cached_leaves_the_bookings_alone() -> None:
    sched, policy, _ = curious()
    sched.schedule([*range(40)], request_id="one")
    for call in sched.first_token, sched.finish:
        with pytest.raises(InvalidInput, match="cached_tokens"):
            call("one", cached_tokens=41)
    assert ask(sched, policy, [1])["active_blocks"].blocks == {"w0": 2, "w1": 0}
    assert ask(sched, policy, [1])["active_blocks"].prefill_tokens == {"w0": 40, "w1": 0}
    sched.check()


def test_a_policy_without_needs_opens_no_books() -> None:
    for policy in "e2", "least_loaded":
        sched = GlobalScheduler(["a"], policy=policy)
        assert sched._policy_state is None and sched.stats()["policy_state"] == {}


@pytest.mark.parametrize("policy", ["kv_cost", "cache_aware", "aibrix_preble", "e2-paper", "session_least"])
def test_threads_leave_the_bookings_right(policy: str) -> None:
    assert stress_scheduler(200, seed=8, policy=policy)["scheduled"] >= 200


def test_a_check_notices_a_book_that_is_wrong() -> None:
    """Else the histories above could not fail."""
    spoilers: dict[str, Any] = {
        "active_blocks": lambda book: setattr(book._workers["w0"], "blocks", 3),
        "window_costs": lambda book: book._nanoseconds.update(w0=1),
        "paper_history": lambda book: setattr(book._workers["w0"], "finished", 5),
        "session": lambda book: book._workers.remove("w0"),
    }
    for need, spoil in spoilers.items():
        sched, _, _ = curious()
        sched.schedule([*range(40)])
        spoil(sched._policy_state._trackers[need])
        with pytest.raises(AssertionError, match="w0"):
            sched.check()


# --- active blocks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [0, 1, 2, 3])
def test_common_blocks_counts_whole_blocks_from_the_start(least: int) -> None:
    one = token_bytes(list(range(100))[:96])
    for shared in (0, 15, 16, 17, 47, 48, 96):
        other = token_bytes([*range(shared), *[7000] * (96 - shared)])
        assert common_blocks(one, other, least) == max(shared // 16, least)
    assert common_blocks(one, one[:128], 0) == 2


def test_blocks_that_live_requests_share_count_once_and_tenants_share_none() -> None:
    sched, policy, _ = curious(1)
    sched.schedule(list(range(100)), request_id="a")  # six whole blocks
    sched.schedule([*range(50), *range(900, 950)], request_id="b")  # shares three of them
    assert ask(sched, policy, list(range(64)))["active_blocks"].blocks == {"w0": 9}
    assert policy.told["active_blocks"].new_blocks == {"w0": 0}
    assert ask(sched, policy, list(range(64)), "tenant")["active_blocks"].new_blocks == {"w0": 4}
    sched.finish("a")
    assert ask(sched, policy, list(range(64)))["active_blocks"].blocks == {"w0": 6}
    assert policy.told["active_blocks"].new_blocks == {"w0": 1}


# --- AIBrix's window --------------------------------------------------------------------------------------------------


def test_the_window_charges_a_prompt_its_decode_once_and_its_prefill_by_count_and_miss_rate() -> None:
    sched, policy, clock = curious(2)
    prompt = list(range(1000))
    sched.schedule(prompt)  # w0: nothing known
    prefill = COST.prefill_time(1000, 1000)
    assert ask(sched, policy, [1])["window_costs"].seconds == pytest.approx({"w0": prefill + 6.75, "w1": 0.0})
    sched.schedule(prompt)  # w1 now serves it too, and is charged for both times
    sched.schedule(prompt)
    told: WindowCosts = ask(sched, policy, [1])["window_costs"]
    assert told.seconds == pytest.approx({"w0": 3 * prefill + 6.75, "w1": 3 * prefill + 6.75})
    assert told.requests == {"w0": 3, "w1": 3}
    clock.advance(90.0)
    sched.schedule([*range(600), *range(5000, 5400)])  # w1: 400 of 1000 are its own
    own = 0.4 * COST.prefill_time(400, 1000)
    told = ask(sched, policy, prompt)["window_costs"]
    assert told.seconds["w1"] == pytest.approx(3 * prefill + own + 13.5) and told.known_tokens == 1000
    clock.advance(90.0)
    told = ask(sched, policy, [1])["window_costs"]
    assert told.seconds == pytest.approx({"w0": 0.0, "w1": own + 6.75}) and told.requests == {"w0": 0, "w1": 1}


def test_the_window_is_bounded_and_counts_what_leaves_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowCostTracker, "requests_max", 4)
    sched, policy, _ = curious(1)
    for i in range(7):
        sched.schedule([i] * 20)
        sched.check()
    assert sched.stats()["policy_state"]["window_costs"] == {"requests": 4, "prompts": 4, "dropped": 3}
    assert ask(sched, policy, [1])["window_costs"].requests == {"w0": 4}


# --- the paper's history ----------------------------------------------------------------------------------------------


def test_the_history_is_the_last_h_requests_with_what_they_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PaperHistoryTracker, "requests_max", 3)
    sched, policy, _ = curious(2)
    prompts = [[n] * length for n, length in enumerate([100, 900, 200, 800, 300, 700, 400, 600])]
    for prompt in prompts:  # the even ones go to w0, the odd ones to w1
        sched.schedule(prompt)
        sched.check()
    told: PaperHistory = ask(sched, policy, [99])["paper_history"]
    for worker, lengths in ("w0", [200, 300, 400]), ("w1", [800, 700, 600]):
        assert told.prefill_seconds[worker] == pytest.approx(sum(COST.prefill_time(n, n) for n in lengths))
        assert told.decode_seconds[worker] == pytest.approx(3 * COST.decode_time(45))
    sched.schedule(prompts[6])  # known but for its last block, whose last token must be computed
    told = ask(sched, policy, [99])["paper_history"]
    seconds = COST.prefill_time(300, 300) + COST.prefill_time(400, 400) + COST.prefill_time(16, 400)
    assert told.prefill_seconds["w0"] == pytest.approx(seconds)


def test_imbalr_is_the_cost_models_unless_the_configuration_has_one() -> None:
    for configured, expected in (0.0, imbalance_share(COST)), (0.7, 0.7):
        sched, policy, _ = curious(2, imbalance_share=configured)
        assert ask(sched, policy, [99])["paper_history"].imbalance_shares == {"w0": expected, "w1": expected}


def test_decode_time_is_of_the_mean_output_of_finished_requests_in_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PaperHistoryTracker, "requests_max", 2)
    sched, policy, _ = curious(2)
    for number in range(4):
        sched.schedule([number] * 50, request_id=number)

    def decode() -> dict[str, float]:
        seconds: dict[str, float] = ask(sched, policy, [99])["paper_history"].decode_seconds
        return seconds

    sched.finish(0, output_tokens=10)
    assert decode() == pytest.approx({"w0": 2 * COST.decode_time(10), "w1": 2 * COST.decode_time(10)})
    sched.finish(2, output_tokens=30)
    sched.finish(1, output_tokens=70)
    sched.finish(3)  # nobody said how many
    assert decode() == pytest.approx({"w0": 2 * COST.decode_time(20), "w1": 2 * COST.decode_time(70)})
    sched.schedule([4] * 50, request_id=4)  # pushes out the first, with its ten tokens
    assert decode()["w0"] == pytest.approx(2 * COST.decode_time(30))
    sched.schedule([5] * 50, request_id=5)
    sched.schedule([6] * 50, request_id=6)
    sched.schedule([7] * 50, request_id=7)
    sched.schedule([8] * 50, request_id=8)  # the history of w0 is now 6 and 8
    sched.finish(4, output_tokens=999)  # too late to count
    seconds = 2 * COST.decode_time(45)  # of what is in the histories, nothing has finished
    assert decode() == pytest.approx({"w0": seconds, "w1": seconds})
    sched.check()


def test_eviction_is_charged_for_the_prompts_length_as_if_the_worker_were_full() -> None:
    sched, policy, clock = curious(1)
    for prompt in [1] * 300, [2] * 500, [2] * 500:
        sched.schedule(prompt)
        clock.advance(0.001)
    told: PaperHistory = ask(sched, policy, [9] * 400)["paper_history"]
    # The oldest as a whole, hit once, then the last 100 tokens of the other, hit twice.
    seconds = COST.prefill_time(300, 300) + 2 * COST.prefill_time(100, 500)
    assert told.eviction_seconds("w0") == pytest.approx(seconds, rel=1e-3)
    assert curious(1)[0].explain([9] * 400).workers[0].eviction_seconds == 0.0


@pytest.mark.parametrize(
    ("ends", "end"),
    [([100, 250, 450], 450), ([300, 450, 500], 300), ([200, 400], 400), ([7], 7), ([250, 300, 550], 550)],
)
def test_the_longest_node_wins_and_of_equals_the_deepest(ends: list[int], end: int) -> None:
    assert longest_node_end(ends) == end


def test_holders_cache_the_longest_node_of_the_path_the_tree_knows() -> None:
    sched, policy, _ = curious(2)
    shared = list(range(320))
    sched.schedule([*shared, *[1] * 100])  # w0
    sched.schedule([*shared, *[2] * 600])  # w1, which splits the path at 320
    told = ask(sched, policy, [*shared, *[1] * 100, 5])["paper_history"]
    assert (told.known_tokens, told.holders) == (420, {"w0", "w1"})  # 320 is longer than 100
    told = ask(sched, policy, [*shared, *[2] * 400, 5])["paper_history"]
    assert (told.known_tokens, told.holders) == (720, {"w1"})
    assert ask(sched, policy, [77])["paper_history"].holders == frozenset()
    sched.remove_worker("w1")
    told = ask(sched, policy, [*shared, *[2] * 400, 5])["paper_history"]
    assert (told.known_tokens, told.holders) == (720, frozenset())  # in the tree, and nobody's


def test_the_nodes_of_a_known_path_are_reported_from_the_top() -> None:
    sched = GlobalScheduler(["a"], clock=ManualClock())
    tree = sched.core.tree
    assert tree.path([1, 2, 3]) == []
    sched.schedule([1] * 40)
    sched.schedule([*[1] * 25, 2, 2])
    assert tree.path([1] * 40) == [25, 40] == tree.path([*[1] * 40, 9])
    assert tree.path([1] * 30) == [25, 30]
    assert tree.path([*[1] * 25, 2]) == [25, 26]
    assert tree.path([1] * 40, namespace="other") == [] == tree.path([5])


# --- sessions ---------------------------------------------------------------------------------------------------------

SYSTEM = list(range(3000))


def own(number: int, count: int) -> list[int]:
    """Tokens of nobody else."""
    return list(range(100_000 + 1000 * number, 100_000 + 1000 * number + count))


def session(
    sched: GlobalScheduler, policy: Curious, prompt: Sequence[int], namespace: Hashable = None
) -> PromptSession:
    told: PromptSession = ask(sched, policy, prompt, namespace)["session"]
    return told


def test_users_behind_one_system_prompt_have_sessions_of_their_own_that_stay() -> None:
    """Of 4 workers one's fair share of 12 requests is 3: the system prompt is common, a user's part is not."""
    sched, policy, clock = curious(4)
    for number in range(12):
        sched.schedule([*SYSTEM, *own(number % 6, 200), *own(50 + number, 20)])
        clock.advance(1.0)
    keys = [session(sched, policy, [*SYSTEM, *own(user, 200), *own(90 + user, 20)]).key for user in range(7)]
    assert len(set(keys)) == 7
    again = [session(sched, policy, [*SYSTEM, *own(user, 64), 7]).key for user in range(7)]
    assert again == keys  # 64 tokens of one's own are what counts
    assert session(sched, policy, [*SYSTEM, *own(3, 63), 7]).key not in keys
    sched.schedule([*SYSTEM, *own(5, 200), 1])
    sched.check()


def test_a_conversation_is_one_session_however_few_there_are() -> None:
    """Each turn begins with all of the one before: nobody goes on differently, so nothing of it is common."""
    sched, policy, clock = curious(4)
    prompt = [*SYSTEM]
    seen = set()
    for turn in range(12):
        prompt += own(turn, 100)
        told = session(sched, policy, prompt)
        seen.add(told.key)
        assert (told.home is None) == (turn == 0)
        home = sched.schedule(prompt).worker
        assert session(sched, policy, prompt).home == home
        clock.advance(2.0)
    assert len(seen) == 1


def test_what_more_than_a_fair_share_and_one_had_is_common_until_the_window_has_passed() -> None:
    """Two workers: with 8 requests, 5 and no more are enough."""
    sched, policy, clock = curious(2)
    for number in range(8):
        document = SYSTEM[:1000] if number < 5 else own(80 + number, 1000)
        sched.schedule([*document, *own(number, 70)])
    one, other = ([*SYSTEM[:1000], *own(number, 70)] for number in (30, 31))
    assert session(sched, policy, one).key == session(sched, policy, other).key
    sched.schedule(one)  # 6 of 9 had it: more than 5.5
    assert session(sched, policy, one).key != session(sched, policy, other).key
    clock.advance(400.0)
    assert session(sched, policy, one).key == session(sched, policy, other).key
    assert sched.stats()["policy_state"]["session"]["requests"] == 0


def test_what_is_common_to_one_is_not_to_another_who_are_most_of_those_that_have_it() -> None:
    """Two workers: of 10 requests 6 are enough, and 6 went on differently from the user who sent 4."""
    sched, policy, _ = curious(2)
    often = [*SYSTEM, *own(40, 70)]
    for number in range(10):
        sched.schedule([*(often if number < 4 else [*SYSTEM, *own(number, 70)]), *own(20 + number, 9)])
    first = session(sched, policy, SYSTEM[:64]).key
    assert session(sched, policy, often).key == first != session(sched, policy, [*SYSTEM, *own(30, 70)]).key
    sched.schedule([*SYSTEM, *own(31, 70)])  # 7 of 11
    assert session(sched, policy, often).key != first


def test_a_sessions_key_is_of_its_tokens_and_its_tenant_whatever_they_come_in() -> None:
    sched, policy, _ = curious(2)
    prompt = own(1, 90)
    keys = {session(sched, policy, kind).key for kind in (prompt, tuple(prompt), np.array(prompt), np.int32(prompt))}
    assert keys == {session(sched, policy, prompt[:64]).key}
    assert session(sched, policy, prompt, "tenant").key not in keys


def test_sessions_are_bounded_and_leave_with_their_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionTracker, "sessions_max", 3)
    monkeypatch.setattr(SessionTracker, "requests_max", 4)
    sched, policy, _ = curious(2)
    for number in (0, 1, 2, 0, 3, 4):  # to w0 and w1 in turn; the first is used again, so the second goes
        sched.schedule(own(number, 90))
        sched.check()
    homes = [session(sched, policy, own(number, 90)).home for number in range(5)]
    assert homes == ["w1", None, None, "w0", "w1"]
    assert sched.stats()["policy_state"]["session"] == {"sessions": 3, "requests": 4}
    sched.remove_worker("w1")
    assert [session(sched, policy, own(number, 90)).home for number in (0, 3, 4)] == [None, "w0", None]
    sched.add_worker("w1")
    assert session(sched, policy, own(0, 90)).home is None
    sched.check()


def test_a_policy_is_a_policy_with_needs() -> None:
    assert Policy.needs == () and set(Curious.needs) == set(TRACKERS)
