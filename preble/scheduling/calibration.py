"""What workers really cost, learned from requests' own times. Owns what is taken for each worker, on the terms of the
cost model it was given, and the rule by which a better model is published.

`_placement/timing_samples.pyx` notes samples on the hot path; `Calibrator.tick` reads them in the background, and
`calibration_fit.py`, with numpy that nothing else here loads, says what they say. docs/learning.md explains to an
operator what is behind it. Knows nothing of requests, prompts or policies.

  1. Each worker's factors are estimated from its samples.
  2. Workers with the same prior are a group, and the factors of its middle worker are taken for all of them, newcomers
     too, as long as a worker's own are not clearly others. Until most are measured, all samples of the group together
     say what is taken for all: were those that have samples first judged for themselves, a prior far off would make
     them look another kind than the rest, and one side would get no request. After that, too, who is first measured
     surely is no other kind than those that are not sure yet. Who is not measured is never taken for
     slower than those that are: who looks slow without a sample gets no request, and without one no sample. As long as
     nobody has samples, what workers say of requests that others sent them counts, and gives way to the first ones; but
     for the group, and for nobody alone: it is of times among others' prefills, so that one of two equal engines that
     was busier says that it is several times slower (docs/experiments/learning.md).
  3. A prior is kept until it is clearly wrong for what the worker usually does, and a model is published only where
     it differs enough from the one that is: workers that are alike stay exactly alike.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from .._cost import CostModel
from .._placement.timing_samples import swap_cost
from ..lazy_typing import TYPE_CHECKING, Any, dataclass
from .cost_factors import DECODE_TOKENS, PRIOR, key_of, logs_between, rounded, scaled

if TYPE_CHECKING:
    from .calibration_fit import Estimate
    from .cost_factors import Logs

FRESH_MIN = 16  # samples since the last fit, for another one at once
FIT_AGAIN_SECONDS = 10.0  # for fewer
WORKERS_PER_TICK = 32  # looked at in one tick, in turn; each is some milliseconds
POOLED_MIN = 4  # samples of a whole group, before they say anything together
POOLED_WORKERS_MAX = 32
TOGETHER_WORKERS_MAX = 4  # of a group, all measured, whose samples may show together that a prior is wrong
PRIOR_WRONG = 0.5  # in logarithms: 65 %. The samples' own bias is up to 25 % where a fleet is overloaded
OTHER_THAN_GROUP = 0.5
WORTH_PUBLISHING = 0.1

# For engines about which nothing is known: of the size of a 7B model on an A6000, of no engine's shape. An iteration
# gets longer from where decodes end. GPUs are measured to take no longer up to 60 to 350 tokens, but on a CPU each
# token counts, and what a model says is free stays free whatever is learned (docs/experiments/learning.md).
NEUTRAL = CostModel(
    [(0, 0.0244), (DECODE_TOKENS, 0.0244), (8192, 0.99)],
    context=(0.0, 0.0, 0.0, 2e-7),
    pair=(0.0, 0.0, 0.0, 0.0, 2.4e-9),
    name="neutral",
)


@dataclass(slots=True)
class _Measured:
    """One worker as the calibrator sees it."""

    index: int
    prior: CostModel
    key: Hashable  # equal for equal priors
    published: Logs
    found: Estimate | None = None
    own: bool = False  # its factors are not its group's
    said: Logs | None = None  # what it said of its speed before it had requests from here
    seen: tuple[int, int, int] = (0, 0, 0)
    changes: int = 0
    fitted_at: float = -math.inf


class Calibrator:
    """Estimates and publishes the workers' costs. Its scheduler calls it in single steps, and `tick` without its
    lock."""

    def __init__(self, core: Any, window_seconds: float) -> None:
        self._core = core
        self._window_seconds = window_seconds
        self._workers: dict[str, _Measured] = {}
        self._groups: dict[Hashable, Logs] = {}  # what is taken for a group's workers
        self._unmeasured: dict[Hashable, Logs] = {}  # and for those of them without samples
        self._pooled: dict[Hashable, int] = {}  # samples that were last looked at together
        self._learned: set[Hashable] = set()  # groups of which more is known than what workers said of themselves
        self._changed = False  # since groups were last looked at: who is there, what is known of somebody, or published

    def first_logs(self, prior: CostModel, said: Logs) -> Logs:
        """The factors for who joins and says so of its speed: its group's where somebody of it is there, so that nobody
        looks slow for what it said."""
        key = key_of(prior)
        return self._groups[key] if any(worker.key == key for worker in self._workers.values()) else said

    def opened(self, name: str, index: int, prior: CostModel, published: CostModel, said: Logs | None = None) -> None:
        """A worker joined, whose decisions reckon with `published`: its prior, what was known of it when it was
        restored, or `first_logs` of what it `said` of requests of others, which counts until there are samples."""
        logs = logs_between(prior, published)
        worker = _Measured(index, prior, key_of(prior), logs, said=said)
        self._workers[name] = worker
        self._changed = True
        self._groups.setdefault(worker.key, logs)
        if said is None and logs != PRIOR:
            self._learned.add(worker.key)

    def closed(self, name: str) -> None:
        """A worker left."""
        self._workers.pop(name, None)
        self._changed = True

    def tick(self, now: float) -> None:
        """Look at new samples of some workers in turn, and publish what changes decisions. Takes the writers' lock for
        microseconds at a time."""
        for name in list(self._workers)[:WORKERS_PER_TICK]:
            self._measure(name, now)
        if self._regroup(now):
            for name in list(self._workers):
                self._publish(name)

    def _measure(self, name: str, now: float) -> None:
        with self._core.tree:
            worker = self._workers.pop(name, None)
            if worker is None:
                return
            self._workers[name] = worker  # in turn: it is the last now
            seen = self._core.timings.counts(worker.index)
            fresh = sum(seen) - sum(worker.seen)
            soon = fresh < FRESH_MIN and abs(now - worker.fitted_at) < FIT_AGAIN_SECONDS
            if not fresh or (soon and worker.found is not None):
                return
            prefills, decodes = self._core.timings.samples(worker.index)
        from .calibration_fit import estimated, rows_of

        found = estimated(worker.prior, rows_of(prefills), rows_of(decodes), now - self._window_seconds)
        worker.seen = seen
        if found is not None:
            worker.found, worker.fitted_at = found, now
            self._changed = True

    def _regroup(self, now: float) -> bool:
        """The factors of each group, moved where that is worth it, and who differs from its group; False where nothing
        can have changed."""
        members: dict[Hashable, list[_Measured]] = {}
        with self._core.tree:
            for worker in self._workers.values():
                members.setdefault(worker.key, []).append(worker)
            if self._groups.keys() != members.keys():
                self._groups = {key: self._groups.get(key, PRIOR) for key in members}
                self._unmeasured = {key: self._unmeasured.get(key, PRIOR) for key in members}
                self._pooled = {key: self._pooled.get(key, 0) for key in members}
            self._learned &= members.keys()
            pools = {key: self._pool(key, self._together(key, group)) for key, group in members.items()}
            if not self._changed and not any(pools.values()):
                return False
            self._changed = False
        for key, group in members.items():
            middle = _middle(group) if _is_measured(group) else None
            measured = _measured_of(group)
            pooled = _estimate_of_pool(group[0].prior, pools.get(key), now - self._window_seconds)
            known = [found for found in (middle, pooled) if found is not None]
            if known:
                self._learned.add(key)
                self._groups[key] = _of_group(self._groups[key], group[0].prior, known)
            elif key not in self._learned:
                self._groups[key] = _of_said(self._groups[key], group)
            for worker in group:
                worker.own = _is_other(worker, self._groups[key], middle, measured)
            self._unmeasured[key] = _of_unmeasured(self._groups[key], group)
        return True

    def _together(self, key: Hashable, group: list[_Measured]) -> list[_Measured]:
        """Whose samples are looked at together: everybody's until most workers are measured; then, where few are in a
        group and its prior is kept, for of two neither may be sure enough alone that it is wrong."""
        if not _is_measured(group):
            return group[-POOLED_WORKERS_MAX:]
        is_kept = self._changed and self._groups[key] == PRIOR
        return group if is_kept and 1 < len(group) <= TOGETHER_WORKERS_MAX else []

    def _pool(self, key: Hashable, group: list[_Measured]) -> list[tuple[bytes, bytes]]:
        """The samples of all of these, if there are new ones."""
        seen = sum(sum(self._core.timings.counts(worker.index)[:2]) for worker in group)
        if seen == self._pooled.get(key, 0):
            return []
        self._pooled[key] = seen
        return [self._core.timings.samples(worker.index) for worker in group]

    def _publish(self, name: str) -> None:
        with self._core.tree:
            worker = self._workers.get(name)
            if worker is None:
                return
            wanted = (self._unmeasured if worker.found is None else self._groups).get(worker.key, PRIOR)
            if worker.own and worker.found is not None:
                wanted = rounded(worker.found.logs)
                if not worker.found.differs(worker.published, WORTH_PUBLISHING):
                    return
            if wanted == worker.published:
                return
            model = scaled(worker.prior, wanted)
            self._core.reprice_credits(swap_cost(self._core.groups, worker.index, model))
            worker.published = wanted
            worker.changes += 1
            self._changed = True

    def stats(self, name: str) -> dict[str, Any]:
        """What is known of a worker's cost: the model that decisions reckon with, as coefficients; the factors on its
        prior for the usual prefill and decode, as they reckon and as measured; and how sure these are, from 0 to 1."""
        worker = self._workers[name]
        found = worker.found
        taken = (0.0, 0.0) if found is None else found.factors(worker.published)
        factors = (None, None) if found is None else tuple(math.exp(log) for log in found.factors(found.logs))
        return {
            **scaled(worker.prior, worker.published).coefficients(),
            "prefill_factor": math.exp(taken[0]),
            "decode_factor": math.exp(taken[1]),
            "measured_prefill_factor": factors[0],
            "measured_decode_factor": factors[1],
            "prefill_confidence": 0.0 if found is None else confidence(found.prefill_error),
            "decode_confidence": 0.0 if found is None else confidence(found.decode_error),
            "prefill_samples": worker.seen[0],
            "decode_samples": worker.seen[1],
            "ignored_samples": worker.seen[2],
            "cost_changes": worker.changes,
        }


def confidence(error: float) -> float:
    """How sure a factor is, from 0 to 1: one half where its standard error is 10 %."""
    return 1.0 / (1.0 + 10.0 * error)


def _is_measured(group: list[_Measured]) -> bool:
    """Whether most of a group's workers have estimates of their own."""
    return 2 * _measured_of(group) > len(group)


