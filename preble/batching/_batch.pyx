"""Live requests of one worker and the batches made of them: what happens once for every token. Owns `LiveRequest`,
`Batch` and `StepOutput`; decides nothing (that is `local.py`), and knows neither queue nor cache.

It is compiled because it is the inner loop of every engine and of the simulator: a decode costs some tens of
nanoseconds here, in Python it cost thirty microseconds. A batch lists its requests, decodes first, and makes the items
that an engine computes only when it is asked for them; the simulated engine needs no more than their sizes.
"""

import operator

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

import numpy as np

from ..errors import InvalidInput
from ..types import BATCH, check_int

TOKEN_ID_MAX = 2**31 - 1
NO_TOKENS = np.empty(0, np.int32)

cdef int64_t TOKEN_MAX = TOKEN_ID_MAX
cdef object INT32 = np.dtype(np.int32)
cdef object ARRAY = np.ndarray


def are_token_ids(array) -> bool:
    """Whether it is an array as a request keeps its tokens: int32, 1-D, contiguous, not empty, nothing below 0."""
    cdef const int32_t[::1] ids
    cdef int32_t together = 0
    cdef Py_ssize_t i
    if type(array) is not ARRAY or array.dtype != INT32 or array.ndim != 1 or not array.flags.c_contiguous:
        return False
    ids = array
    for i in range(ids.shape[0]):
        together |= ids[i]
    return ids.shape[0] > 0 and together >= 0


