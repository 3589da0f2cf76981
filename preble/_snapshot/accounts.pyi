"""Types of a scheduler's compiled state in a snapshot; what it owns is said in `_snapshot/accounts.pyx`."""

from .._cost import CostModel
from .._placement.bookings import DecisionCore
from .._placement.request_api import RequestCalls
from ..types import WorkerSpec
from .codec import Reader, Writer

def layout() -> tuple[int, ...]: ...
def write_core(w: Writer, calls: RequestCalls) -> None: ...
def read_core(
    r: Reader, calls: RequestCalls, specs: list[WorkerSpec | None], costs: list[CostModel | None], now: float
) -> None: ...
def cost_at(core: DecisionCore, worker: int) -> CostModel: ...