def _measured_of(group: list[_Measured]) -> int:
    """How many of a group's workers have estimates of their own."""
    return sum(worker.found is not None for worker in group)


def _estimate_of_pool(prior: CostModel, samples: list[tuple[bytes, bytes]] | None, since: float) -> Estimate | None:
    """What all samples of a group together say; None where there are too few, or none is new."""
    if not samples or not any(kind for each in samples for kind in each):
        return None
    from .calibration_fit import estimated, rows_of

    prefills, decodes = (rows_of(b"".join(kind)) for kind in zip(*samples, strict=True))
    return estimated(prior, prefills, decodes, since, POOLED_MIN)


def _middle(group: list[_Measured]) -> Estimate:
    """The estimate of a group's middle worker, of two in the middle the faster one's; some must be measured."""
    known = [worker.found for worker in group if worker.found is not None]
    known.sort(key=lambda found: sum(found.factors(found.logs)))
    return known[(len(known) - 1) // 2]


def _of_said(taken: Logs, group: list[_Measured]) -> Logs:
    """The factors of a group of which there are no samples: what the middle one said of those that said anything."""
    said = sorted((worker.said for worker in group if worker.said is not None), key=sum)
    return said[(len(said) - 1) // 2] if said else taken


def _of_group(taken: Logs, prior: CostModel, known: list[Estimate]) -> Logs:
    """The factors of a group after estimates of it, the first of them that is worth a change: of its middle worker, of
    all samples together."""
    kept = taken == PRIOR and prior.name != NEUTRAL.name
    by = PRIOR_WRONG if kept else WORTH_PUBLISHING
    return next((rounded(found.logs) for found in known if found.differs(taken, by)), taken)


def _is_other(worker: _Measured, taken: Logs, middle: Estimate | None, measured: int) -> bool:
    """Whether a worker's factors are not its group's: surely others than what is taken for the group and than what the
    middle one of those that are measured has, until they are near the former. What the middle one has counts too, for
    what is taken may be a prior that is as wrong for all of them, and of which one has been sure first."""
    found = worker.found
    if found is None:
        return False
    if worker.own:
        return found.is_apart(taken, 0.5 * OTHER_THAN_GROUP)
    if middle is None or not found.differs(taken, OTHER_THAN_GROUP):
        return False
    return found.is_other(middle, measured, OTHER_THAN_GROUP)


def _of_unmeasured(taken: Logs, group: list[_Measured]) -> Logs:
    """What decisions reckon with for the middle one of those that are measured, where that is faster than what is taken
    for the group: a worker that nobody has tried must not look slower than those that were."""
    known = [(sum(worker.found.factors(worker.published)), worker) for worker in group if worker.found is not None]
    if not known:
        return taken
    known.sort(key=lambda pair: pair[0])
    gain, worker = known[(len(known) - 1) // 2]
    found = worker.found
    assert found is not None
    return worker.published if gain < sum(found.factors(taken)) else taken
