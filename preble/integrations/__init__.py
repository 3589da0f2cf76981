"""Preble inside other people's routers. Owns what such a router needs around a `GlobalScheduler`.

ray_serve      the request router that Ray Serve loads       prompts    a request's token ids, read off the event loop
replicas       the scheduler and the books of a deployment's replicas
replica_events the cache events that replicas publish
"""
