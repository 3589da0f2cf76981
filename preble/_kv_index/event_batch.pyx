"""Engines' cache events at the door, as Python sees them. Owns the way from a payload, or from event objects, to the C
arrays that `BlockIndex` applies, and from a payload to event objects; the words for what is wrong with them; and how a
block's LoRA, salt and extra keys become a namespace. Keeps nothing after that and knows neither tree nor index;
decoding itself is in `decode.pyx`.
"""

from operator import index

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from preble._kv_index.decode cimport (BATCH, CLEARED, HASH_BYTES_MAX, HASH_TOO_LONG, LEFT_OVER, MISSING, NAMED_TWICE,
                                      NO_FIT, OUT_OF_MEMORY, REMOVED, STORED, TIME, WRONG_TYPE, Batch, Event, Fault,
                                      Key, Slice, close_batch, decode, empty_batch, keep_event, key_item, need_keys,
                                      need_tokens, take_prints)
from preble._core.atomic cimport FREE_THREADED
from preble._core.dict_keys cimport find_key
from preble._core.msgpack_reader cimport (BAD_TOKEN, BYTES_ITEM, CUT_SHORT, FINE, INT_ITEM, RESERVED_BYTE, TOO_LONG,
                                          Item, Reader, read_item)
from preble._core.token_ids cimport TokenView, check_tokens, release_tokens, view_tokens

from ..errors import InvalidInput, InvalidTokens
from ..types import AllBlocksCleared, BlockKeys, BlockRemoved, BlockStored, check_int

cdef enum:
    PAYLOAD_MAX = 1 << 24        # bytes of one batch; decoded it takes up to 30 times that, if it is all hashes
    TOKENS_MAX = 1 << 28         # of one batch of event objects
    SPARE_MAX = 1 << 20          # bytes of arrays kept for the next batch
    KNOWN_MAX = 4096             # namespaces remembered by what their blocks name

cdef Batch _spare                # the arrays of a batch that is gone, for the next one; the GIL protects them
memset(&_spare, 0, sizeof(Batch))

_FIELD_NAMES = ("", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
                "extra_keys", "group_idx", "cache_salt", "metadata", "time", "events", "event tag", "batch")
_EXPECTED = ("", "a list of ints or bytes", "an int, bytes or nil", "a list of ints in [0, 2147483647]",
             "an int in [1, 2147483647]", "an int, a string or nil", "a string or nil", "a string or nil",
             "a list with an element per block, or nil", "an int in [0, 4294967295] or nil", "a string or nil",
             "a map or nil", "a number", "a list", "a string", "a list of at least time and events")
_TROUBLES = {
    CUT_SHORT: "the payload ends inside a value",
    TOO_LONG: "a length is claimed that is more than the rest of the payload",
    RESERVED_BYTE: "0xc1 is no MessagePack",
    BAD_TOKEN: "must be ints in [0, 2147483647]",
    NAMED_TWICE: "is named twice",
    MISSING: "is missing",
    NO_FIT: "does not fit: block_size times the number of block_hashes is not the number of token_ids",
    HASH_TOO_LONG: f"a block hash has more than {HASH_BYTES_MAX} bytes",
    LEFT_OVER: "bytes are left after the batch",
}


