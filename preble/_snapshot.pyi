"""Types of a scheduler's compiled state in a snapshot; what it owns is said in `_snapshot.pyx`."""

from ._booking import DecisionCore
from ._cost import CostModel
from ._hot import RequestCalls
from ._snapshot_bytes import Reader, Writer
from .types import WorkerSpec

def layout() -> tuple[int, ...]: ...
def write_core(w: Writer, calls: RequestCalls) -> None: ...
def read_core(
    r: Reader, calls: RequestCalls, specs: list[WorkerSpec | None], costs: list[CostModel | None], now: float
) -> None: ...
def cost_at(core: DecisionCore, worker: int) -> CostModel: ...
