"""Whether a worker takes over KV that another one caches."""