cdef class EventBatch:
    """Decoded events, to be applied once by one `BlockIndex`, or handed on as objects. Not thread-safe; made for one
    call. `keyed_blocks` are those that `events` left out.

    `payload` is a batch as it comes off an engine's socket, any bytes-like object; None makes an empty batch for `add`.
    `fail_after` is for tests: the n-th allocation fails.
    """

    def __cinit__(self, object payload=None, *, int64_t fail_after=0):
        global _spare
        if not FREE_THREADED:
            self.batch = _spare
            memset(&_spare, 0, sizeof(Batch))
        if fail_after:               # an allocation that is not made cannot fail
            close_batch(&self.batch)
            memset(&self.batch, 0, sizeof(Batch))
        self.batch.budget.fail_after = fail_after
        self.borrowed = False
        self.namespaces = []
        self.kept = []
        if payload is None:
            return
        if not PyObject_CheckBuffer(payload):
            raise InvalidInput(f"payload must be bytes-like, got a {type(payload).__name__}")
        try:
            PyObject_GetBuffer(payload, &self.buffer, PyBUF_SIMPLE)
        except (BufferError, ValueError) as error:       # numpy and a released memoryview raise the latter
            raise InvalidInput(f"payload is not contiguous, or not readable: {error}") from None
        self.borrowed = True
        if self.buffer.len > PAYLOAD_MAX:
            raise InvalidInput(f"payload has {self.buffer.len} bytes, at most {PAYLOAD_MAX} are allowed")
        self.batch.reader.begin = self.batch.reader.at = <const uint8_t*> self.buffer.buf
        self.batch.reader.end = self.batch.reader.begin + self.buffer.len
        with nogil:
            decode(&self.batch)
        if self.batch.fault.trouble != FINE:
            self.failed()

    def __dealloc__(self):
        global _spare
        if FREE_THREADED or self.batch.budget.used > SPARE_MAX or _spare.budget.used:
            close_batch(&self.batch)
        else:
            empty_batch(&self.batch)
            _spare = self.batch
        if self.borrowed:
            PyBuffer_Release(&self.buffer)

    def __len__(self) -> int:
        """Events in the batch, those that mean nothing here included."""
        return self.batch.seen

    @property
    def unknown_events(self) -> int:
        """Events with tags that mean nothing here."""
        return self.batch.unknown

    cdef int failed(self) except -1:
        """Raise what `fault` says."""
        cdef Fault* fault = &self.batch.fault
        cdef int trouble = fault.trouble
        if trouble == OUT_OF_MEMORY:
            raise MemoryError("cache events")
        what = f"must be {_EXPECTED[fault.field]}" if trouble == WRONG_TYPE else _TROUBLES[trouble]
        name = _FIELD_NAMES[fault.field]
        where = f"payload byte {fault.at - self.batch.reader.begin}"
        if fault.field not in (TIME, BATCH):
            where += f", event {self.batch.seen}"
        raise InvalidInput(f"{where}: {name + ' ' if name else ''}{what}")

    # --- namespaces ---

    cdef int resolve(self, object namespace, object namespace_of, dict known) except -1:
        """Name the namespace of each event that starts prompts and names more than tokens. `known` remembers answers,
        and forgets them all when there are too many."""
        cdef uint32_t i
        cdef Event* event
        check_hashable("namespace", namespace)
        for i in range(self.batch.event_count):
            event = &self.batch.events[i]
            if event.kind != STORED or event.has_parent or not names_more(event):
                continue
            key = find_key(known, (event.lora, event.salted, event.extra_first, namespace))
            if key in known:
                answer = known[key]
            else:
                answer = self.namespace_for(event, namespace, namespace_of, True)
                if len(known) >= KNOWN_MAX:
                    known.clear()
                known[key] = answer
            event.namespace = len(self.namespaces)
            self.namespaces.append(answer)
        return 0

    cdef object namespace_for(self, Event* event, object namespace, object namespace_of, bint or_bytes):
        """The namespace of an event's blocks, which name more than tokens."""
        names = self.names_of(event, or_bytes)
        answer = names.namespace(namespace) if namespace_of is None else namespace_of(names)
        check_hashable("what namespace_of returns", answer)
        return answer

    cdef object names_of(self, Event* event, bint or_bytes):
        """What an event names beside tokens. What Python cannot hold is its own bytes, or InvalidInput."""
        extra = unpacked(&event.extra, or_bytes)
        extra = (extra,) if isinstance(extra, bytes) else extra[0] if extra else None
        lora = unpacked(&event.lora_name, or_bytes)
        if extra and lora is not None and extra[0] == lora:
            extra = extra[1:]
        return BlockKeys(lora, unpacked(&event.lora_id, or_bytes), unpacked(&event.salt, or_bytes), extra or ())

    # --- to event objects ---

    def events(self, *, object namespace=None, object namespace_of=None) -> list:
        """The payload's events as objects, oldest first, without those that say nothing.

        Blocks that start a prompt are in `namespace`; where they name more than tokens, in `namespace_of(BlockKeys)`,
        by default `BlockKeys.namespace(namespace)`. Others follow their parent. Blocks have no namespace and are left
        out, and counted in `keyed_blocks`, if their extra keys begin in the middle of a prompt (an image), Python
        cannot hold what they name, or `namespace_of` raises InvalidInput. Copies in different cache groups get
        different media. Raises InvalidInput for a medium that is no UTF-8.
        """
        cdef uint32_t i
        assert self.borrowed, "who made a batch of event objects has them"
        self.keyed_blocks = 0
        made = []
        for i in range(self.batch.event_count):
            event = self.as_object(&self.batch.events[i], namespace, namespace_of)
            if event is not None:
                made.append(event)
        return made

    cdef object as_object(self, Event* event, object namespace, object namespace_of):
        """One event; None if all of its blocks are left out."""
        cdef uint32_t i, kept
        cdef Reader reader = self.batch.reader
        cdef Item item
        if event.kind == CLEARED:
            return AllBlocksCleared()
        reader.at = reader.begin + event.hashes_byte
        read_item(&reader, &item)
        hashes = [next_hash(&reader) for _ in range(event.key_count)]
        if event.kind == REMOVED:
            return BlockRemoved(tuple(hashes), self.medium_of(event))
        # What a request names beside tokens from its start on is its namespace, what comes later something inside it.
        if event.has_parent and event.extra_first:
            kept = 0
        else:
            kept = event.extra_cut if event.extra_later == event.extra_first else event.extra_at
        space = parent = None
        if event.has_parent:
            reader.at = reader.begin + event.parent_byte
            parent = next_hash(&reader)
        elif not names_more(event):
            space = namespace
        else:
            try:
                space = self.namespace_for(event, namespace, namespace_of, False)
            except InvalidInput:
                kept = 0
        self.keyed_blocks += event.key_count - kept
        if event.key_count and not kept:
            return None
        tokens = tuple([self.batch.tokens[event.tokens_at + i] for i in range(kept * event.block_size)])
        return BlockStored(tuple(hashes[:kept]), parent, tokens, event.block_size, space, self.medium_of(event))

    cdef object medium_of(self, Event* event):
        """The medium as named; copies in different cache groups are distinguished like copies in different media."""
        cdef const uint8_t* data = event.medium.data
        medium = None
        if self.batch.reader.begin <= data < self.batch.reader.end:
            try:
                medium = (<const char*> data)[:event.medium.length].decode()
            except UnicodeDecodeError:
                raise InvalidInput("medium is no UTF-8") from None
        return f"{medium or 'GPU'}/{event.group}" if event.group else medium

    # --- from event objects ---

    def add(self, object event) -> None:
        """Add an event object. Raises InvalidInput naming the field; the batch is then as before."""
        cdef uint32_t keys = self.batch.key_count, tokens = self.batch.token_count
        cdef Event removed
        try:
            if isinstance(event, BlockStored):
                self.add_stored(event)
                return
            memset(&removed, 0, sizeof(Event))
            removed.kind = CLEARED
            removed.namespace = -1
            if isinstance(event, BlockRemoved):
                removed.kind = REMOVED
                self.add_keys(event.block_hashes, &removed)
                self.add_medium(event.medium, &removed)
            elif not isinstance(event, AllBlocksCleared):
                raise InvalidInput(f"events: {event!r} is not a cache event")
            need_memory(keep_event(&self.batch, &removed))
        except BaseException:
            self.batch.key_count = min(keys, self.batch.key_count)
            self.batch.token_count = tokens
            raise

    cdef int add_stored(self, object event) except -1:
        cdef Event stored
        memset(&stored, 0, sizeof(Event))
        stored.kind = STORED
        stored.block_size = check_int("BlockStored.block_size", event.block_size, 1, 2**31 - 1, InvalidInput)
        try:
            hash(event.namespace)
        except TypeError:
            kind = type(event.namespace).__name__
            raise InvalidInput(f"BlockStored.namespace must be hashable, got a {kind}") from None
        self.add_tokens(event.token_ids, &stored)
        self.add_keys(event.block_hashes, &stored)
        if event.parent_block_hash is not None:
            stored.has_parent = True
            key_of(event.parent_block_hash, "BlockStored.parent_block_hash", &stored.parent)
        self.add_medium(event.medium, &stored)
        if <uint64_t> stored.key_count * stored.block_size != stored.token_count:
            raise InvalidInput(f"BlockStored.token_ids: {stored.token_count} tokens for {stored.key_count} "
                               f"block_hashes of block_size {stored.block_size}")
        stored.extra_at = stored.extra_cut = stored.key_count
        take_prints(&self.batch, &stored)
        stored.namespace = -1
        if event.namespace is not None:
            stored.namespace = len(self.namespaces)
            self.namespaces.append(event.namespace)
        return need_memory(keep_event(&self.batch, &stored))

    cdef int add_tokens(self, object token_ids, Event* event) except -1:
        cdef TokenView view
        try:
            try:
                view_tokens(token_ids, &view, allow_empty=True)
            except InvalidTokens:
                if isinstance(token_ids, (list, tuple, str)) or not hasattr(token_ids, "__iter__"):
                    raise
                view_tokens(list(token_ids), &view, allow_empty=True)      # a range, small numpy integers
        except InvalidTokens as error:
            raise InvalidInput(f"BlockStored.{error}") from None
        try:
            check_tokens(&view, 0)
            if <uint64_t> self.batch.token_count + view.count > TOKENS_MAX:
                raise InvalidInput(f"events: more than {TOKENS_MAX} tokens in one call")
            need_memory(need_tokens(&self.batch, view.count))
            event.tokens_at = self.batch.token_count
            event.token_count = view.count
            if view.count:
                memcpy(&self.batch.tokens[event.tokens_at], view.data, view.count * sizeof(int32_t))
            self.batch.token_count += view.count
        except InvalidTokens as error:
            raise InvalidInput(f"BlockStored.{error}") from None
        finally:
            release_tokens(&view)
        return 0

    cdef int add_keys(self, object block_hashes, Event* event) except -1:
        cdef str owner = "BlockStored" if event.kind == STORED else "BlockRemoved"
        if isinstance(block_hashes, (str, bytes)) or not hasattr(block_hashes, "__iter__"):
            raise InvalidInput(f"{owner}.block_hashes must be ints or bytes in a list, got {block_hashes!r}")
        hashes = list(block_hashes)
        need_memory(need_keys(&self.batch, len(hashes)))
        event.keys_at = self.batch.key_count
        event.key_count = len(hashes)
        name = f"{owner}.block_hashes"
        for block_hash in hashes:
            key_of(block_hash, name, &self.batch.keys[self.batch.key_count])
            self.batch.key_count += 1
        return 0

    cdef int add_medium(self, object medium, Event* event) except -1:
        cdef Py_ssize_t length = 0
        if not medium:
            return 0
        if not isinstance(medium, str):
            raise InvalidInput(f"medium must be a string or None, got {medium!r}")
        event.medium.data = <const uint8_t*> PyUnicode_AsUTF8AndSize(medium, &length)
        event.medium.length = <uint32_t> length
        self.kept.append(medium)
        return 0


