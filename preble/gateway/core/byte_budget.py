"""How many bytes of bodies there may be at a time. Owns the count; who holds bytes, and for how long, is its users'."""

from __future__ import annotations

from .http_errors import unavailable

SMALL_BYTES = 64 << 10  # of each body these are not counted: large ones never keep small ones out


class ByteBudget:
    """Bytes that are held now, at most `bytes_max`. Belongs to one asyncio loop."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_used = 0

    def share(self) -> ByteShare:
        """What one body holds: nothing yet. A context manager that gives it back."""
        return ByteShare(self)


class ByteShare:
    """What one body holds."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._held = 0

    def hold(self, total: int) -> None:
        """Hold as much as a body of `total` bytes does. Raises `ApiError` 503 beyond the bound, and holds nothing from
        then on: what is refused makes room at once for others that come. One body alone is always let in."""
        budget = self._budget
        more = max(0, total - SMALL_BYTES) - self._held
        others = budget.bytes_used - self._held
        if more > 0 and others > 0 and budget.bytes_used + more > budget.bytes_max:
            self.give_back()
            raise unavailable(
                f"bodies of {budget.bytes_max} bytes are being read, the bound of this gateway", "queue_full"
            )
        if more > 0:
            budget.bytes_used += more
            self._held += more

    def give_back(self) -> None:
        """Hold nothing any more."""
        self._budget.bytes_used -= self._held
        self._held = 0

    def __enter__(self) -> ByteShare:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_back()
