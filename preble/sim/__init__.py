"""Discrete-event simulation of a fleet: real schedulers, simulated engines, a virtual clock. Owns nothing itself.

from preble import sim, workloads
workload = workloads.poisson(workloads.generate("toolbench", requests=2000, groups=200, seed=0), rps=8, seed=0)
result = sim.simulate(workload, sim.SimConfig(workers=2, policy="e2"))
print(result.summary())
"""

from .config import KvLink as KvLink
from .config import SimConfig as SimConfig
from .config import WorkerDeath as WorkerDeath
from .config import WorkerDrain as WorkerDrain
from .config import WorkerJoin as WorkerJoin
from .config import WorkerSlowdown as WorkerSlowdown
from .results import Result as Result
from .results import Summary as Summary
from .simulation import Simulation as Simulation
from .simulation import simulate as simulate
