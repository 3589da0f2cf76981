"""The text of a server's /metrics. Owns how samples are read from it: each byte is looked at a few times at the most,
whatever the text is, and there are no more samples than were asked for.

    vllm:num_requests_running{engine="0",model_name="m"} 3.0      name, labels, value

A line that has none of the names, or is no sample, is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from ...errors import ProtocolError

LABELS_MAX = 64  # of a sample
# Tried at one place only, and of one meaning at each byte, so a text that does not fit is left in linear time.
_LABEL = re.compile(r'[ \t]*([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*,?[ \t]*')


class MetricsSample(NamedTuple):
    """A line of /metrics. `value`: as it was written."""

    name: str
    labels: dict[str, str]
    value: str


def samples(text: str, names: Collection[str], samples_max: int) -> Iterator[MetricsSample]:
    """The samples of these names, in order. Raises `ProtocolError` at one more than `samples_max`."""
    starts, found, at = tuple(names), 0, 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        sample = _sample(text, at, end, names) if text.startswith(starts, at, end) else None
        if sample is not None:
            found += 1
            if found > samples_max:
                raise ProtocolError(f"/metrics has more than {samples_max} samples of {', '.join(sorted(names))}")
            yield sample
        at = end + 1


def _sample(text: str, at: int, end: int, names: Collection[str]) -> MetricsSample | None:
    """The sample of one line, None if it is none of these names."""
    opened = text.find("{", at, end)
    close = opened if opened >= 0 else text.find(" ", at, end)
    name = text[at : max(close, at)].strip()
    if name not in names:
        return None
    labels: dict[str, str] = {}
    if opened >= 0:
        close = _read_labels(text, opened + 1, end, labels)
        if close < 0:
            return None
    value = text[close + 1 : end].split(maxsplit=1)
    return MetricsSample(name, labels, value[0]) if value else None


def _read_labels(text: str, at: int, end: int, labels: dict[str, str]) -> int:
    """Read labels into `labels`; returns where the brace closes, -1 if it does not."""
    for _ in range(LABELS_MAX + 1):
        if text.startswith("}", at, end):
            return at
        label = _LABEL.match(text, at, end)
        if label is None:
            return -1
        labels[label[1]] = label[2]
        at = label.end()
    return -1
