"""One decision, compiled: the E2 rule, prefix groups, redirects, bookings, and the request API on top of them."""
