"""Preble with Ray. Owns what a router of other people needs around a `GlobalScheduler`, and workers on their clusters.

ray_serve      the request router that Ray Serve loads       prompts    a request's token ids, read off the event loop
replicas       the scheduler and the bookings of a deployment's replicas
replica_events the cache events that replicas publish
exchange       what the routers of one deployment report to each other
ray_workers    `preble worker`s on a Ray cluster, and their routers     ray_actor, ray_guard   what runs on its nodes
ray_up         `preble up --on ray`                                     autoscale   when to follow the scaling advice
"""
