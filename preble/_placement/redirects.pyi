"""Types of the redirects; what they own is said in `redirects.pyx`."""

from .._radix import RadixTree

RedirectRow = tuple[int, int, int, int | None, int, tuple[int, ...]]

class Redirects:
    tree: RadixTree
    count: int
    def put(self, redirects: list[RedirectRow]) -> None: ...
    def show(self) -> list[RedirectRow]: ...
    def check(self) -> None: ...
