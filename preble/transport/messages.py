"""Messages between routers and workers, and requests and output as engines know them. Owns what each field holds and
within what limits; the bytes are `wire`'s.

A field's annotation is all there is to say of it: `wire` reads and refuses by it. Nothing is checked when a message is
made here; what does not fit is refused when it is encoded.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct, field

from ..types import BOTH, DECODE, PREFILL, ROLES, CacheEvent, Claim, SamplingParams, TokenLogprob

PROMPT_TOKENS_MAX = 2 << 20  # 8 MiB of token ids
TEXT_BYTES_MAX = 4096  # names, reasons, endpoints; longer ones are cut when encoded, refused when decoded
ID_BYTES_MAX = 256  # request ids and names of workers and routers
STOP_TOKENS_MAX = 1024
EVENTS_MAX = 4096  # cache events in one frame
CHUNKS_MAX = 1024  # output chunks in one frame
FRAME_BYTES_MAX = 16 << 20  # a longer frame is refused unread

REFUSAL_CODES = ("queue_full", "invalid", "engine", "engine_failed", "draining", "duplicate")
PULL_ENDS = ("done", "partial", "late", "lost", "refused", "full", "cancelled", "joined")
KV_REFUSAL_CODES = ("epoch", "layout", "busy", "engine")
CLOSING_CODES = ("gap", "slow_reader", "expired", "no_session", "replaced", "shutdown", "engine_failed")
HALVES = (PREFILL, DECODE)
FINISH_REASONS = ("stop", "length", "abort", "error", "invalid")

INT31 = 2**31 - 1
INT63 = 2**63 - 1


def _within(low: int, high: int) -> Meta:
    return Meta(ge=low, le=high, description=f"an int in [{low}, {high}]")


def _text(low: int, high: int) -> Meta:
    # Four bytes a character at most: `wire` looks at the bytes of a text that is not plain ASCII.
    return Meta(min_length=low, max_length=high, description=f"a text of {low} to {high} bytes")


def _one_of(choices: tuple[str, ...]) -> Any:
    # msgspec knows literals by a table, patterns by a call into Python.
    return Annotated[Literal[choices], Meta(description=f"one of {', '.join(choices)}")]


Id = Annotated[str, _text(1, ID_BYTES_MAX)]
Text = Annotated[str, _text(0, TEXT_BYTES_MAX)]
Number = Annotated[int, _within(0, INT63)]
Count = Annotated[int, _within(0, INT31)]
Positive = Annotated[int, _within(1, INT31)]
BlockSize = Annotated[int, _within(1, 65_536)]
if TYPE_CHECKING:
    RefusalCode = str
    ClosingCode = str
    FinishReason = str
    PullEnd = str
    KvRefusalCode = str
    WorkerRole = Literal["both", "prefill", "decode"]
    PairHalf = WorkerRole
else:
    RefusalCode, ClosingCode, FinishReason = map(_one_of, (REFUSAL_CODES, CLOSING_CODES, FINISH_REASONS))
    PullEnd, KvRefusalCode, WorkerRole = map(_one_of, (PULL_ENDS, KV_REFUSAL_CODES, ROLES))
    PairHalf = _one_of(HALVES)
FieldName = Annotated[str, _text(1, 64)]
FieldNames = Annotated[tuple[FieldName, ...], Meta(max_length=64, description="at most 64 names of 1 to 64 bytes")]


# --- router to worker -------------------------------------------------------------------------------------------------


class Hello(Struct, frozen=True):
    """Opens a session. What the router expects of the worker is checked by the worker; "" and 0 mean no expectation.

    No two routers may have the same `router_id`: each passes by events about its own requests.
    """

    router_id: Id
    worker_id: Text = ""
    model: Text = ""
    tokenizer_fingerprint: Text = ""
    block_size: Annotated[int, _within(0, 65_536)] = 0


class PullFrom(Struct, frozen=True):
    """Where the KV of a prompt's first `tokens` tokens may be had: at a worker's `kv_endpoint`, in its `epoch`. It is
    worth waiting `wait_us` for: so long it would take to compute it."""

    endpoint: Text
    epoch: Number
    tokens: Positive
    wait_us: Number


class GenerationRequest(Struct, frozen=True):
    """A prompt to continue. `token_ids` is 1-D int32, `output_offset` the number of its last tokens that are output
    already.

    A request resumed after its worker died arrives with the emitted tokens appended to the prompt and `output_offset`
    set, so that chunk indices and random draws go on where they stopped; `sampling.max_new_tokens` still counts from
    the first output. `claim`: on whose account the worker serves it, and how soon. `pull`: what the worker should try
    to take over from another before it computes the rest. `half`: `RequestPlaced`'s, which the worker reports.
    """

    request_id: Id
    token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    namespace: Hashable = None
    output_offset: Count = 0
    claim: Claim | None = None
    pull: PullFrom | None = None
    half: PairHalf | None = None


class Abort(Struct, frozen=True):
    """The router no longer wants a request. Unknown ids are ignored: the request may just have ended."""

    request_id: Id


class Ping(Struct, frozen=True):
    """Heartbeat; answered by a `Pong` with the same `nonce`."""

    nonce: Number


class Replay(Struct, frozen=True):
    """Asks for the event batches from `from_seq` on; the worker answers with a page of them and a `ReplayEnd`."""

    from_seq: Number


class Bye(Struct, frozen=True):
    """The router leaves; its requests are aborted."""


# --- worker to router -------------------------------------------------------------------------------------------------


class Welcome(Struct, frozen=True):
    """Accepts a `Hello` and says what the worker is. The first event batch to expect is `next_event_seq`.

    `sampling_fields` and `resumable_fields` are `EngineInfo`'s: what a request may ask for here, and what of that also
    when it has begun elsewhere. `cached_first`: whether it takes requests with most of their prompt cached first. At
    `kv_endpoint` other workers of the same `kv_layout` may ask for KV of cached prefixes, `kv_token_bytes` a token; ""
    where they may not. `role`: `WorkerSpec`'s.
    """

    worker_id: Id
    engine: Text
    model: Text
    tokenizer_fingerprint: Text
    block_size: BlockSize
    kv_capacity_tokens: Positive
    max_running: Positive | None
    max_model_tokens: Positive
    eos_token_ids: tuple[int, ...]
    events_endpoint: Text
    next_event_seq: Number
    max_frame_bytes: Annotated[int, _within(1024, INT31)]
    draining: bool = False
    sampling_fields: FieldNames = ()
    resumable_fields: FieldNames = ()
    cached_first: bool = False
    kv_endpoint: Text = ""
    kv_layout: Text = ""
    kv_token_bytes: Number = 0
    role: WorkerRole = BOTH


class Refused(Struct, frozen=True):
    """Declines a `Hello`. The layout of this message never changes; `text` names both sides."""

    text: Text


class OutputChunk(Struct, frozen=True):
    """New tokens of one request. `index` is the output position of `token_ids[0]`, counted from the original prompt.

    `cached_tokens` (prompt tokens whose KV was reused, set on the first chunk) is what the engine says of the hit.
    `logprobs`, where they were asked for, has one for each of `token_ids`.
    `finish_reason` is None until the last chunk. `error` says what went wrong where the reason is "error" or "invalid"
    (the engine refuses what is asked). Event batches from `next_event_seq` on, which the worker fills in, are younger
    than these tokens, whichever comes first.
    """

    request_id: Id
    index: Count
    token_ids: Sequence[int]
    cached_tokens: Count | None = None
    finish_reason: FinishReason | None = None
    error: Text | None = None
    next_event_seq: Number = 0
    logprobs: tuple[TokenLogprob, ...] = ()


class OutputChunks(Struct, frozen=True):
    """What a step of the engine made for several requests of one router, at most `CHUNKS_MAX` chunks, oldest first.

    `next_event_seq` is that of all; the chunks' own does not travel.
    """

    chunks: tuple[OutputChunk, ...]
    next_event_seq: Number = 0


class Rejected(Struct, frozen=True):
    """A request was not taken, or given up without fault of its own (`engine_failed`)."""

    request_id: Id
    code: RefusalCode
    text: Text


class Pong(Struct, frozen=True):
    """Answers a `Ping`: load now, the next event batch's number, how long the engine has been in its current step."""

    nonce: Number
    next_event_seq: Number
    running: Number = 0
    waiting: Number = 0
    kv_used_tokens: Number = 0
    kv_cached_tokens: Number = 0
    waiting_uncached_tokens: Number = 0
    step_ms: Number = 0
    draining: bool = False


