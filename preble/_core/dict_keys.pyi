"""Types of the keys of dictionaries; what they are is said in `dict_keys.pyx`."""

from collections.abc import Hashable
from typing import Any

class HashedKey:
    value: Hashable
    def __hash__(self) -> int: ...

def find_key(table: dict[Any, Any], value: Hashable) -> Hashable: ...
def key_value(key: Hashable) -> Hashable: ...
