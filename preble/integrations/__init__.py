"""Preble with Ray. Owns what a router of other people needs around a `GlobalScheduler`, and workers on their clusters.

ray_serve           the request router that Ray Serve loads
prompt_extractors   a request's token ids, read off the event loop
replica_scheduler   the scheduler and the bookings of a deployment's replicas; their cache events: `replica_events`
booking_exchange    what the routers of one deployment report to each other
ray_workers         `preble worker`s on a Ray cluster, and their routers; on its nodes: `ray_actor`, `ray_watchdog`
autoscale           when to follow the scaling advice
"""
