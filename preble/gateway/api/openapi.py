"""GET /openapi.json: what can be asked of this gateway, for generators of clients and of tests. Owns the document; the
bodies' fields are `schemas`'.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ... import __version__
from ..relay.endpoints import ENDPOINTS
from .schemas import BODIES, ChatRequest, CompletionRequest, ExplainRequest, GenerateRequest, WorkerRequest

# (method, path, what it does, body)
_OPERATIONS: tuple[tuple[str, str, str, type | None], ...] = (
    ("post", "/v1/chat/completions", "Answer a chat", ChatRequest),
    ("post", "/v1/completions", "Continue one or more prompts", CompletionRequest),
    ("post", "/generate", "Continue a prompt, as SGLang does", GenerateRequest),
    ("get", "/v1/models", "The models that are served", None),
    ("get", "/v1/models/{name}", "One of them", None),
    ("get", "/health", "Whether the process answers", None),
    ("get", "/ready", "Whether a request would find a worker", None),
    ("get", "/metrics", "Metrics for Prometheus", None),
    ("get", "/workers", "The workers", None),
    ("post", "/workers", "Connect one more worker", WorkerRequest),
    ("post", "/workers/{worker_id}/drain", "Send a worker no new requests", None),
    ("delete", "/workers/{worker_id}", "Leave a worker", None),
    ("post", "/v1/preble/explain", "Where a prompt would go, and why", ExplainRequest),
)


_ANY_OBJECT = {"type": "object", "additionalProperties": True}


def document(*, relayed: bool = False) -> dict[str, Any]:
    """The document, OpenAPI 3.1. `relayed`: before servers that run already, whose endpoints take what they take."""
    kinds = [BODIES[body] for _, _, _, body in _OPERATIONS if body is not None]
    references, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(kinds, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, body in _OPERATIONS:
        operation: dict[str, Any] = {"summary": summary, "responses": {"default": {"description": summary}}}
        if body is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema_of[BODIES[body]]}},
            }
        paths.setdefault(path, {})[method] = {**operation, **_parameters(path)}
    for endpoint in ENDPOINTS if relayed else ():
        summary = f"Relayed: {endpoint.kind}"
        operation = {"summary": summary, "responses": {"default": {"description": summary}}}
        if endpoint.method == "POST" and not endpoint.by_id:
            media_type = "multipart/form-data" if endpoint.takes_form else "application/json"
            operation["requestBody"] = {"required": True, "content": {media_type: {"schema": _ANY_OBJECT}}}
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = {**operation, **_parameters(endpoint.path)}
    info = {"title": "Preble gateway", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _parameters(path: str) -> dict[str, Any]:
    """What stands in braces in a path."""
    names = re.findall(r"\{(\w+)\}", path)
    schema = {"type": "string", "minLength": 1}
    given = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    return {"parameters": given} if given else {}
