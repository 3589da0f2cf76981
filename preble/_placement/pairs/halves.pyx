"""A request whose prompt one worker prefills and whose output another decodes: the terms of E2's price for either half,
and how each half is booked. Owns no rule: which pair it is, `scheduling/pairs` says.

Both halves are bookings like any other, by `DecisionCore.booked`. That of the prefill is a request for one token. That
of the decode has its first token from the start, as far as its worker's queue goes: no prefill of it ever waits there.
All of this runs as the tree's writer.
"""

from libc.math cimport INFINITY, isinf
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memset

from preble._core.atomic cimport load32, load_double, store_double
from preble._core.dict_keys cimport dict_key
from preble._core.memory cimport NONE
from preble._core.token_ids cimport TokenView, release_tokens, view_tokens
from preble._core.tree.nodes cimport confirmed_tokens
from preble._core.tree.operations cimport confirm_path, take_back
from preble._cost cimport Cost, Lease, Row, token_seconds
from preble._placement.bookings cimport LATE, PENDING, DecisionCore
from preble._placement.decision cimport Decision
from preble._placement.e2 cimport EXPLORE, Choice, Placement, Prices, Scratch, Terms, clear_scratch, load, use
from preble._placement.timing_samples cimport WorkerSamples


def half_terms(DecisionCore core not None, token_ids, object namespace, int64_t max_new_tokens, list workers,
               double now, bint of_session) -> tuple[int, float, list[tuple]]:
    """Of a prompt to be placed: its tokens, for how long the oldest worker has been observed, and for each of these
    workers, by index, whatever requests it takes: its live requests, tokens of the prompt that it can use, and in
    seconds L, P, loading, queue, eviction, balance, by how much it slows the decoding of others, and others its own,
    the whole decode, and last the share of its time that prefills have had. Changes nothing; leaves the terms in the
    scratch (`DecisionCore.view`). Raises InvalidTokens. O(tokens + workers)."""
    cdef TokenView view
    cdef Placement request
    cdef Prices prices
    cdef Scratch* s = &core.scratch
    cdef Terms* terms
    cdef Row* row
    cdef const Cost* cost
    cdef double live, observed, decode
    cdef uint32_t i
    view_tokens(token_ids, &view)
    try:
        space = core.tree.key_of(namespace)
        core.begin(&request, &view, space, max_new_tokens, now)
        request.of_session = of_session
        core.loads.advance(now)
        clear_scratch(s)
        s.workers = core.tree.t.worker_end
        prices = core.prices(&request, core.gather(s, &request))
        rows = []
        for index in workers:
            i = index
            core.tree.need_worker(i)
            row = &core.loads.rows[i]
            cost = row.cost
            terms = &s.terms[i]
            core.size_up(terms, i, s.held[i], request.count)
            load(terms, s, i)
            core.weigh(terms, i, &request, &prices)
            live = row.live_requests
            decode = prices.output_tokens * token_seconds(cost, request.count + 0.5 * prices.output_tokens, live + 1.0)
            observed = min(core.loads.window_seconds, max(core.loads.join_seconds, now - row.joined_at))
            rows.append((i, row.live_requests, terms.usable, terms.load, terms.prefill, terms.loading, terms.queue,
                         terms.eviction, terms.balance, prices.context_seconds * request.count * live, terms.decode,
                         decode, core.loads.workers[i].window.prefill_ns * 1e-9 / observed))
        clear_scratch(s)
        return request.count, prices.longest, rows
    finally:
        release_tokens(&view)


def book_half(DecisionCore core not None, uint32_t worker, token_ids, object request_id, object namespace,
              int64_t max_new_tokens, double now, *, bint decodes, str reason) -> Decision:
    """Book one half on a worker, that of the decode if it `decodes`. Raises DuplicateRequest, QueueFull, InvalidTokens,
    UnknownWorker, MemoryError; then nothing is booked."""
    cdef TokenView view
    cdef Placement request
    cdef Choice choice
    cdef Decision decision
    view_tokens(token_ids, &view)
    try:
        space = core.tree.key_of(namespace)
        key = dict_key(core.leases, request_id)
        core.tree.need_worker(worker)
        core.begin(&request, &view, space, max_new_tokens, now)
        core.loads.advance(now)
        core.size_up_one(&request, worker)
        memset(&choice, 0, sizeof(Choice))
        choice.worker = worker
        choice.credited = NONE
        choice.reason = EXPLORE
        use(&choice, &core.scratch.terms[worker])
        core.need_room(key)
        core.leases[key] = PENDING               # from here on no code of users runs
        try:
            decision = core.booked(&request, &choice, request_id, key, space, reason, None)
        except BaseException:
            core.leases.pop(key, None)
            raise
        if decodes:
            begin_decode(core, core.loads.lease_of(choice.lease), now)
        return decision
    finally:
        release_tokens(&view)


cdef int begin_decode(DecisionCore core, Lease* lease, double now) except -1:
    """No prefill of a booking waits on its worker, and no first token of it says how fast that one prefills. Nor is the
    prompt cached there yet: if it prefills as well, who shares the prompt would be sent there and compute it again."""
    cdef Row* row = &core.loads.rows[lease.worker]
    cdef uint32_t key = core.tree.t.workers[lease.worker].key
    cdef double working_since = load_double(&row.working_since)
    if lease.share:
        core.groups.corrected(lease, -lease.prefill_ns, 0)
    core.loads.correct_prefill(lease, 0)
    core.loads.prefilled(lease, now)
    store_double(&row.working_since, working_since)
    lease.first_at = lease.began_at = INFINITY   # until `decode_began`; of an end before that nothing is learned
    if load32(&row.eligible) and core.is_remembered(lease):
        take_back(&core.tree.t, lease.leaf, key, confirmed_tokens(&core.tree.t, core.leaf_walk(lease), key),
                  lease.booked_at, now)
    return 0


def decode_to_begin(DecisionCore core not None, object key, double now) -> None:
    """A live request that was booked like any other is decoded by its worker, and no more. `key`: its key."""
    cdef Lease* lease = core.live_lease(core.lease_key(key))
    if lease != NULL and core.loads.is_current(lease) and not lease.prefilled:
        begin_decode(core, lease, now)


def decode_began(DecisionCore core not None, object key, double now) -> None:
    """The worker of a decode half has its KV, and its first token came from there: what it caches of the prompt is
    known now, and its decoding is measured from here. `key`: a live request's."""
    cdef Lease* lease = core.live_lease(core.lease_key(key))
    cdef WorkerSamples* samples
    if lease == NULL or not core.loads.is_current(lease) or not isinf(lease.first_at):
        return
    lease.first_at = lease.began_at = now
    lease.first_decodes = load32(&core.loads.rows[lease.worker].live_requests)
    if core.timings is not None:
        samples = core.timings.at[lease.worker]
        lease.seen_tokens = samples.prefilled_tokens
        lease.seen_moments = samples.moments
    if core.is_remembered(lease):
        core.remark(lease, now)
    if core.is_remembered(lease):
        confirm_path(&core.tree.t, lease.leaf, core.tree.t.workers[lease.worker].key)


def give_back_half(DecisionCore core not None, object key, double now) -> bool:
    """Give the booking of a half back, which nobody but its pair follows. False if it is not live. Raises nothing."""
    if key not in core.leases or core.cancelled(core.lease_key(key), now) == LATE:
        return False
    del core.leases[key]
    return True
