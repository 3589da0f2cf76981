"""A scheduler's compiled state in a snapshot: tree, accounts, leases, what the calls of users have counted. Owns how
accounts and leases are written, and what is checked of them; the tree's part is in `tree.pyx`, blocks in
`blocks.pyx`, everything that is plain Python in `snapshot.py`.

Times stay what they were: a restored scheduler goes on in the time of the one that was written (`snapshot.py` says
how), so slices of the window and counters of hits need no change.
"""

from libc.math cimport INFINITY, NAN, isfinite
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from preble._core.atomic cimport store32
from preble._placement.bookings cimport PENDING, DecisionCore
from preble._placement.copy_credits cimport CREDITS, Credit
from preble._kv_index.load_rates cimport MEDIA, LoadRates
from preble._cost cimport BUCKETS, LEASES_MAX, Bucket, Cost, CostModel, Lease, LoadTracker, WorkerLoad
from preble._placement.request_api cimport RequestApi
from preble._core.tree.layout cimport Mark, Node, is_same_node
from preble._placement.prefix_groups cimport SHARES
from preble._core.memory cimport CHUNK, CHUNKS_MAX
from preble._snapshot.codec cimport Reader, Writer, allocated, chain_free, load_items, refuse, save_slab
from preble._snapshot.tree cimport read_tree, write_tree

from zlib import crc32

cdef enum:
    NO_GENERATION = 0xFFFFFFFF   # of a lease whose prompt is not remembered
    LEASE_TOKENS_MAX = 2147483647
    COUNTERS = 6                 # of RequestApi
    SLICE_REQUESTS_MAX = 1 << 26

cdef double OUTPUT_SECONDS_MAX = 1e6
cdef double TIME_MAX = 1e15
cdef double LOAD_SECONDS_MAX = 1e9
cdef double LOAD_SQUARES_MAX = 1e30
cdef int64_t AMOUNT_MAX = <int64_t> 1 << 57      # of a slice's sums, so that those of the window cannot overflow
cdef int64_t FLEET_MAX = <int64_t> 1 << 61       # of all workers' together
cdef int64_t COUNT_MAX = <int64_t> 1 << 62       # of what only ever grows by one
cdef int64_t SERIALS_MAX = (<int64_t> 1 << 36) - 1       # half of those that a lease's key has room for
cdef uint32_t GENERATIONS_MAX = 0xFFFF0000

cdef struct BookHead:
    int64_t serials
    int64_t now_bucket
    double others
    uint32_t generations
    uint32_t end
    uint32_t lease_chunks
    uint32_t free_leases

cdef struct BookRow:             # one worker's account; its sums follow from it
    uint32_t used
    uint32_t generation
    double joined_at
    double working_since
    double output_token_seconds
    double stay_seconds
    LoadRates rates
    Bucket ring[BUCKETS]


def layout() -> tuple[int, ...]:
    """What must be alike where a snapshot is written and where it is read: sizes of what is written as it lies in
    memory."""
    return (sizeof(Node), sizeof(Mark), sizeof(Lease), sizeof(BookRow), sizeof(Credit), CHUNK, BUCKETS, CREDITS)


# --- the whole --------------------------------------------------------------------------------------------------------

def write_core(Writer w not None, RequestApi calls not None) -> None:
    """Write tree, accounts, leases and counters, as the tree's writer."""
    cdef DecisionCore core = calls.core
    cdef int64_t counters[COUNTERS]
    named = named_leases(core)
    write_tree(w, core.tree)
    write_book(w, core, core.loads)
    write_credits(w, core)
    w.number(len(named))
    for request_id, key in named:
        w.number(<uint64_t> <int64_t> key)
        w.value(request_id, "a live request's id")
    counters = [calls.scheduled, calls.finished, calls.cancelled, core.late_calls, calls.reasons[0], calls.reasons[1]]
    w.number(<uint64_t> calls.sequence)
    w.put(&counters[0], sizeof(counters))


def read_core(Reader r not None, RequestApi calls not None, list specs, list costs, double now) -> None:
    """Fill a scheduler without workers. `specs` and `costs` are by worker index, None where there is none. Raises
    SnapshotRefused; then the scheduler is of no use."""
    cdef DecisionCore core = calls.core
    cdef int64_t counters[COUNTERS]
    cdef int64_t sequence
    cdef uint32_t i
    read_tree(r, core.tree)
    read_book(r, core, specs, costs)
    read_credits(r, core)
    read_leases(r, core, now)
    sequence = <int64_t> r.number()
    r.copy(&counters[0], sizeof(counters))
    if not 0 <= sequence <= COUNT_MAX or not all([0 <= counters[i] <= COUNT_MAX for i in range(COUNTERS)]):
        refuse(b"a counter is out of its range")
    calls.sequence = sequence
    calls.scheduled, calls.finished = counters[0], counters[1]
    calls.cancelled, core.late_calls = counters[2], counters[3]
    calls.reasons[0], calls.reasons[1] = counters[4], counters[5]


