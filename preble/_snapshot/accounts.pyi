"""Types of a scheduler's compiled state in a snapshot; what it owns is said in `accounts.pyx`."""

from .._cost import CostModel
from .._placement.bookings import DecisionCore
from .._placement.request_api import RequestApi
from ..types import WorkerSpec
from .codec import Reader, Writer

def layout() -> tuple[int, ...]: ...
def write_core(w: Writer, calls: RequestApi) -> None: ...
def read_core(
    r: Reader, calls: RequestApi, specs: list[WorkerSpec | None], costs: list[CostModel | None], now: float
) -> None: ...
def cost_at(core: DecisionCore, worker: int) -> CostModel: ...
