"""The exception tree. Owns every class Preble raises on purpose; contains no logic.

PrebleError
├── InvalidInput (ValueError)
│   ├── InvalidTokens, InvalidTime, InvalidConfig, SnapshotRefused
│   └── DuplicateWorker, DuplicateRequest
├── UnknownWorker (KeyError)
├── NoWorkers
├── CapacityExceeded: QueueFull, Overloaded, TreeFull
├── TransportError: ProtocolError, HandshakeRefused, WorkerLost, InsecureBind
├── EngineError
└── MissingExtra (ImportError)
CacheMismatchWarning (UserWarning)
"""

from __future__ import annotations


class PrebleError(Exception):
    """Base of every error Preble raises on purpose."""


class InvalidInput(PrebleError, ValueError):
    """An argument is wrong; the message names it and no state has changed."""


class InvalidTokens(InvalidInput):
    """`token_ids` is not a non-empty 1-D sequence of integers in [0, 2**31 - 1]."""


class InvalidTime(InvalidInput):
    """A clock or `now` is NaN or infinite."""


class InvalidConfig(InvalidInput):
    """A configuration field is out of its range."""


class SnapshotRefused(InvalidInput):
    """Bytes that are no snapshot of a scheduler, are damaged, or were written by another version."""


class DuplicateWorker(InvalidInput):
    """A worker of that id already exists."""


class DuplicateRequest(InvalidInput):
    """The request id is live: scheduled and neither finished nor cancelled."""


class UnknownWorker(PrebleError, KeyError):
    """No worker of that id. Its text is the message itself, not its repr as a KeyError's is."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NoWorkers(PrebleError):
    """No worker may take a request (none exists, or all are draining or excluded)."""


class CapacityExceeded(PrebleError):
    """A stated bound (of a queue, tree, frame) was reached; the message names the bound."""


class QueueFull(CapacityExceeded):
    """A bounded queue has no room for one more request."""


class Overloaded(CapacityExceeded):
    """A request would wait, or has waited, longer than it may; it makes sense to try again in `retry_after_seconds`."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class TreeFull(CapacityExceeded):
    """The prefix tree cannot hold more within its byte budget."""


class TransportError(PrebleError):
    """Something went wrong between router and worker."""


class ProtocolError(TransportError):
    """A frame does not decode or breaks the protocol."""


class HandshakeRefused(TransportError):
    """Router and worker do not fit; the message names both sides."""


class WorkerLost(TransportError):
    """The worker died and the request could not be resumed elsewhere."""


class InsecureBind(TransportError):
    """Binding a non-loopback address without keys was refused."""


class EngineError(PrebleError):
    """The engine refused or failed a request."""


class MissingExtra(PrebleError, ImportError):
    """An optional dependency is missing; the message gives the command that installs it."""


class CacheMismatchWarning(UserWarning):
    """What an engine says of its cache is never like what was sent there; the message says what differs."""
