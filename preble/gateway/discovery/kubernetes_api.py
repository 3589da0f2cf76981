"""The API server of Kubernetes as discovery asks it: lists, watches, one patch; bytes in and out. Owns its times and
how its refusals are named. Who we are, where it is and what it signs with is the official client's (`kubernetes.aio`),
which lives on our own loop: no thread waits for a watch.

A list or a patch may take ANSWER_SECONDS; a watch may stay open for as long as it asks for, and ANSWER_SECONDS more: of
an API server that hangs nothing else is to be seen.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ...errors import MissingExtra, TransportError

ANSWER_SECONDS = 10.0
LIST_BYTES_MAX = 256 << 20  # of one page
ERROR_BYTES_MAX = 4096
SHOWN_CHARS = 200
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
GONE = 410


class ResourceExpired(TransportError):
    """The API server no longer knows what has changed since then: all must be listed anew."""


class KubernetesApi:
    """One connection to the API server: that of the cluster we run in, else of the kubeconfig. Belongs to one asyncio
    loop. Raises `MissingExtra`."""

    def __init__(self) -> None:
        try:
            import kubernetes.aio.client
            import kubernetes.aio.config  # noqa: F401
        except ImportError as error:
            raise MissingExtra("discovery in Kubernetes needs its client: pip install 'preble[kubernetes]'") from error
        self._client: Any = None
        self.namespace = "default"  # ours

    async def connect(self) -> None:
        """Find out where the API server is and who we are. Idempotent. Raises `TransportError` with what is missing."""
        if self._client is not None:
            return
        from kubernetes.aio import client, config

        configuration = client.Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config(client_configuration=configuration)
                self.namespace = (SERVICE_ACCOUNT / "namespace").read_text().strip() or self.namespace
            else:
                file = os.environ.get("KUBECONFIG") or "~/.kube/config"
                await config.load_kube_config(config_file=file, client_configuration=configuration)
                _, context = config.list_kube_config_contexts(config_file=file)
                self.namespace = context["context"].get("namespace") or self.namespace
        except (config.ConfigException, OSError, KeyError, TypeError) as error:
            raise TransportError(f"no cluster is known here, and no kubeconfig: {error}") from error
        self._client = client.ApiClient(configuration)

    async def list(self, path: str, query: Mapping[str, str | int]) -> bytes:
        """A list, or a page of one. Raises `TransportError`, and `ResourceExpired` where its version is too old."""
        async with self._asked("GET", path, query, ANSWER_SECONDS) as response:
            return await _read(response, LIST_BYTES_MAX)

    async def watch(self, path: str, query: Mapping[str, str | int], seconds: float) -> AsyncIterator[bytes]:
        """Changes, one a line, for about so many seconds. Raises as `list` does."""
        asked = {**query, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": max(1, round(seconds))}
        async with self._asked("GET", path, asked, seconds + ANSWER_SECONDS) as response:
            while line := await response.content.readline():
                if line.strip():
                    yield line

    async def annotate(self, path: str, annotations: Mapping[str, str]) -> None:
        """Write annotations on an object. Raises `TransportError`."""
        body = {"metadata": {"annotations": dict(annotations)}}
        async with self._asked("PATCH", path, {}, ANSWER_SECONDS, body):
            pass

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, query: Mapping[str, str | int], seconds: float, body: Any = None
    ) -> AsyncIterator[Any]:
        """The answer to a question, as it comes; a silence of `seconds` is none."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_SECONDS, sock_read=seconds)
        try:
            asked = await self._client.param_serialize(
                method=method,
                resource_path=path,
                query_params=list(query.items()),
                header_params={"Accept": "application/json", "Content-Type": "application/merge-patch+json"},
                body=body,
                auth_settings=["BearerToken"],
            )
            answer = await self._client.call_api(*asked, _preload_content=False, _request_timeout=timeout)
            async with answer.response as response:
                if response.status >= 300:
                    raise _refusal(response.status, await _read(response, ERROR_BYTES_MAX, cut=True))
                yield response
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            what = str(error) or type(error).__name__
            raise TransportError(f"the API server does not answer: {what[:SHOWN_CHARS]}") from error

    async def close(self) -> None:
        """Hang up. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


async def _read(response: Any, bytes_max: int, *, cut: bool = False) -> bytes:
    """The whole answer; or with `cut` as much of it."""
    parts, total = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        total += len(part)
        if total > bytes_max:
            if cut:
                break
            raise TransportError(f"the API server's answer has more than {bytes_max} bytes")
    return b"".join(parts)


def _refusal(status: int, body: bytes) -> TransportError:
    """What it refuses with, in its own words where it has some."""
    try:
        text = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace")
    kind = ResourceExpired if status == GONE else TransportError
    return kind(f"the API server answers with {status}: {text[:SHOWN_CHARS]}")