def cost_at(DecisionCore core not None, uint32_t worker) -> CostModel:
    """The cost model that decisions reckon with for a worker."""
    cdef CostModel model = CostModel.__new__(CostModel)
    model.cost = core.loads.rows[worker].cost[0]
    model.name = "restored"
    return model


cdef list named_leases(DecisionCore core):
    """(request id, key) of the requests whose booking is whole, in booking order. Other threads enter ids meanwhile, so
    this looks at a copy; what ids stand for changes only under the lock."""
    return [(request_id, key) for request_id, key in core.leases.copy().items()
            if key != PENDING and core.loads.lease_of(<int64_t> key) != NULL]


# --- accounts ---------------------------------------------------------------------------------------------------------

cdef int write_book(Writer w, DecisionCore core, LoadTracker loads) except -1:
    cdef BookHead head
    cdef BookRow row
    cdef WorkerLoad* account
    cdef uint32_t i
    memset(&head, 0, sizeof(head))
    head.serials = loads.serials
    head.now_bucket = loads.now_bucket
    head.others = loads.others
    head.generations = loads.generations
    head.end = loads.end
    head.lease_chunks = loads.leases.chunk_count
    head.free_leases = loads.leases.free_count
    w.put(&head, sizeof(head))
    for i in range(loads.end):
        account = &loads.workers[i]
        memset(&row, 0, sizeof(row))
        if account.used:
            row.used = True
            row.generation = account.generation
            row.joined_at = account.joined_at
            row.working_since = loads.rows[i].working_since
            row.output_token_seconds = account.output_token_seconds
            row.stay_seconds = account.stay_seconds
            row.rates = core.rates[i]
            memcpy(&row.ring[0], &account.ring[0], sizeof(row.ring))
        w.put(&row, sizeof(row))
    return save_slab(w, &loads.leases)


cdef int read_book(Reader r, DecisionCore core, list specs, list costs) except -1:
    cdef LoadTracker loads = core.loads
    cdef BookHead head
    cdef BookRow row
    cdef uint32_t i
    cdef list seconds = []
    r.copy(&head, sizeof(head))
    if head.end != core.tree.t.worker_end or head.end != len(specs):
        refuse(b"accounts and workers differ")
    if (not 0 <= head.serials <= SERIALS_MAX or head.generations > GENERATIONS_MAX
            or not -1 <= head.now_bucket <= COUNT_MAX):
        refuse(b"a counter is out of its range")
    if not 0.0 <= head.others <= 1.0:
        refuse(b"a share is none")
    loads.others = head.others
    loads.now_bucket = head.now_bucket
    core.grow(head.end)
    core.names.extend([None] * head.end)
    for i in range(head.end):
        r.copy(&row, sizeof(row))
        if ((row.used != 0) != (specs[i] is not None)
                or core.tree.t.workers[i].capacity != (0 if specs[i] is None else specs[i].kv_capacity_tokens)):
            refuse(b"accounts and workers differ")
        seconds.append(row.output_token_seconds)
        if row.used:
            open_account(core, i, specs[i], costs[i], &row)
            if row.generation > head.generations:
                refuse(b"an account has a number that was never given")
    loads.generations = head.generations
    loads.serials = head.serials
    core.publish_names()
    read_lease_slab(r, core, &head)
    check_slices(loads)
    loads.find_oldest()
    for i in range(head.end):
        if loads.workers[i].used:
            loads.workers[i].output_token_seconds = seconds[i]   # opening the next one has changed it
    loads.settle()
    return 0


