"""The text of /metrics: what is read, and that no text costs more than its length. Owns the texts; how work is counted
is said at `steps`."""

from __future__ import annotations

import asyncio
import random
import re
import sys
import threading
from typing import Any

import pytest

from preble.errors import ProtocolError
from preble.transport.engine_servers import http_client, metrics_text
from preble.transport.engine_servers.http_client import EngineServer
from preble.transport.engine_servers.metrics_text import LABELS_MAX, samples
from preble.transport.engine_servers.server_info import RANKS_MAX, ServerOptions, vllm_info
from tests.support.attach import FakeServer
from tests.support.transport import asynchronous

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
CACHE = "vllm:cache_config_info"
MODELS = {"data": [{"id": "tiny", "max_model_len": 4096}]}


def read(text: str, *names: str, most: int = 1000) -> list[tuple[str, dict[str, str], str]]:
    return [tuple(sample) for sample in samples(text, names or (RUNNING,), most)]


def test_samples_are_read_with_their_labels() -> None:
    text = (
        "# HELP vllm:num_requests_running how many\n"
        f'{RUNNING}{{engine="0",model_name="a\\"b}}c"}} 3.0\n'
        f'{RUNNING}_total{{engine="0"}} 9\n'
        f'{RUNNING}{{ engine = "1" , }} 4 1700000000\n'
        f"{WAITING} 5\n"
        f'{RUNNING}{{engine="2"'
    )
    assert read(text) == [
        (RUNNING, {"engine": "0", "model_name": 'a\\"b}c'}, "3.0"),
        (RUNNING, {"engine": "1"}, "4"),
    ]
    assert read(text, WAITING) == [(WAITING, {}, "5")]
    assert read(text, "nothing") == []


@pytest.mark.parametrize(
    "line",
    ["", "{", "{}", "{} ", '{a="b" 3', '{a="b}} 3', "{a=b} 3", '{="b"} 3', '{a="b"}', " ", "{" + 'a="b",' * 65 + "} 1"],
)
def test_a_line_that_is_no_sample_is_passed_over(line: str) -> None:
    assert read(f"{RUNNING}{line}\n{RUNNING} 1\n") == [(RUNNING, {}, "1")]
    assert LABELS_MAX < 65


def test_more_samples_than_asked_for_are_an_error() -> None:
    assert len(read(f"{RUNNING} 1\n" * 8, most=8)) == 8
    with pytest.raises(ProtocolError, match="more than 8 samples of vllm:num_requests_running"):
        read(f"{RUNNING} 1\n" * 9, most=8)


class Counted(str):
    """A text that counts how many characters its own methods may look at."""

    looked = 0

    def find(self, *place: Any) -> int:
        found = str.find(self, *place)
        end = place[2] if len(place) > 2 else len(self)
        self.looked += (found if found >= 0 else end) - place[1]
        return found

    def __getitem__(self, part: Any) -> str:
        taken = str.__getitem__(self, part)
        self.looked += len(taken)
        return taken


class CountedPattern:
    """The pattern for labels, that counts what it was given: what is matched, or all that it may look at."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern, self.looked = pattern, 0

    def match(self, text: str, at: int, end: int) -> re.Match[str] | None:
        found = self.pattern.match(text, at, end)
        self.looked += (found.end() if found else end) - at
        return found


HOSTILE = {
    "braces that never close": lambda n: (RUNNING + "{") * n,
    "labels that never end": lambda n: RUNNING + '{engine="' * n,
    "engines that never end": lambda n: RUNNING + "{" + 'engine="1"' * n,
    "labels without number": lambda n: RUNNING + "{" + 'a="1",' * n,
    "escapes": lambda n: RUNNING + '{a="' + "\\" * n,
    "words": lambda n: RUNNING + "{" + "a" * n,
    "lines": lambda n: (RUNNING + "{a\n") * n,
    "blanks": lambda n: RUNNING + "{" + " " * n,
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_twice_the_text_is_twice_the_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: 40 KiB of these held the loop for 3 s, 82 KiB for 58 s."""
    looked = []
    for times in (2000, 4000, 8000):
        pattern = CountedPattern(metrics_text._LABEL)
        monkeypatch.setattr(metrics_text, "_LABEL", pattern)
        text = Counted(HOSTILE[name](times))
        assert read(text) == []
        looked.append((text.looked + pattern.looked) / len(text))
        monkeypatch.undo()
    assert max(looked) < 10 and looked[2] < 1.5 * looked[0] + 1


def test_the_pattern_for_labels_never_looks_back() -> None:
    """Of each hostile label nothing is read twice: with the closing quote far away, one look costs its length."""
    rng = random.Random(5)
    for _ in range(200):
        text = "".join(rng.choice('a"\\=, {}') for _ in range(60))
        found = metrics_text._LABEL.match(text)
        assert found is None or re.fullmatch(r'[ \t]*\w+[ \t]*=[ \t]*"(?:[^"\\]|\\.)*"[ \t]*,?', found[0])


# --- what becomes of it -----------------------------------------------------------------------------------------------


def cache_lines(count: int) -> str:
    return "".join(f'{CACHE}{{engine="{n}",block_size="4",num_gpu_blocks="100"}} 1.0\n' for n in range(count))


def test_a_server_has_no_more_ranks_than_may_be() -> None:
    """Regression: 3,000 lines made 3,000 workers, 1.4 GB and 17 s without an answer."""
    asked: tuple[Any, ...] = ("http://engine", MODELS)
    assert vllm_info(*asked, cache_lines(RANKS_MAX), {}, "1", ServerOptions()).ranks == RANKS_MAX
    with pytest.raises(ProtocolError, match=f"more than {RANKS_MAX} samples"):
        vllm_info(*asked, cache_lines(RANKS_MAX + 1), {}, "1", ServerOptions())


@pytest.mark.parametrize("data", [5, "tiny", {"id": "tiny"}, [5], None])
def test_models_that_are_no_list_of_objects_are_a_typed_error(data: Any) -> None:
    with pytest.raises(ProtocolError, match="/v1/models"):
        vllm_info("http://engine", {"data": data}, "", {}, "1", ServerOptions())


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e400", "x", "9" * 5000, "1e300"])
def test_loads_that_are_no_number_of_requests_are_none(value: str) -> None:
    text = f'{RUNNING}{{engine="0"}} {value}\n{WAITING}{{engine="0"}} 2\n{WAITING}{{engine="{"9" * 5000}"}} 2\n'
    (load,) = http_client._vllm_loads(text.encode(), 100)
    assert load.waiting == 2 and 0 <= load.running <= 2**31 - 1


@asynchronous
async def test_metrics_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await FakeServer("vllm").start()
    readers: list[threading.Thread] = []

    def noting(*asked: Any) -> Any:
        readers.append(threading.current_thread())
        return samples(*asked)

    for module in ("http_client", "server_info"):
        monkeypatch.setattr(sys.modules[f"preble.transport.engine_servers.{module}"], "samples", noting)
    async with EngineServer(server.url) as client:
        await client.info()
        await client.load()
    await server.kill()
    assert len(readers) >= 2 and threading.main_thread() not in readers
    assert asyncio.get_running_loop().is_running()


@pytest.mark.parametrize("count", [RANKS_MAX, RANKS_MAX + 1])
def test_loads_of_more_ranks_than_may_be_are_refused(count: int) -> None:
    answer = {"loads": [{"dp_rank": n} for n in range(count)]}
    if count <= RANKS_MAX:
        assert len(http_client._sglang_loads(answer)) == count
    else:
        with pytest.raises(ProtocolError, match="/v1/loads"):
            http_client._sglang_loads(answer)
