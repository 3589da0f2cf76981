"""The transport between routers and workers: messages (`wire`), keys (`security`), event order (`event_stream`), and
the two ends of a connection (`server` in the worker, `client` in the router). Owns sockets and bytes; knows neither
engines nor scheduling.
"""
