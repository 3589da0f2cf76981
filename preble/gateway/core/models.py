"""Which models the gateway serves, and where each may go. Owns the names that requests use, adapters (LoRA) and aliases
included, and the set of workers that a model's requests must not go to.

Each model has a fleet of its own: the workers whose server reports it. Names are looked up in a table that is made anew
when workers come, go, or serve other names. A name that is not there is asked for once more at the servers, since
adapters are loaded while they run; at most every `ASK_SECONDS`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from ...clock import Clock
from ...router.fleet import Fleet, FleetWorker
from ...router.router import Router
from ...transport.namespaces import joined
from .config import GatewayConfig
from .http_errors import ApiError, wrong

ASK_SECONDS = 5.0
NAMES_SHOWN_MAX = 20  # in an error
_INT31 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name that requests may use. `base`: the model itself, another one where `name` is an adapter or an alias.

    `namespace`: what its prompts and caches are kept apart by, None for nothing. `exclude`: workers that do not serve
    it. `engine`: "sglang", "vllm", ...; "" where workers differ. `sent_name`: what its servers call it, where that is
    another name. `max_model_tokens`: the longest prompt and output together. `events`: one of its servers publishes
    what it caches.
    """

    name: str
    base: str = ""
    namespace: Hashable = None
    exclude: frozenset[str] = frozenset()
    engine: str = ""
    sent_name: str | None = None
    max_model_tokens: int = _INT31
    events: bool = False


class Models:
    """The models of one gateway. Belongs to its loop."""

    def __init__(self, router: Router, config: GatewayConfig, clock: Clock) -> None:
        self._router = router
        self.configure(config)
        self._clock = clock
        self._membership = -1
        self._table: dict[str, ServedModel] = {}
        self._asked_at = -ASK_SECONDS

    def configure(self, config: GatewayConfig) -> None:
        """Take over the names that requests may use."""
        self._aliases = tuple(config.model_names)

    @property
    def names(self) -> list[str]:
        """The names that requests may use: those of the configuration, else what servers list."""
        return list(self._aliases) or sorted(self._known())

    def get(self, name: str | None) -> ServedModel:
        """What a request's `model` means. Without one it is the only model there is.

        Raises `ApiError` 404 for a name that is not served, 400 where one must be given.
        """
        found = self.find(name)
        if found is not None:
            return found
        served = self.names
        shown = ", ".join(served[:NAMES_SHOWN_MAX]) + (", ..." if len(served) > NAMES_SHOWN_MAX else "")
        if name is None:
            raise wrong(f"model: this gateway serves several, name one of {shown}", "model", "model_missing")
        message = f"the model does not exist; this gateway serves {shown}"
        raise ApiError(404, message, param="model", code="model_not_found")

    async def get_now(self, name: str | None) -> ServedModel:
        """The same, but servers are asked once more before a name counts as unknown."""
        found = self.find(name)
        if found is not None:
            return found
        now = self._clock()
        if name is not None and now - self._asked_at >= ASK_SECONDS:
            self._asked_at = now
            await self._router.fleet.look_for_names()
        return self.get(name)

    def find(self, name: str | None) -> ServedModel | None:
        """The same as `get`; None where it raises."""
        known = self._known()
        if not known:  # no worker has answered yet: placing says so
            return ServedModel(name or "")
        if name is not None:
            if self._aliases and name not in self._aliases:
                return None
            found = known.get(name)
            if found is not None:
                return found
        models = [one for one in known.values() if one.name == one.base]
        if name is None:
            only = models[0] if len({one.exclude for one in models}) == 1 else None
            name = self._aliases[0] if self._aliases else None
            return only if only is None or name is None else self.find(name)
        if name in self._aliases and len({one.exclude for one in models}) == 1:
            return replace(models[0], name=name, sent_name=models[0].base)
        return _with_adapter(known, name)

    def cards(self, created: int) -> list[dict[str, Any]]:
        """What GET /v1/models lists."""
        return [self.card(name, created) for name in self.names]

    def card(self, name: str, created: int) -> dict[str, Any]:
        """What GET /v1/models/{name} answers. Raises `ApiError` 404."""
        model = self.get(name)
        card = {"id": name, "object": "model", "created": created, "owned_by": "preble"}
        if model.base not in ("", name):
            card["parent"] = model.base
        return {**card, "max_model_len": model.max_model_tokens}

    # --- the table ----------------------------------------------------------------------------------------------------

    def _known(self) -> dict[str, ServedModel]:
        fleet = self._router.fleet
        if fleet.membership != self._membership:
            self._table = _table(fleet)
            self._membership = fleet.membership
        return self._table


def _table(fleet: Fleet) -> dict[str, ServedModel]:
    """Every name that a worker serves."""
    serving: dict[str, list[FleetWorker]] = {}
    bases: dict[str, str] = {}
    for worker in fleet.workers.values():
        for served in worker.served:
            serving.setdefault(served.name, []).append(worker)
            bases.setdefault(served.name, served.base)
    return {name: _served(fleet, name, bases[name], workers) for name, workers in serving.items() if name}


def _served(fleet: Fleet, name: str, base: str, workers: list[FleetWorker]) -> ServedModel:
    first = workers[0].welcome
    ids = {worker.worker_id for worker in workers}
    engines = {worker.welcome.engine for worker in workers if worker.welcome is not None}
    limits = [worker.welcome.max_model_tokens for worker in workers if worker.welcome is not None]
    engine = engines.pop() if len(engines) == 1 else ""
    namespace = fleet.namespace_of_model("" if first is None else first.model)
    return ServedModel(
        name,
        base or name,
        joined(namespace, ("lora", name)) if base else namespace,
        frozenset(one for one in fleet.worker_ids if one not in ids),
        engine,
        f"{base}:{name}" if base and engine == "sglang" else None,
        min(limits, default=_INT31),
        any(worker.welcome is not None and bool(worker.welcome.events_endpoint) for worker in workers),
    )


def _with_adapter(known: dict[str, ServedModel], name: str) -> ServedModel | None:
    """SGLang's way to name an adapter: "model:adapter"."""
    base, colon, adapter = name.partition(":")
    model = known.get(base)
    if not (colon and adapter) or model is None or model.engine != "sglang" or model.name != model.base:
        return None
    return replace(model, name=name, namespace=joined(model.namespace, ("lora", adapter)))
