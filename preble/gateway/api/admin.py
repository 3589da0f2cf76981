"""Endpoints for operators: health, readiness, workers, explanations. Owns their shapes.

    GET /health                 200 while the process answers
    GET /ready                  200 while a request would find a worker, else 503
    GET /workers                every worker: where it is, how it is, what it has
    POST /workers               {"address": "tcp://..."}: connect one more; answers when the handshake has been tried
    POST /workers/{id}/drain    no new requests for it; what runs there ends there
    DELETE /workers/{id}        leave it now; its requests go elsewhere
    POST /v1/preble/explain     where a prompt would go now, and what every worker would cost

A worker's id may hold slashes and colons; its address does as well as its id.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...errors import InvalidInput, UnknownWorker
from ...router.fleet import FleetWorker
from ...transport.worker_address import check_worker_address
from ...types import Explanation
from ..core.gateway import Gateway, TokenIds
from ..core.http_errors import ApiError, unavailable, wrong
from ..core.sibling_processes import from_other_process, statuses
from .fields import is_given
from .http import attended, body_of, json_response, off_loop
from .schemas import ExplainRequest, WorkerRequest, decode, ids_of, plain_messages

logger = logging.getLogger("preble.gateway")


class Admin:
    """The handlers, for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def health(self, request: Request) -> Response:
        """GET /health."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready."""
        gateway = self._gateway
        states = [worker.state for worker in gateway.router.fleet.workers.values()]
        body: dict[str, Any] = {
            "ready": gateway.ready,
            "draining": gateway.leaving or gateway.draining,
            "workers": states.count("ready"),
        }
        sources = [] if gateway.discovery is None else gateway.discovery.stats()
        if sources:  # no names: whoever asks may be anybody
            shown = ("age_seconds", "servers", "is_doubted")
            body["discovery"] = [{name: one[name] for name in shown} for one in sources]
        return json_response(body, 200 if gateway.ready else 503)

    async def workers(self, request: Request) -> Response:
        """GET /workers."""
        known = self._gateway.router.scheduler.stats()["workers"]
        return json_response({"workers": [self._card(worker, known) for worker in self._fleet.values()]})

    async def add_worker(self, request: Request) -> Response:
        """POST /workers."""
        async with body_of(request, self._gateway) as data:
            body = await off_loop(len(data), decode, data, WorkerRequest)
        try:
            check_worker_address(body.address)
        except InvalidInput as error:
            raise wrong(str(error), "address") from error
        if body.address in self._fleet:
            raise ApiError(409, f"the worker at {body.address} is there already", param="address", code="duplicate")
        await self._gateway.router.add_worker(body.address)
        worker = self._fleet[body.address]
        known = self._gateway.router.scheduler.stats()["workers"]
        payload = msgspec.json.encode({"address": body.address})
        return await self._in_all(request, self._card(worker, known), 201 if worker.state == "ready" else 202, payload)

    async def drain_worker(self, request: Request) -> Response:
        """POST /workers/{id}/drain."""
        worker = self._find(request.path_params["worker_id"])
        if worker.state not in ("ready", "draining"):
            raise ApiError(409, f"the worker is {worker.state}, it cannot drain", code="not_ready")
        self._gateway.router.scheduler.drain_worker(worker.worker_id)
        known = self._gateway.router.scheduler.stats()["workers"]
        return await self._in_all(request, self._card(worker, known), 202)

    async def remove_worker(self, request: Request) -> Response:
        """DELETE /workers/{id}."""
        worker = self._find(request.path_params["worker_id"])
        await self._gateway.router.remove_worker(worker.address)
        return await self._in_all(request, {"removed": worker.worker_id or worker.address}, 200)

    async def _in_all(self, request: Request, content: dict[str, Any], status: int, body: bytes = b"") -> Response:
        """The answer to a change that was made here, when it was asked of the other processes too.

        What one of them refuses is in the answer and in the log: it may have known already, or have just been started.
        """
        processes = self._gateway.processes
        if processes is None or from_other_process(processes, request.scope):
            return json_response(content, status)
        answers = await processes.ask(request.method, request.scope["raw_path"].decode("ascii"), body)
        for answer in answers:
            if answer.status is None or answer.status >= 400:
                logger.warning("process %d did not follow a change of workers: %s", answer.index, answer.status)
        return json_response(content | {"processes": statuses(status, processes.slot.index, answers)}, status)

    async def explain(self, request: Request) -> Response:
        """POST /v1/preble/explain."""
        async with body_of(request, self._gateway) as data:
            body = await off_loop(len(data), decode, data, ExplainRequest)
            token_ids = await attended(request.receive, self._tokens(body, len(data)))
        if not self._gateway.router.scheduler.workers:
            raise unavailable("no worker is connected", "no_workers")
        namespace = None if body.cache_salt is None else ("salt", body.cache_salt)
        scheduler, fleet = self._gateway.router.scheduler, self._gateway.router.fleet
        explain: Callable[..., Explanation] = scheduler.explain
        if fleet.roles or fleet.server_roles:
            explain = scheduler.explain_pair
        explanation = explain(token_ids, namespace=namespace, max_new_tokens=body.max_tokens)
        return json_response(asdict(explanation))

    async def _tokens(self, body: ExplainRequest, size: int) -> TokenIds:
        given = [body.messages is not None, body.prompt is not None, is_given(body.token_ids)]
        if sum(given) != 1:
            raise wrong("exactly one of messages, prompt and token_ids must be given")
        if body.messages is not None:
            messages = await off_loop(size, plain_messages, body.messages)
            return await self._gateway.tokens_of_chat(messages)
        if body.prompt is not None:
            return await self._gateway.tokens_of(body.prompt, "prompt")
        return await off_loop(size, ids_of, bytes(body.token_ids), "token_ids", self._gateway.max_model_tokens)

    @property
    def _fleet(self) -> dict[str, FleetWorker]:
        return self._gateway.router.fleet.workers

    def _find(self, name: str) -> FleetWorker:
        for worker in self._fleet.values():
            if name in (worker.worker_id, worker.address):
                return worker
        raise UnknownWorker("no worker of that id or address")

    def _card(self, worker: FleetWorker, known: dict[str, Any]) -> dict[str, Any]:
        """One worker, for an operator."""
        welcome, load = worker.welcome, known.get(worker.worker_id)
        card: dict[str, Any] = {
            "id": worker.worker_id,
            "address": worker.address,
            "state": "draining" if load is not None and load["draining"] else worker.state,
            "why": worker.why,
        }
        if welcome is not None:
            card |= {"engine": welcome.engine, "model": welcome.model, "epoch": str(worker.epoch)}
            card |= {"kv_capacity_tokens": welcome.kv_capacity_tokens, "block_size": welcome.block_size}
        if load is not None:
            names = ("live_requests", "waiting_requests", "load_seconds", "cached_tokens", "cache_accuracy")
            card |= {name: load[name] for name in names}
        return card | {"load": None if worker.pong is None else msgspec.structs.asdict(worker.pong)}
