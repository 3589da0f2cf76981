"""Live requests of one worker and the batches made of them: what happens once for every token. Owns `LiveRequest`,
`Batch` and `StepOutput`; decides nothing (that is `local.py`), and knows neither queue nor cache.

It is compiled because it is the inner loop of every engine and of the simulator: a decode costs some tens of
nanoseconds here, in Python it cost thirty microseconds. A batch lists its requests, decodes first, and makes the items
that an engine computes only when it is asked for them; the simulated engine needs no more than their sizes.
"""

import operator

from libc.stdint cimport int32_t, int64_t

import numpy as np

from ..errors import InvalidInput
from ..types import check_int

TOKEN_ID_MAX = 2**31 - 1
NO_TOKENS = np.empty(0, np.int32)

cdef int64_t TOKEN_MAX = TOKEN_ID_MAX


cdef class LiveRequest:
    """The scheduler's record of one request. Positions count from the start of the prompt.

        tokens   [ prompt ............................. | output ...... ]          known_tokens of them
        slots    [ owned by the tree (hold) | owned by the request | in flight ]   the KV of tokens[:computed] is valid
                   0        hold.matched_tokens       computed    computed + scheduled

    A request is prefilling until `computed` reaches `prefill_end`, the number of tokens known when it was admitted, and
    decoding from then on. While it waits it holds nothing.
    """

    cdef readonly object request
    cdef readonly object tokens           # int32; replaced by a buffer with room for the output at the first admission
    cdef public object hold               # Hold | None
    cdef public object cached_tokens      # prompt tokens reused at the first admission; None before it
    cdef public object place              # the queue's: (group, rank in it), as of place_version
    cdef public double arrival_seconds
    cdef public int64_t number            # order of arrival, the tie-breaker everywhere
    cdef public int64_t known_tokens, computed, scheduled, prefill_end
    cdef public int64_t cached_now        # the queue's: cached tokens of the known ones, as of cached_version
    cdef public int64_t cached_version, place_version
    cdef public int64_t follows           # number of the prefix end that it goes on from; -1: none is known
    cdef readonly int64_t max_tokens      # of the prompt and the longest output
    cdef int64_t prompt_tokens
    cdef bint planned
    cdef object slots_array
    cdef object stops
    cdef int32_t[::1] token_view, slot_view

    def __init__(self, request, number, arrival_seconds):
        self.request = request
        self.number = number
        self.arrival_seconds = arrival_seconds
        self.tokens = request.token_ids
        self.prompt_tokens = self.known_tokens = len(request.token_ids)
        self.max_tokens = self.prompt_tokens + <int64_t> request.max_new_tokens
        self.planned = request.planned_ids is not None
        self.stops = request.stop_token_ids or None
        self.slots_array = NO_TOKENS
        self.place = (0, 0)
        self.cached_version = self.place_version = self.follows = -1

    @property
    def slots(self):
        """The KV slots, shape [max_tokens]; of the first computed + scheduled ones the values count."""
        return self.slots_array

    @property
    def output_count(self) -> int:
        """Output tokens produced so far."""
        return self.known_tokens - self.prompt_tokens

    @property
    def resumes(self) -> bool:
        """True of a waiting request that ran before and was preempted."""
        return self.prefill_end > 0

    @property
    def decoding(self) -> bool:
        """True once the tokens known at admission are computed."""
        return self.computed >= self.prefill_end

    @property
    def uncached_now(self) -> int:
        """Tokens that would have to be computed if the request were admitted now, as far as the queue knows."""
        return self.known_tokens - min(self.cached_now, self.known_tokens - 1)

    @property
    def known(self):
        """The known tokens: prompt and output so far. A view."""
        return self.tokens[: self.known_tokens]

    def make_buffers(self) -> None:
        """Allocate room for the longest output and its slots, so that decode steps write single numbers."""
        if len(self.tokens) < self.max_tokens:
            tokens = np.empty(self.max_tokens, np.int32)
            tokens[: self.known_tokens] = self.tokens
            if self.planned:
                tokens[self.prompt_tokens :] = self.request.planned_ids
            self.token_view = tokens
            self.tokens = tokens
        self.slots_array = np.empty(self.max_tokens, np.int32)
        self.slot_view = self.slots_array

    def drop_slots(self) -> None:
        """Own no slots any more, and count as not computed."""
        self.slots_array = NO_TOKENS
        self.computed = 0

    def append(self, int64_t token) -> object:
        """Add one output token; returns why it is the last ("stop", "length") or None."""
        if not self.planned:
            self.token_view[self.known_tokens] = <int32_t> token
        self.known_tokens += 1
        if self.stops is not None and token in self.stops:
            return "stop"
        return "length" if self.known_tokens == self.max_tokens else None

    cdef StepOutput output(self, int64_t token):
        """Append the token and say so."""
        cdef StepOutput out = StepOutput.__new__(StepOutput)
        out.index = self.known_tokens - self.prompt_tokens
        out.request_id = self.request.request_id
        out.token = token
        out.cached_tokens = self.cached_tokens
        out.finish_reason = self.append(token)
        return out


