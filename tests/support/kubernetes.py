"""An API server of Kubernetes as far as discovery asks it: lists by page, watches from a version, patches of
annotations; and its bad days: it hangs, answers 500, drops connections, forgets what has changed.

It lives on the test's own loop. What it answers has the shape of a real one's; it knows equality selectors only.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

RESOURCES = {"pods": "/api/v1", "endpointslices": "/apis/discovery.k8s.io/v1"}


def pod(
    name: str,
    ip: str = "127.0.0.1",
    port: int = 8000,
    *,
    ready: bool = True,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    terminating: bool = False,
    phase: str = "Running",
) -> dict[str, Any]:
    """A pod with one container and, beside what is read of it, some of what is not."""
    metadata: dict[str, Any] = {"name": name, "namespace": "llm", "uid": f"uid-{name}", "labels": {"app": "vllm"}}
    metadata["labels"] |= labels or {}
    metadata["annotations"] = dict(annotations or {})
    if terminating:
        metadata["deletionTimestamp"] = "2026-11-01T00:00:00Z"
    container = {"name": "engine", "image": "vllm", "ports": [{"containerPort": port, "protocol": "TCP"}]}
    conditions = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": str(ready)}]
    status = {"phase": phase, "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions}
    return {"metadata": metadata, "spec": {"containers": [container], "nodeName": "n1"}, "status": status}


def endpoint(
    ip: str, pod_name: str = "", *, ready: bool | None = True, terminating: bool | None = False
) -> dict[str, Any]:
    """One endpoint of a slice."""
    found: dict[str, Any] = {
        "addresses": [ip],
        "conditions": {"ready": ready, "serving": ready, "terminating": terminating},
    }
    if pod_name:
        found["targetRef"] = {"kind": "Pod", "name": pod_name, "namespace": "llm", "uid": f"uid-{pod_name}"}
    return found


def endpoint_slice(
    name: str, endpoints: list[dict[str, Any]] | None, port: int = 8000, *, family: str = "IPv4", service: str = "vllm"
) -> dict[str, Any]:
    """A slice of a Service with one port without a name, as kubectl makes them."""
    metadata = {"name": name, "namespace": "llm", "labels": {"kubernetes.io/service-name": service}}
    ports = [{"name": "", "port": port, "protocol": "TCP"}]
    return {"metadata": metadata, "addressType": family, "endpoints": endpoints, "ports": ports}


class FakeApiServer:
    """`mode`: "well", "failing" (500), "silent" (takes a question, and says nothing), "cutting" (hangs up)."""

    def __init__(self) -> None:
        self.mode = "well"
        self.page_max = 500
        self.asked: Counter[str] = Counter()  # "list pods", "watch pods", "patch pods"
        self.patches: list[tuple[str, dict[str, str]]] = []
        self.port = 0
        self.tokens: set[str] = set()
        self._version = 100
        self._oldest = 0  # before it nothing is known
        self._objects: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in RESOURCES}
        self._log: list[tuple[int, str, str, dict[str, Any]]] = []
        self._news = asyncio.Condition()
        self._cuts = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> FakeApiServer:
        """Listen on a free port."""
        app = web.Application()
        for resource, prefix in RESOURCES.items():
            path = f"{prefix}/namespaces/llm/{resource}"
            app.router.add_get(path, self._getter(resource))
            app.router.add_patch(path + "/{name}", self._patch)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """Be gone; `start` comes back at the same port, with the same objects."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await self.cut()
            await runner.cleanup()

    def kubeconfig(self, path: Path) -> Path:
        """A file with which clients find it."""
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        user = {"name": "u", "user": {"token": "the-token"}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "llm"}}
        content = {"apiVersion": "v1", "kind": "Config", "current-context": "x"}
        content |= {"clusters": [cluster], "users": [user], "contexts": [context]}
        path.write_text(json.dumps(content))
        return path

    # --- what happens in the cluster ----------------------------------------------------------------------------------

    async def put(self, resource: str, thing: dict[str, Any]) -> None:
        """An object comes, or is another one."""
        name = thing["metadata"]["name"]
        await self._change(resource, "MODIFIED" if name in self._objects[resource] else "ADDED", thing)

    async def delete(self, resource: str, name: str) -> None:
        """An object goes."""
        await self._change(resource, "DELETED", self._objects[resource][name])

    async def _change(self, resource: str, kind: str, thing: dict[str, Any]) -> None:
        async with self._news:
            self._version += 1
            thing = json.loads(json.dumps(thing))
            thing["metadata"]["resourceVersion"] = str(self._version)
            if kind == "DELETED":
                del self._objects[resource][thing["metadata"]["name"]]
            else:
                self._objects[resource][thing["metadata"]["name"]] = thing
            self._log.append((self._version, resource, kind, thing))
            self._news.notify_all()

    async def forget(self) -> None:
        """Compact: what has changed before is not known any more. Watches from then end with 410."""
        async with self._news:
            self._version += 1
            self._oldest = self._version
            self._log.clear()
            self._news.notify_all()

    async def cut(self) -> None:
        """Hang up on every watch."""
        async with self._news:
            self._cuts += 1
            self._news.notify_all()

    # --- answers ------------------------------------------------------------------------------------------------------

    def _getter(self, resource: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def get(request: web.Request) -> web.StreamResponse:
            return await self._get(request, resource)

        return get

    async def _get(self, request: web.Request, resource: str) -> web.StreamResponse:
        is_watch = request.query.get("watch") == "true"
        self.asked[f"{'watch' if is_watch else 'list'} {resource}"] += 1
        self.tokens.add(request.headers.get("authorization", ""))
        if self.mode == "failing":
            return web.json_response({"kind": "Status", "code": 500, "message": "etcd is away"}, status=500)
        if self.mode == "silent":
            await asyncio.sleep(3600)
        if self.mode == "cutting":
            assert request.transport is not None
            request.transport.close()
            await asyncio.sleep(3600)
        return await (self._watch if is_watch else self._list)(request, resource)

    def _selected(self, request: web.Request, thing: dict[str, Any]) -> bool:
        wanted = dict(part.split("=") for part in request.query.get("labelSelector", "").split(",") if part)
        return wanted.items() <= thing["metadata"].get("labels", {}).items()

    async def _list(self, request: web.Request, resource: str) -> web.Response:
        items = [one for _, one in sorted(self._objects[resource].items()) if self._selected(request, one)]
        begin = int(request.query.get("continue") or 0)
        end = begin + min(int(request.query.get("limit", 500)), self.page_max)
        metadata = {"resourceVersion": str(self._version)} | ({"continue": str(end)} if end < len(items) else {})
        return web.json_response({"kind": "List", "metadata": metadata, "items": items[begin:end] or None})

    async def _watch(self, request: web.Request, resource: str) -> web.StreamResponse:
        version, cuts = int(request.query["resourceVersion"]), self._cuts
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        ends = asyncio.get_running_loop().time() + int(request.query["timeoutSeconds"])
        while True:
            if version < self._oldest:
                status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                await self._say(response, "ERROR", status)
                return response
            for at, name, kind, thing in [one for one in self._log if one[0] > version]:
                version = at
                if name == resource and self._selected(request, thing):
                    await self._say(response, kind, thing)
            if self._cuts != cuts:
                assert request.transport is not None
                request.transport.close()
                return response
            async with self._news:
                if version >= self._version and self._cuts == cuts and version >= self._oldest:
                    left = ends - asyncio.get_running_loop().time()
                    try:
                        await asyncio.wait_for(self._news.wait(), max(left, 0.0))
                    except asyncio.TimeoutError:
                        bookmark = {"kind": "Pod", "metadata": {"resourceVersion": str(self._version)}}
                        await self._say(response, "BOOKMARK", bookmark)
                        return response

    async def _say(self, response: web.StreamResponse, kind: str, thing: dict[str, Any]) -> None:
        await response.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")

    async def _patch(self, request: web.Request) -> web.Response:
        self.asked["patch pods"] += 1
        if self.mode == "failing":
            return web.json_response({"message": "etcd is away"}, status=500)
        assert request.content_type == "application/merge-patch+json"
        name, annotations = request.match_info["name"], (await request.json())["metadata"]["annotations"]
        if name not in self._objects["pods"]:
            return web.json_response({"message": f'pods "{name}" not found'}, status=404)
        self.patches.append((name, annotations))
        thing = json.loads(json.dumps(self._objects["pods"][name]))
        thing["metadata"]["annotations"] |= annotations
        await self.put("pods", thing)
        return web.json_response(thing)