class Events(Struct, frozen=True):
    """One numbered batch of events, oldest first; `number` counts batches from 0 in every epoch.

    A router that is alone needs no report of its own requests: they are left out, and `complete_for` is its id. For
    any other router such a batch counts as lost. "" makes it complete for all.
    """

    number: Number
    events: tuple[CacheEvent, ...]
    complete_for: Text = ""


class ReplayEnd(Struct, frozen=True):
    """Ends one page of a replay: it held the batches [`from_seq`, `to_seq`) and the worker's next batch is
    `next_event_seq`.

    `first_kept_seq` > `from_seq` means that older batches are gone for good: the router must start afresh.
    """

    from_seq: Number
    to_seq: Number
    first_kept_seq: Number
    next_event_seq: Number


class PullEnded(Struct, frozen=True):
    """A request's pull is over, and its worker computes what it lacks: it caches the first `cached_tokens` of the
    prompt.

    `moved_tokens` of these came from the source, in `moved_bytes`. `took_us`: from the request's arrival to this, or
    from when its pull began that had waited for another; `source_us`, `target_us`: how long the engines of the two
    workers were held up by it. With `end` "joined" nothing was moved for it: it waited for the pull of another request,
    also where it names none itself. With "refused" and 0 for `took_us` its worker has begun none.
    """

    request_id: Id
    end: PullEnd
    cached_tokens: Count
    moved_tokens: Count
    moved_bytes: Number
    took_us: Number
    source_us: Number
    target_us: Number