cdef int open_account(DecisionCore core, uint32_t i, object spec, CostModel cost, BookRow* row) except -1:
    """Open a worker's account as ever, then let it be what it was."""
    cdef LoadTracker loads = core.loads
    cdef WorkerLoad* account
    cdef uint32_t slot, at
    cdef int64_t* amounts
    cdef Cost* own
    if (not is_time(row.joined_at) or not is_time(row.working_since) or row.generation == 0
            or not 0 <= row.output_token_seconds <= OUTPUT_SECONDS_MAX or not 0 <= row.stay_seconds <= TIME_MAX):
        refuse(b"an account is out of its range")
    if core.timings is not None:
        core.timings.open(i)
    own = <Cost*> allocated(malloc(sizeof(Cost)))
    own[0] = cost.cost
    try:
        loads.open(i, own, spec.max_running or 0, -1e15)                # long ago, so that no slice expires
    except MemoryError:
        free(own)
        raise
    account = &loads.workers[i]
    account.generation = row.generation
    account.stay_seconds = row.stay_seconds
    account.joined_at = loads.rows[i].joined_at = row.joined_at
    loads.rows[i].working_since = row.working_since
    for slot in range(BUCKETS):
        account.ring[slot] = row.ring[slot]
        amounts = <int64_t*> &account.ring[slot]
        if not is_possible(&row.ring[slot]):
            refuse(b"an account is out of its range")
        for at in range(<uint32_t> (sizeof(Bucket) // 8)):
            (<int64_t*> &account.window)[at] += amounts[at]
            (<int64_t*> &loads.fleet)[at] += amounts[at]
            if (<int64_t*> &loads.fleet)[at] > FLEET_MAX:
                refuse(b"an account is out of its range")
    if not is_learned(&row.rates):
        refuse(b"what loads take is out of its range")
    core.rates[i] = row.rates
    core.names[i] = spec.id
    store32(&loads.rows[i].block_size, spec.block_size)
    store32(&loads.rows[i].cached_first, spec.cached_first)
    store32(&loads.rows[i].name, crc32(spec.id.encode()))
    return 0


cdef bint is_time(double at) noexcept nogil:
    return -TIME_MAX <= at <= TIME_MAX


cdef bint is_learned(const LoadRates* rates) noexcept nogil:
    """Whether times of loads can be learned as this."""
    cdef uint32_t medium
    for medium in range(<uint32_t> MEDIA):
        if not (0.0 <= rates.seconds[medium] <= LOAD_SECONDS_MAX and 1.0 <= rates.squares[medium] <= LOAD_SQUARES_MAX
                and -LOAD_SQUARES_MAX <= rates.products[medium] <= LOAD_SQUARES_MAX):
            return False
    return is_time(rates.others_late) and 0.0 <= rates.others_count <= LOAD_SECONDS_MAX


cdef bint is_possible(const Bucket* slice) noexcept nogil:
    """Whether some requests can add up to a slice of the window."""
    cdef int64_t most = slice.requests * <int64_t> LEASE_TOKENS_MAX
    return (0 <= slice.finished <= slice.requests <= SLICE_REQUESTS_MAX
            and 0 <= slice.matched_tokens <= slice.prompt_tokens <= most and 0 <= slice.output_tokens <= most
            and 0 <= slice.finished_tokens <= slice.finished * <int64_t> LEASE_TOKENS_MAX
            and 0 <= slice.prefill_ns <= AMOUNT_MAX)


cdef int check_slices(LoadTracker loads) except -1:
    """Each slice holds what its live requests will take out again when they end, and what others have left there."""
    cdef uint32_t i, slot
    cdef bint right = True
    count_leases(loads, -1)
    for i in range(loads.end):
        for slot in range(BUCKETS):
            right = right and (not loads.workers[i].used or is_possible(&loads.workers[i].ring[slot]))
    count_leases(loads, 1)
    if not right:
        refuse(b"live requests have booked more than their slice holds")
    return 0


cdef void count_leases(LoadTracker loads, int64_t sign) noexcept:
    """Add to the slices what live requests have booked there, or take it out."""
    cdef uint32_t i
    cdef Lease* lease
    cdef Bucket* slice
    for i in range(loads.leases.chunk_count * <uint32_t> CHUNK):
        lease = loads.lease_at(i)
        if lease.serial and loads.is_current(lease) and loads.now_bucket - lease.bucket < BUCKETS:
            slice = &loads.workers[lease.worker].ring[lease.bucket % BUCKETS]
            slice.prefill_ns += sign * lease.prefill_ns
            slice.requests += sign
            slice.prompt_tokens += sign * lease.prompt_tokens
            slice.matched_tokens += sign * lease.matched_tokens
            slice.output_tokens += sign * lease.expected_output


# --- credits for copies -----------------------------------------------------------------------------------------------

cdef int write_credits(Writer w, DecisionCore core) except -1:
    """The rows that somebody has."""
    cdef uint32_t i, count = 0
    for i in range(CREDITS):
        count += core.credits[i].generation != 0
    w.number(count)
    for i in range(CREDITS):
        if core.credits[i].generation:
            w.put(&core.credits[i], sizeof(Credit))
    return 0


cdef int read_credits(Reader r, DecisionCore core) except -1:
    """Rows go where their nodes lead; of nodes that are no longer the same nobody will ask."""
    cdef uint64_t count = r.number()
    cdef Credit row
    if count > <uint64_t> CREDITS:
        refuse(b"more is saved up than there are rows")
    for _ in range(count):
        r.copy(&row, sizeof(Credit))
        if not 0.0 <= row.seconds <= TIME_MAX or not is_time(row.at) or not row.generation:
            refuse(b"what is saved up for copies is out of its range")
        core.credits[row.node & (CREDITS - 1)] = row
    return 0


# --- leases -----------------------------------------------------------------------------------------------------------

cdef int read_lease_slab(Reader r, DecisionCore core, BookHead* head) except -1:
    cdef LoadTracker loads = core.loads
    cdef uint32_t i, items = head.lease_chunks * <uint32_t> CHUNK, live = 0
    cdef bytearray taken
    cdef const char* order
    cdef Lease* lease
    if head.lease_chunks > <uint32_t> CHUNKS_MAX:
        refuse(b"more leases than there may be")
    load_items(r, &loads.leases, &loads.budget, head.lease_chunks)
    taken = bytearray(items)
    for i in range(items):
        lease = loads.lease_at(i)
        if lease.serial:
            live += 1
            taken[i] = 1
            read_lease(core, lease, i)
    order = r.take(<int64_t> head.free_leases * 4)
    if <uint64_t> live + head.free_leases != items or not chain_free(
            &loads.leases, <const uint32_t*> order, head.free_leases, <uint8_t*> <char*> taken):
        refuse(b"its list of free leases is wrong")
    return 0


cdef int read_lease(DecisionCore core, Lease* lease, uint32_t index) except -1:
    """Make sure of a lease, and count it for its worker."""
    cdef LoadTracker loads = core.loads
    cdef WorkerLoad* account
    lease.prefilled = lease.prefilled != 0
    lease.share = lease.share if lease.share <= <uint32_t> SHARES else 0
    lease.first_at = NAN                         # what was measured of its worker since then is not kept
    if not lease.prefilled or not is_time(lease.began_at):
        lease.began_at = INFINITY
    if (lease.index != index or not 0 < lease.serial <= loads.serials or not is_time(lease.booked_at)
            or not isfinite(lease.renewed_seconds) or lease.renewed_seconds < 0
            or not 0 <= lease.bucket <= loads.now_bucket or not 0 <= lease.prefill_ns <= AMOUNT_MAX
            or lease.worker_generation == 0 or not 0 < lease.prompt_tokens <= <uint32_t> LEASE_TOKENS_MAX
            or lease.matched_tokens > lease.prompt_tokens or lease.confirmed_tokens > lease.prompt_tokens
            or lease.expected_output > <uint32_t> LEASE_TOKENS_MAX):
        refuse(b"a lease is out of its range")
    if lease.leaf >= core.tree.t.nodes.chunk_count * CHUNK or not is_same_node(&core.tree.t, lease.leaf,
                                                                               lease.leaf_generation):
        lease.leaf = 0                                   # forgotten since, and to stay so
        lease.leaf_generation = NO_GENERATION
    if loads.is_current(lease):
        account = &loads.workers[lease.worker]
        loads.live_change(account, lease, 1)
        if not lease.prefilled:
            account.waiting_requests += 1
            loads.wait_change(account, lease.prefill_ns)
    return 0


cdef int read_leases(Reader r, DecisionCore core, double now) except -1:
    """Give the leases their requests' ids. Whatever has none was being placed, and is taken back."""
    cdef LoadTracker loads = core.loads
    cdef uint64_t count = r.number()
    cdef int64_t key
    cdef uint32_t i
    cdef set taken = set()
    if count > loads.leases.live:
        refuse(b"more requests than leases")
    for _ in range(count):
        key = <int64_t> r.number()
        request_id = r.value()
        i = loads.index_of(key)
        if (i >= loads.leases.chunk_count * <uint32_t> CHUNK or key < LEASES_MAX or loads.lease_of(key) == NULL
                or i in taken or request_id in core.leases):
            refuse(b"a request has no lease")
        taken.add(i)
        core.leases[request_id] = key
    for i in range(loads.leases.chunk_count * <uint32_t> CHUNK):
        if loads.lease_at(i).serial and i not in taken:
            core.cancelled(loads.lease_at(i).serial * LEASES_MAX + i, now)
    return 0
