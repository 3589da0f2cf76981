"""The interface of placement rules. Owns `Policy`, what a policy sees, and how a name becomes one; decides, never
books.

A policy sees one request and the eligible workers as columns, scores each (lower is better) and picks one. It keeps no
state: what it needs (a running number, chance, what `needs` names) comes with the request, so that explaining and
making a decision agree. "e2", the default, is compiled (`_placement/e2.pyx`) and appears here by name only; the other
built-in rules are in `preble/policies/`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Mapping, Sequence

from ..errors import InvalidConfig, InvalidInput
from ..lazy_typing import Any, dataclass, field
from . import NAMES, build, rule


@dataclass(frozen=True, slots=True)
class RequestView:
    """The request as a policy sees it.

    `sequence` counts the decisions booked so far; `draw` is in [0, 1) and depends only on the scheduler's seed and
    `sequence`. `request_id` is None where the caller named none, `group` where it is no sample of one. `known` has what
    the policy's `needs` name, each with a value for every worker id; see `preble/policies/known.py`.
    """

    token_ids: Any
    namespace: Hashable
    max_new_tokens: int | None
    sequence: int
    draw: float
    request_id: Hashable = None
    known: Mapping[str, Any] = field(default_factory=dict)
    group: Hashable = None


@dataclass(frozen=True, slots=True)
class WorkersView:
    """The eligible workers, one entry a worker in every column, in a fixed order.

    `load_seconds`, `eviction_seconds`, `prefill_seconds` are the L, M and P of the paper for this request; `waiting_*`
    is work that was booked and has not produced a first token yet. `mean_output_tokens` is what to expect of a request
    without a limit, `context_token_seconds` how much longer an iteration takes for each token of its contexts.
    Of the fleet: `hit_share` is the part of the window's prompt tokens that was cached where they went, `pressure` the
    seconds that others wait for each second of work, at most 2.
    """

    ids: Sequence[str]
    matched_tokens: Sequence[int]
    load_seconds: Sequence[float]
    eviction_seconds: Sequence[float]
    prefill_seconds: Sequence[float]
    live_requests: Sequence[int]
    waiting_requests: Sequence[int]
    waiting_prefill_seconds: Sequence[float]
    live_output_tokens: Sequence[int]
    live_prompt_tokens: Sequence[int]
    mean_output_tokens: Sequence[int]
    context_token_seconds: Sequence[float]
    cached_tokens: Sequence[int]
    kv_capacity_tokens: Sequence[int]
    hit_share: float
    pressure: float

    def __len__(self) -> int:
        return len(self.ids)


class Policy:
    """Base of all policies. Override `score`, or `pick` for rules that are not a minimum. Must not keep or change
    state.

    `reason` is what decisions carry as their reason. `needs` names the state that the scheduler shall keep for this
    policy ("active_blocks", "placed_requests", "paper_history", "session", "window_costs"); what they say comes with
    the request.
    `takes_plans`: whether prefixes that become too hot are moved and copied for it (docs/policies.md): a plan's
    worker then takes the place of its choice. Errors raised here reach the caller of `schedule`; nothing is booked
    then. Called under the scheduler's lock, so by one thread at a time.
    """

    name = "custom"
    reason = "custom"
    needs: tuple[str, ...] = ()
    takes_plans = False

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        """Returns one number a worker, shape [workers], lower is better; zeros where a policy only picks. `request` and
        `workers` are what it may look at. Raises what it likes; then nothing is booked. O(workers) is usual."""
        return [0.0] * len(workers)

    def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> int:
        """Returns the position of the chosen worker in `workers`: the lowest of `scores`, then fewer live requests,
        then order. `request` as for `score`. Raises what it likes; then nothing is booked. O(workers)."""
        return min(range(len(scores)), key=lambda i: (scores[i], workers.live_requests[i], i))

    def decide(self, request: RequestView, workers: WorkersView) -> int:
        """Score, pick and check; `request` and `workers` as for `score`. Returns the chosen position. Raises
        InvalidInput if the policy answers nonsense. O(workers)."""
        return self._position(self.pick(self.checked_scores(request, workers), request, workers), len(workers))

    def checked_scores(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        """Returns what `score` says of `request` and `workers`, as floats. Raises InvalidInput unless it is one number
        for each worker. O(workers)."""
        answer = self.score(request, workers)
        try:
            scores = [float(score) for score in answer]
        except (TypeError, ValueError):
            raise InvalidInput(f"policy {self.name!r} scored {answer!r}, not one number a worker") from None
        if len(scores) != len(workers):
            raise InvalidInput(f"policy {self.name!r} scored {len(scores)} of {len(workers)} workers")
        if any(math.isnan(score) for score in scores):
            raise InvalidInput(f"policy {self.name!r} gave a score that is not a number: {scores}")
        return scores

    def _position(self, choice: Any, workers: int) -> int:
        """`choice` as an int; any integer type will do (numpy's argmin), a bool will not."""
        try:
            position = -1 if isinstance(choice, bool) else operator.index(choice)
        except TypeError:
            position = -1
        if not 0 <= position < workers:
            raise InvalidInput(f"policy {self.name!r} picked {choice!r}, not a position in 0..{workers - 1}")
        return position


POLICIES = ("e2", *NAMES)


def resolve(policy: str | Policy | type[Policy]) -> Policy | None:
    """The policy object for a name ("module:Class" and arguments included, see `named`), class or object; None stands
    for the compiled "e2". Raises InvalidConfig."""
    if policy == "e2":
        return None
    if isinstance(policy, str):
        policy = _by_text(policy)
    if isinstance(policy, type) and issubclass(policy, Policy):
        policy = policy()
    if isinstance(policy, Policy):
        if type(policy).score is Policy.score and type(policy).pick is Policy.pick:
            raise InvalidConfig(f"policy {policy.name!r} overrides neither score() nor pick()")
        return policy
    raise InvalidConfig(f"policy must be one of {', '.join(POLICIES)} or a preble.Policy, got {policy!r}")


def _by_text(text: str) -> Any:
    """The policy that a text names. Raises InvalidConfig."""
    try:
        built_in = build(text)
    except LookupError as error:
        raise InvalidConfig(error.args[0]) from None
    if built_in is not None:
        return built_in
    from . import named

    name, given = named.parse(text)
    known = rule(name)
    if known is not None:
        return named.built(known[0], {**known[1], **given}, text)
    if name == "e2":
        raise InvalidConfig(f"policy {text!r}: e2 has no arguments, its knobs are SchedulerConfig's")
    if ":" not in name:
        near = named.nearest(name, POLICIES)
        raise InvalidConfig(
            f"policy must be one of {', '.join(POLICIES)}, module:Class or a preble.Policy, got {text!r}{near}"
        )
    kind = named.own_class(name)
    if not issubclass(kind, Policy):
        raise InvalidConfig(f"policy {name!r} is no preble.Policy: its class must inherit from it")
    return named.built(kind, given, text)
