"""The router: sends what a `GlobalScheduler` decides to workers, and their answers back. Not for several threads.

`router` is the one that users hold and conducts; `fleet` has the workers and what they report, `request` one request on
its way, `peer_requests` what other routers do, `warm_ups` prefixes that are computed before anybody asks.
"""

from ..scheduling.flow_control import FlowConfig as FlowConfig
from .router import Router as Router
from .router import RouterConfig as RouterConfig