cdef int need_memory(int trouble) except -1:
    if trouble != FINE:
        raise MemoryError("cache events")
    return 0


cdef inline bint names_more(Event* event) noexcept:
    """Whether an event's first block names more than tokens."""
    return event.lora != 0 or event.salted != 0 or event.extra_first != 0


cdef int check_hashable(str name, object namespace) except -1:
    """Before anything is made for a namespace, or remembered of it."""
    try:
        hash(namespace)
    except TypeError as error:
        raise InvalidInput(f"{name} must be hashable: {error}") from None
    return 0


cdef int key_of(object block_hash, str name, Key* key) except -1:
    """The key of a block hash that came as an object. Ints of more than 64 bits are known by their bytes."""
    cdef Batch none
    cdef Item item
    cdef bytes octets
    if isinstance(block_hash, bytes):
        octets = block_hash
    else:
        try:
            number = index(block_hash)
        except TypeError:
            number = None
        if number is None or isinstance(block_hash, bool):
            raise InvalidInput(f"{name} must be ints or bytes, got {block_hash!r}")
        if -2**63 <= number < 2**64:
            item.kind = INT_ITEM
            item.negative = number < 0
            item.number = <uint64_t> (number & 0xffffffffffffffff)
            key_item(&none, key, &item, NULL)
            return 0
        octets = b"int" + number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    if PyBytes_GET_SIZE(octets) > HASH_BYTES_MAX:
        raise InvalidInput(f"{name}: {_TROUBLES[HASH_TOO_LONG]}")
    item.kind = BYTES_ITEM
    item.data = <const uint8_t*> PyBytes_AS_STRING(octets)
    item.length = <uint32_t> PyBytes_GET_SIZE(octets)
    key_item(&none, key, &item, NULL)
    return 0


