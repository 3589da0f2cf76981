# What a scheduler answers: contents of `decision.pyx`.

from libc.stdint cimport uint32_t

from preble._radix cimport Held

cdef class Decision:
    cdef readonly object request_id
    cdef readonly str worker
    cdef readonly uint32_t matched_tokens
    cdef readonly uint32_t prompt_tokens
    cdef readonly str reason
    cdef readonly object costs

cdef Decision new_decision(object request_id, str worker, uint32_t matched, uint32_t prompt, str reason, object costs)

cdef class Match:
    cdef readonly uint32_t prompt_tokens
    cdef readonly uint32_t known_tokens
    cdef tuple names
    cdef Held held
    cdef dict by_name
