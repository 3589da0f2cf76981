"""The partition by an oracle that knows every request's prefix group. Owns the assignment of groups to workers; for
simulations, since only they know the groups."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from ..errors import InvalidConfig, InvalidInput
from .base import Policy, RequestView, WorkersView


class OraclePartition(Policy):
    """Every prefix group has one home worker.

    `groups`: the group of each request id, in the order of arrival. `homes`: the worker id of each group; without it,
    groups are dealt to the workers in turn, in the order in which `groups` shows them first. A group whose home may not
    take requests is dealt like one without a home, over the workers that may. Raises InvalidInput for a request whose
    id is not in `groups`.
    """

    name = reason = "oracle_partition"

    def __init__(self, groups: Mapping[Hashable, Hashable], homes: Mapping[Hashable, str] | None = None) -> None:
        if not isinstance(groups, Mapping) or not groups:
            raise InvalidConfig(f"OraclePartition.groups must be a mapping of request ids, got {groups!r}")
        self._groups = dict(groups)
        self._turns = {group: turn for turn, group in enumerate(dict.fromkeys(groups.values()))}
        self._homes = dict(homes or {})
        strange = [group for group in self._homes if group not in self._turns]
        if strange:
            raise InvalidConfig(f"OraclePartition.homes names groups that no request has: {strange[:4]!r}")

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        if request.request_id not in self._groups:
            raise InvalidInput(f"policy 'oracle_partition' knows no group of request_id {request.request_id!r}")
        group = self._groups[request.request_id]
        home = self._homes.get(group)
        if home not in workers.ids:
            home = workers.ids[self._turns[group] % len(workers)]
        return [0.0 if name == home else 1.0 for name in workers.ids]