class Draining(Struct, frozen=True):
    """The worker takes no new requests and will exit when the running ones end."""


class Closed(Struct, frozen=True):
    """The worker ended the session; its requests are aborted."""

    code: ClosingCode
    text: Text


class Fault(Struct, frozen=True):
    """Either side: a frame could not be decoded; it was counted and ignored. A worker's is outside the numbering."""

    text: Text


# --- worker to worker -------------------------------------------------------------------------------------------------


class KvAsk(Struct, frozen=True):
    """Asks for the KV of the tokens of a prefix from position `first_token` on. In the frame's header, `epoch` is that
    of the worker which is asked, `session` the number of the asking worker's transfer, `seq` counts its asks."""

    layout: Text
    token_ids: npt.NDArray[np.int32]
    first_token: Count
    namespace: Hashable = None


class KvPart(Struct, frozen=True):
    """Answers a `KvAsk` of the same header: the KV of the next `tokens` tokens, in a second frame; 0 where none is
    cached. `busy_us`: how long the engine was held up by it.
    """

    first_token: Count
    tokens: Count
    busy_us: Number


class KvRefused(Struct, frozen=True):
    """Declines a `KvAsk` of the same header."""

    code: KvRefusalCode
    text: Text


Message = (
    Hello
    | GenerationRequest
    | Abort
    | Ping
    | Replay
    | Bye
    | Welcome
    | Refused
    | OutputChunk
    | OutputChunks
    | Rejected
    | Pong
    | Events
    | ReplayEnd
    | PullEnded
    | Draining
    | Closed
    | Fault
    | KvAsk
    | KvPart
    | KvRefused
)