cdef class LiveRequest:
    """The scheduler's record of one request. Positions count from the start of the prompt.

        tokens   [ prompt ............................. | output ...... ]          known_tokens of them
        slots    [ owned by the tree (hold) | owned by the request | in flight ]   the KV of tokens[:computed] is valid
                   0        hold.matched_tokens       computed    computed + scheduled

    A request is prefilling until `computed` reaches `prefill_end`, the number of tokens known when it was admitted, and
    decoding from then on. While it waits it holds nothing.
    """

    def __init__(self, request, number, arrival_seconds):
        cdef const int32_t[::1] known = request.token_ids
        self.request = request
        self.number = number
        self.arrival_seconds = arrival_seconds
        self.tokens = request.token_ids
        self.token_data = <int32_t*> &known[0]           # the array is kept, and nobody moves its memory
        self.prompt_tokens = self.known_tokens = known.shape[0]
        self.max_tokens = self.prompt_tokens + <int64_t> request.max_new_tokens
        self.planned = request.planned_ids is not None
        self.stops = request.stop_token_ids or None
        self.claim = request.claim
        self.yields = self.claim is not None and self.claim.priority == BATCH
        self.namespace = request.namespace
        self.slots_array = NO_TOKENS
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
        return resumes(self)

    @property
    def place(self) -> tuple[int, float]:
        """The queue's: (group, rank in it), as of `place_version`."""
        return self.group, self.rank

    @property
    def decoding(self) -> bool:
        """True once the tokens known at admission are computed."""
        return self.computed >= self.prefill_end

    @property
    def uncached_now(self) -> int:
        """Tokens that would have to be computed if the request were admitted now, as far as the queue knows."""
        return uncached_of(self)

    @property
    def known(self):
        """The known tokens: prompt and output so far. A view."""
        return self.tokens[: self.known_tokens]

    def make_buffers(self) -> None:
        """Allocate room for the longest output and its slots, so that decode steps write single numbers."""
        self.make_room()

    cdef int make_room(self) except -1:
        cdef int32_t[::1] room
        cdef const int32_t[::1] planned
        if self.tokens is self.request.token_ids:        # it was never admitted
            tokens = np.empty(self.max_tokens, np.int32)
            room = tokens
            memcpy(&room[0], self.token_data, self.prompt_tokens * sizeof(int32_t))
            if self.planned:
                planned = self.request.planned_ids
                memcpy(&room[self.prompt_tokens], &planned[0], planned.shape[0] * sizeof(int32_t))
            self.token_data = &room[0]
            self.tokens = tokens
        self.slots_array = np.empty(self.max_tokens, np.int32)
        room = self.slots_array
        self.slot_data = &room[0]
        return 0

    def drop_slots(self) -> None:
        """Own no slots any more, and count as not computed."""
        self.slots_array = NO_TOKENS
        self.slot_data = NULL
        self.computed = 0

    def append(self, int64_t token) -> object:
        """Add one output token; returns why it is the last ("stop", "length") or None."""
        if not self.planned:
            self.token_data[self.known_tokens] = <int32_t> token
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

    cdef int decode(self, list running, const int32_t* slots) except -1:
        """A token for every decoding request, into one of `slots` each; they are as many."""
        cdef LiveRequest live
        cdef Py_ssize_t taken = 0
        for live in running:
            if live.computed >= live.prefill_end:
                live.slot_data[live.computed] = slots[taken]
                live.scheduled = 1
                taken += 1
                self.lives.append(live)
        self.decode_count = taken
        return 0

    cdef int compute(self, LiveRequest live, const int32_t* slots, int64_t count) except -1:
        """A running request's next `count` tokens, one for each of `slots`."""
        live.scheduled = count
        memcpy(live.slot_data + live.computed, slots, count * sizeof(int32_t))
        self.prefill_tokens += count
        self.lives.append(live)
        return 0

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
                picked.append(live.token_data[live.known_tokens])
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

    cdef StepOutput booked_chunk(self, LiveRequest live, object token):
        """Book a computed prefill chunk, with its token where it was the last; returns the output, else None."""
        live.computed += live.scheduled
        live.scheduled = 0
        return None if token is None else live.output(<int64_t> token)

    cdef int64_t book_planned_decodes(self, list outputs, list ended) except -1:
        """As `book_decodes`, where all tokens are planned, but only with the outputs that end a request; returns how
        many were booked."""
        cdef LiveRequest live
        cdef StepOutput output
        cdef int64_t booked = 0
        cdef Py_ssize_t i
        for i in range(self.decode_count):
            live = self.lives[i]
            if live.scheduled:
                live.computed += 1
                live.scheduled = 0
                booked += 1
                if live.stops is None and live.known_tokens + 1 < live.max_tokens:
                    live.known_tokens += 1
                else:
                    output = live.output(live.token_data[live.known_tokens])
                    if output.finish_reason is not None:
                        outputs.append(output)
                        ended.append(live)
        return booked

    cdef object planned_token(self, LiveRequest live):
        """The planned token that a chunk ends with; None where it is not the last, or does not count any more."""
        if live.scheduled == 0 or live.computed + live.scheduled < live.known_tokens:
            return None
        return live.token_data[live.known_tokens]

    cdef LiveRequest unplanned(self):
        """The first request whose next token must be sampled; None where there is none."""
        cdef LiveRequest live
        for live in self.lives:
            if live.scheduled and not live.planned and live.computed + live.scheduled == live.known_tokens:
                return live
        return None


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


cdef int64_t decodes_in(list running) noexcept:
    """How many of them decode."""
    cdef LiveRequest live
    cdef int64_t count = 0
    for live in running:
        count += live.computed >= live.prefill_end
    return count


cdef int64_t steps_in(list running) noexcept:
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


cdef int run_steps(list running, int64_t steps, const int32_t* slots) except -1:
    """Book so many decodes of each, at most `steps_in`: as `Batch.decode` and `book_decodes` would have, each time with
    that many slots off the end of `slots`."""
    cdef LiveRequest live
    cdef int64_t step, count = len(running), place = 0
    for live in running:
        for step in range(steps):
            live.slot_data[live.computed + step] = slots[(steps - 1 - step) * count + place]
        live.computed += steps
        live.known_tokens += steps
        place += 1
    return 0


cdef list prefills_in(list running):
    """Those that are in the middle of their prefill, in order."""
    cdef LiveRequest live
    return [live for live in running if live.computed < live.prefill_end]