cdef class BatchItem:
    """One request's part of an iteration: compute `token_ids` at positions `start`, `start` + 1, ...

    `token_ids` and `write_slots` have shape [n] (n = 1 for a decode), `context_slots` [start + n] in order of position,
    ending in `write_slots`; all int32. They are views that hold until the batch is completed: read them, do not keep
    them. `samples` is True where the last token's logits yield an output token.
    """

    cdef readonly object request_id, token_ids, write_slots, context_slots
    cdef readonly int64_t start
    cdef readonly bint samples, is_decode

    def __init__(self, request_id, start, token_ids, write_slots, context_slots, samples, is_decode):
        self.request_id, self.start, self.token_ids = request_id, start, token_ids
        self.write_slots, self.context_slots = write_slots, context_slots
        self.samples, self.is_decode = samples, is_decode

    def __repr__(self) -> str:
        end = self.start + len(self.token_ids)
        return f"BatchItem({self.request_id!r}, {self.start}..{end}, samples={self.samples})"


cdef class StepOutput:
    """One output token. `index` is 0 for the request's first.

    `cached_tokens` is the number of prompt tokens reused at its first admission. `finish_reason` is None, or on the
    last token "stop" (a stop token) or "length".
    """

    cdef readonly object request_id, cached_tokens, finish_reason
    cdef readonly int64_t token, index

    def __init__(self, request_id, token, index, cached_tokens, finish_reason):
        self.request_id, self.token, self.index = request_id, token, index
        self.cached_tokens, self.finish_reason = cached_tokens, finish_reason

    def fields(self) -> tuple:
        """All fields in order."""
        return self.request_id, self.token, self.index, self.cached_tokens, self.finish_reason

    def __eq__(self, other) -> bool:
        return isinstance(other, StepOutput) and self.fields() == (<StepOutput> other).fields()

    def __hash__(self) -> int:
        return hash(self.fields())

    def __repr__(self) -> str:
        return f"StepOutput{self.fields()}"


cdef class Batch:
    """What the engine computes in iteration `step`: decodes first, then prefill chunks. False when nothing can run.

    `items` are made when first asked for; ask before the next call on the scheduler that made the batch.
    """

    cdef readonly int64_t step, decode_count, prefill_tokens
    cdef readonly list lives
    cdef list made

    def __init__(self, int64_t step=0):
        self.step = step
        self.lives = []

    def __len__(self) -> int:
        return len(self.lives)

    @property
    def items(self) -> list[BatchItem]:
        """One for each request, in order."""
        if self.made is None:
            self.made = [make_item(live, i < self.decode_count) for i, live in enumerate(self.lives)]
        return self.made

    @property
    def prefills(self) -> list[LiveRequest]:
        """The requests with prefill chunks, in order."""
        return self.lives[self.decode_count :]

    def chunks(self) -> list[tuple[int, int]]:
        """(new tokens, context tokens after them) of each prefill chunk."""
        cdef LiveRequest live
        return [(live.scheduled, live.computed + live.scheduled) for live in self.lives[self.decode_count :]]

    def decode_contexts(self) -> list[int]:
        """Context tokens of each decode, the new one included."""
        cdef Py_ssize_t i
        return [(<LiveRequest> self.lives[i]).computed + 1 for i in range(self.decode_count)]

    def sampling(self) -> list[str]:
        """Request ids whose next token must be sampled, in order: those at the end of what is known, without a plan."""
        cdef LiveRequest live
        return [live.request.request_id for live in self.lives
                if live.scheduled and not live.planned and live.computed + live.scheduled == live.known_tokens]

    # --- making -------------------------------------------------------------------------------------------------------

    def add_decodes(self, list running, const int32_t[::1] slots) -> None:
        """A token for every decoding request, into one of `slots` each; they are as many."""
        cdef LiveRequest live
        cdef Py_ssize_t taken = 0
        for live in running:
            if live.computed >= live.prefill_end:
                live.slot_view[live.computed] = slots[taken]
                live.scheduled = 1
                taken += 1
                self.lives.append(live)
        self.decode_count = taken

    def add_chunk(self, LiveRequest live, slots) -> None:
        """A running request's next tokens, one for each of `slots`."""
        live.scheduled = len(slots)
        live.slots_array[live.computed : live.computed + live.scheduled] = slots
        self.prefill_tokens += live.scheduled
        self.lives.append(live)

    # --- booking ------------------------------------------------------------------------------------------------------

    def sampled(self, tokens) -> list[int | None]:
        """The token of every request that samples and is still live, None for others, in order. Raises InvalidInput
        where one is missing or out of range. Changes nothing."""
        cdef LiveRequest live
        picked = []
        for live in self.lives:
            if live.scheduled == 0 or live.computed + live.scheduled < live.known_tokens:
                picked.append(None)
            elif live.planned:
                picked.append(live.token_view[live.known_tokens])
            else:
                picked.append(sampled_token(tokens, live.request.request_id))
        return picked

    def book_decodes(self, list picked, list outputs) -> list[LiveRequest]:
        """Book the decodes: their KV is computed, their tokens are appended. Adds to `outputs`; returns the requests
        that ended."""
        cdef LiveRequest live
        cdef StepOutput output
        cdef Py_ssize_t i
        ended = []
        for i in range(self.decode_count):
            live = self.lives[i]
            if live.scheduled:
                live.computed += 1
                live.scheduled = 0
                output = live.output(picked[i])
                outputs.append(output)
                if output.finish_reason is not None:
                    ended.append(live)
        return ended

    def book_chunk(self, LiveRequest live, token) -> StepOutput | None:
        """Book a computed prefill chunk, with its token where it was the last; returns the output."""
        live.computed += live.scheduled
        live.scheduled = 0
        return None if token is None else live.output(token)


