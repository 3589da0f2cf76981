"""Fleets: a thousand workers, many routers, workers that join and leave, in simulation or in part."""
