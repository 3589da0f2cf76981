"""Whether a worker takes over KV that another one caches: the price (`price`), how long that takes (`link_times`)."""