cdef BatchItem make_item(LiveRequest live, bint is_decode):
    cdef BatchItem item = BatchItem.__new__(BatchItem)
    cdef int64_t end = live.computed + live.scheduled
    item.request_id = live.request.request_id
    item.start = live.computed
    item.token_ids = live.tokens[live.computed : end]
    item.write_slots = live.slots_array[live.computed : end]
    item.context_slots = live.slots_array[:end]
    item.samples = end == live.known_tokens
    item.is_decode = is_decode
    return item


cdef int64_t sampled_token(tokens, request_id) except -1:
    """The token an engine sampled for a request, as a plain int."""
    if request_id not in tokens:
        raise InvalidInput(f"tokens has none for request {request_id!r}")
    token = tokens[request_id]
    if type(token) is int and 0 <= token <= TOKEN_MAX:
        return token
    try:
        token = operator.index(token)  # numpy and torch integers are welcome, floats are not
    except TypeError:
        raise InvalidInput(f"tokens[{request_id!r}] must be an int, got {tokens[request_id]!r}") from None
    return check_int(f"tokens[{request_id!r}]", token, 0, TOKEN_ID_MAX, InvalidInput)


def decoding_count(list running) -> int:
    """How many of them decode."""
    cdef LiveRequest live
    cdef Py_ssize_t count = 0
    for live in running:
        count += live.computed >= live.prefill_end
    return count


def steps_left(list running) -> int:
    """How many iterations they all decode and none of them ends; 0 where one prefills, or may end at any token."""
    cdef LiveRequest live
    cdef int64_t least = -1, left
    for live in running:
        if live.computed < live.prefill_end or not live.planned or live.stops is not None:
            return 0
        left = live.max_tokens - live.known_tokens - 1
        if left < least or least < 0:
            least = left
    return max(least, 0)


def next_contexts(list running) -> list[int]:
    """Context tokens of each in its next decode, the new one included."""
    cdef LiveRequest live
    return [live.computed + 1 for live in running]


def book_steps(list running, int64_t steps, const int32_t[::1] slots) -> None:
    """Book so many decodes of each, at most `steps_left`: as `Batch.add_decodes` and `book_decodes` would have, each
    time with that many slots off the end of `slots`."""
    cdef LiveRequest live
    cdef int64_t step, count = len(running), place = 0
    for live in running:
        for step in range(steps):
            live.slot_view[live.computed + step] = slots[(steps - 1 - step) * count + place]
        live.computed += steps
        live.known_tokens += steps
        place += 1


def prefilling(list running) -> list[LiveRequest]:
    """Those that are in the middle of their prefill, in order."""
    cdef LiveRequest live
    return [live for live in running if live.computed < live.prefill_end]