cdef object next_hash(Reader* reader):
    """A block hash that was found to be one, as it was written."""
    cdef Item item
    memset(&item, 0, sizeof(Item))
    read_item(reader, &item)
    if item.kind == BYTES_ITEM:
        return (<const char*> item.data)[:item.length]
    return <int64_t> item.number if item.negative else item.number


cdef object unpacked(Slice* slice_, bint or_bytes):
    """A value of the payload as a Python object, lists as tuples; None where it is absent. What Python cannot hold is
    its own bytes, or raises InvalidInput."""
    if slice_.data == NULL:
        return None
    import msgspec                   # here, because most engines name nothing beside tokens, and then nobody needs it
    raw = (<const char*> slice_.data)[:slice_.length]
    try:
        return frozen(msgspec.msgpack.decode(raw))
    except (ValueError, TypeError, RecursionError):      # nested too deep, no UTF-8, a map, an extension
        if or_bytes:
            return raw
        raise InvalidInput("what blocks name beside tokens holds a value that Python cannot") from None


cdef object frozen(object value):
    """The value with tuples for its lists. Raises TypeError for what is no plain value."""
    if isinstance(value, list):
        return tuple([frozen(item) for item in value])
    if value is None or isinstance(value, (str, bytes, int, float)):
        return value
    raise TypeError(type(value))
