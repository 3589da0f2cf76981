"""The supervisor's decisions with a clock and children of the test's own; devices, logs and options without a process.

Real processes are in `cli/test_up`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import preble
from preble import ManualClock, cli
from preble.cli import up
from preble.errors import InsecureBind, InvalidConfig
from preble.launch import processes
from preble.launch.processes import LogBook, Place, parse_places, preble_command
from preble.launch.supervisor import Happening, Supervisor, SupervisorConfig
from preble.transport.security import create_keys

CONFIG = SupervisorConfig(
    restart_min_seconds=1.0,
    restart_max_seconds=6.0,
    max_restarts=5,
    stable_seconds=60.0,
    start_seconds=100.0,
    drain_seconds=30.0,
    hurry_seconds=2.0,
)


class FakeChild:
    """A process that ends when the test says so, or is killed."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.ready_line = ""
        self.signals: list[int] = []
        self.asked = 0
        self.killed = 0

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.asked += 1

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.killed += 1
        if self.code is None:
            self.code = -9


class World:
    """A supervisor, its clock, and every child it has started."""

    def __init__(self, count: int = 1, config: SupervisorConfig = CONFIG) -> None:
        self.clock = ManualClock()
        self.started: list[tuple[int, FakeChild]] = []
        self.spawn_error: OSError | None = None
        self.supervisor = Supervisor(count, self.spawn, config, clock=self.clock)

    def spawn(self, number: int) -> FakeChild:
        if self.spawn_error is not None:
            raise self.spawn_error
        child = FakeChild()
        self.started.append((number, child))
        return child

    @property
    def last(self) -> FakeChild:
        return self.started[-1][1]

    def turn(self, seconds: float = 0.0) -> list[str]:
        self.clock.advance(seconds)
        return [happening.kind for happening in self.supervisor.turn()]

    def make_ready(self, seconds: float = 0.0) -> FakeChild:
        """Start what is due and let the newest child say that it serves."""
        assert "started" in self.turn(seconds)
        number, child = self.started[-1]
        child.ready_line = "READY here"
        assert self.supervisor.turn() == [Happening(number, "ready", "READY here")]
        return child

    def states(self) -> list[str]:
        return [slot.state for slot in self.supervisor.slots]


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_every_worker_is_started_once_and_then_left_alone() -> None:
    world = World(3)
    assert world.turn() == ["started"] * 3
    assert [number for number, _ in world.started] == [0, 1, 2]
    assert world.turn(50.0) == [] and world.states() == ["starting"] * 3


def test_a_crashed_worker_waits_twice_as_long_each_time_up_to_the_bound() -> None:
    world = World()
    waited = []
    world.turn()
    while "gave_up" not in world.states():
        world.last.code = 1
        world.turn()
        starts, seconds = len(world.started), 0.0
        while len(world.started) == starts and world.states() == ["waiting"]:
            seconds += 0.5
            world.turn(0.5)
        waited.append(seconds)
    assert waited == [1.0, 2.0, 4.0, 6.0, 6.0, 0.0]


def test_a_worker_that_keeps_crashing_is_given_up_for_all_to_see_and_the_others_go_on() -> None:
    world = World(2, CONFIG)
    news: list[Happening] = []
    world.turn()
    healthy = world.started[1][1]
    healthy.ready_line = "READY"
    for _ in range(200):
        for number, child in world.started:
            if number == 0:
                child.code = 1
        world.clock.advance(1.0)
        news += world.supervisor.turn()
    assert [n for n, _ in world.started].count(0) == 1 + CONFIG.max_restarts
    assert world.states()[0] == "gave_up" and news[-1].kind == "gave_up"
    assert "exit code 1; given up: 6 times in a row" in news[-1].text
    assert healthy.poll() is None and not healthy.asked
    assert not world.supervisor.done and not world.supervisor.clean


def test_a_worker_that_ran_long_enough_starts_its_count_afresh() -> None:
    world = World()
    for _ in range(3 * CONFIG.max_restarts):
        child = world.make_ready(10.0)
        world.turn(CONFIG.stable_seconds)
        child.code = 1
        world.turn()
    assert world.states() == ["waiting"]
    assert world.supervisor.slots[0].failures == 1


def test_a_worker_that_never_lasts_is_given_up_though_it_gets_ready() -> None:
    world = World()
    for _ in range(CONFIG.max_restarts + 1):
        world.make_ready(10.0).code = 1
        world.turn(CONFIG.stable_seconds / 2)
    assert world.states() == ["gave_up"]


def test_wrong_usage_is_not_tried_again() -> None:
    world = World()
    world.turn()
    world.last.code = 2
    assert world.turn() == ["gave_up"]
    assert world.turn(1000.0) == [] and len(world.started) == 1
    assert world.supervisor.done


def test_a_worker_that_left_by_itself_comes_back() -> None:
    world = World()
    world.make_ready().code = 0
    assert world.turn() == ["exited"]
    assert world.turn(1.0) == ["started"]


def test_what_cannot_be_started_counts_as_a_crash() -> None:
    world = World()
    world.spawn_error = OSError("no such file")
    kinds = [kind for _ in range(100) for kind in world.turn(1.0)]
    assert kinds == ["exited"] * CONFIG.max_restarts + ["gave_up"]


def test_a_start_that_takes_too_long_is_killed_and_tried_again() -> None:
    world = World()
    world.turn()
    slow = world.last
    assert world.turn(CONFIG.start_seconds - 0.1) == []
    assert world.turn(0.1) == ["killed"] and slow.killed
    assert world.turn() == ["exited"]
    world.make_ready(1.0)
    assert world.turn(10 * CONFIG.start_seconds) == [], "a ready worker may take as long as it likes"
    assert world.supervisor.clean


def test_what_a_dead_worker_had_started_is_swept_before_the_next_start() -> None:
    world = World()
    child = world.make_ready()
    child.code = -11
    world.turn()
    assert child.killed == 1


def test_a_late_word_of_an_earlier_life_makes_nobody_ready() -> None:
    world = World()
    world.turn()
    old = world.last
    old.code = 1
    world.turn()
    world.turn(1.0)
    old.ready_line = "READY there"
    assert world.turn() == [] and world.states() == ["starting"]
    world.last.ready_line = "READY here"
    assert world.turn() == ["ready"] and world.turn() == []


def test_a_signal_goes_to_the_children_that_serve() -> None:
    world = World(2)
    world.turn()
    (_, serving), (_, starting) = world.started
    serving.ready_line = "READY here"
    world.turn()
    world.supervisor.signal(1)
    assert serving.signals == [1] and starting.signals == []


# --- draining ---------------------------------------------------------------------------------------------------------


def test_a_drain_asks_each_worker_once_and_waits_for_all() -> None:
    world = World(2)
    world.turn()
    for _, child in world.started:
        child.ready_line = "READY"
    world.turn()
    world.supervisor.drain()
    assert [child.asked for _, child in world.started] == [1, 1]
    world.started[0][1].code = 0
    assert world.turn(1.0) == ["stopped"] and not world.supervisor.done
    world.started[1][1].code = 0
    assert world.turn(1.0) == ["stopped"] and world.supervisor.done and world.supervisor.clean


def test_a_drain_by_a_signal_is_that_signal_for_those_that_have_served() -> None:
    world = World(2)
    world.turn()
    (_, serving), (_, starting) = world.started
    serving.ready_line = "READY here"
    world.turn()
    world.supervisor.drain(2)
    world.supervisor.drain(2)
    assert (serving.signals, serving.asked) == ([2, 2], 0), "the second time, too"
    assert (starting.signals, starting.asked) == ([], 2), "it may not know yet what the signal means"


def test_a_drain_starts_nothing_that_was_waiting() -> None:
    world = World()
    world.make_ready().code = 1
    world.turn()
    world.supervisor.drain()
    assert world.supervisor.done and world.turn(100.0) == [] and len(world.started) == 1


def test_a_drain_that_takes_too_long_ends_with_a_kill_and_is_not_clean() -> None:
    world = World()
    child = world.make_ready()
    world.supervisor.drain()
    assert world.turn(CONFIG.drain_seconds - 0.1) == []
    assert world.turn(0.1) == ["killed"] and world.turn() == ["stopped"]
    assert child.killed and world.supervisor.done and not world.supervisor.clean


def test_the_second_drain_is_at_once() -> None:
    world = World()
    child = world.make_ready()
    world.supervisor.drain()
    world.turn(1.0)
    world.supervisor.drain()
    assert child.asked == 2
    assert world.turn(CONFIG.hurry_seconds) == ["killed"]


def test_more_drains_do_not_put_the_end_off() -> None:
    world = World()
    world.make_ready()
    world.supervisor.drain()
    world.turn(CONFIG.drain_seconds - 1.0)
    world.supervisor.drain()
    assert world.turn(1.0) == ["killed"]


def test_a_worker_drained_before_it_served_may_end_as_it_likes() -> None:
    world = World()
    world.turn()
    world.supervisor.drain()
    world.last.code = -15
    assert world.turn() == ["stopped"] and world.supervisor.clean


def test_a_worker_that_fails_while_it_drains_is_not_clean() -> None:
    world = World()
    child = world.make_ready()
    world.supervisor.drain()
    child.code = 1
    world.turn()
    assert world.supervisor.done and not world.supervisor.clean


def test_kill_ends_every_child_and_nothing_follows() -> None:
    world = World(2)
    world.turn()
    world.supervisor.kill()
    world.turn(100.0)
    assert [child.killed for _, child in world.started] and len(world.started) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"restart_min_seconds": 0.0},
        {"restart_max_seconds": 0.5},
        {"max_restarts": -1},
        {"stable_seconds": 0.0},
        {"start_seconds": float("nan")},
        {"drain_seconds": -1.0},
    ],
)
def test_wrong_times_are_named(change: dict[str, float]) -> None:
    values = {name: getattr(CONFIG, name) for name in SupervisorConfig.__slots__}
    with pytest.raises(InvalidConfig, match=f"SupervisorConfig.*{next(iter(change))}"):
        SupervisorConfig(**{**values, **change})


# --- places and logs --------------------------------------------------------------------------------------------------


def test_places_are_one_for_each_worker() -> None:
    assert parse_places("cuda:0,cuda:1+2", 2) == [Place("cuda", (0,)), Place("cuda", (1, 2))]
    assert parse_places("cuda:1+2", 1)[0].environment == {"CUDA_VISIBLE_DEVICES": "1,2"}
    core = min(os.sched_getaffinity(0))
    assert parse_places(f"cpu:{core}", 1) == [Place("cpu", (core,))]
    assert parse_places(f"cpu:{core}", 1)[0].environment == {}


@pytest.mark.parametrize("text", ["cuda:0", "cuda:0,gpu:1", "cuda:0,cuda:", "cuda:0,cuda:x", "0,1", "cuda:0,cpu:99999"])
def test_wrong_places_are_named(text: str) -> None:
    with pytest.raises(InvalidConfig, match="--devices"):
        parse_places(text, 2)


def test_logs_have_a_prefix_in_the_stream_and_bounded_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOG_FILE_BYTES", 1000)
    logs = LogBook(["worker-0", "worker-1"], tmp_path / "logs", stream=sys.stderr)
    for number in range(1000):
        logs.write("worker-0", f"line {number} of many")
    logs.write("worker-1", "the only one, 100 % of them")
    with logs.including("up", logging.Formatter("%(message)s")):
        logging.getLogger("preble.up").warning("the launcher's own")
    logging.getLogger("preble.up").warning("too late")
    logs.close()
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "[worker-0] line 0 of many" and shown[-1] == "[worker-1] the only one, 100 % of them"
    files = sorted(file.name for file in (tmp_path / "logs").iterdir())
    assert files == ["up.log", "worker-0.log", *(f"worker-0.log.{n}" for n in range(1, 5)), "worker-1.log"]
    assert all(file.stat().st_size <= 1000 for file in (tmp_path / "logs").iterdir())
    assert (tmp_path / "logs/up.log").read_text() == "the launcher's own\n"
    assert (tmp_path / "logs/worker-0.log").read_text().endswith("line 999 of many\n")


def test_a_log_directory_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="--log-dir"):
        LogBook(["worker-0"], tmp_path / "file")


def test_an_endless_line_is_cut_and_the_pipe_stays_empty() -> None:
    reader, writer = os.pipe()
    lines: list[str] = []
    thread = processes._reader(os.fdopen(reader, "rb"), lines.append)
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(b"x" * (3 * processes.LINE_BYTES) + b"\n\n\xff\nlast")
    thread.join(30.0)
    assert [len(line) for line in lines] == [processes.LINE_BYTES] * 3 + [1, 4]


# --- options ----------------------------------------------------------------------------------------------------------


def plan_of(*arguments: str) -> up.UpPlan:
    """The plan of `preble up ARGUMENTS...`."""
    words = ["up", *arguments]
    return up.make_plan(cli.build_parser(words).parse_args(words))


def test_a_plan_passes_options_on_and_gives_each_worker_an_address() -> None:
    plan = plan_of(
        "--engine", "simulated", "--workers", "2", "--port", "7000", "--model", "m", "--", "--time-scale", "0.5"
    )
    assert plan.binds == (
        ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"),
        ("tcp://127.0.0.1:7002", "tcp://127.0.0.1:7003"),
    )
    words = plan.worker_arguments(plan.binds[1])
    assert words[:5] == [
        "--bind",
        "tcp://127.0.0.1:7002",
        "--events-bind",
        "tcp://127.0.0.1:7003",
        "--until-stdin-closes",
    ]
    assert words[-2:] == ["--time-scale", "0.5"] and {"simulated", "m"} <= set(words)


def test_the_time_to_drain_is_the_workers_own_and_some() -> None:
    plan = plan_of("--engine", "simulated", "--", "--drain-seconds", "100")
    assert plan.supervisor.drain_seconds > 100.0


def test_ipv6_hosts_get_brackets() -> None:
    assert plan_of("--engine", "simulated", "--host", "::1").binds == (("tcp://[::1]:*", ""),)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--workers", "0"], "--workers"),
        (["--concurrency", "0"], "--concurrency"),
        (["--status-seconds", "-1"], "--status-seconds"),
        (["--workers", "3", "--port", "65532"], "worker 2 would need ports 65536"),
        (["--max-restarts", "-1"], "max_restarts"),
        (["--", "--bind", "tcp://127.0.0.1:5"], "--bind is not for"),
        (["--", "--id", "same-for-all"], "--id is not for"),
        (["--", "--insecure"], "--insecure is not for"),
        (["--workers", "2", "--max-workers", "8"], "--max-workers needs --on ray"),
    ],
)
def test_wrong_options_are_named_before_anything_starts(arguments: list[str], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        plan_of("--engine", "simulated", *arguments)


def test_wrong_worker_options_are_wrong_usage_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--engine", "abacus"], ["--engine", "simulated", "--", "--no-such-option"]):
        with pytest.raises(SystemExit) as stop:
            plan_of(*arguments)
        assert stop.value.code == 2
    assert "abacus" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "fleet.example"])
def test_up_refuses_to_bind_beyond_loopback_without_keys(host: str, tmp_path: Path) -> None:
    with pytest.raises(InsecureBind, match="without keys"):
        plan_of("--engine", "simulated", "--host", host)
    assert plan_of("--engine", "simulated", "--host", host, "--insecure").keys is None
    create_keys(tmp_path)
    assert plan_of("--engine", "simulated", "--host", host, "--curve-keys", str(tmp_path)).keys is not None


def test_up_without_its_keys_says_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="server.key_secret"):
        plan_of("--engine", "simulated", "--curve-keys", str(tmp_path))


@pytest.mark.parametrize(
    ("bound", "found"),
    [
        ("tcp://0.0.0.0:5001", "tcp://127.0.0.1:5001"),
        ("tcp://[::]:5001", "tcp://[::1]:5001"),
        ("tcp://10.1.2.3:5001", "tcp://10.1.2.3:5001"),
    ],
)
def test_the_router_finds_workers_behind_a_wildcard(bound: str, found: str) -> None:
    assert up.reachable(bound) == found


def test_a_worker_runs_this_preble_also_where_the_directory_has_another(tmp_path: Path) -> None:
    (tmp_path / "preble").mkdir()
    (tmp_path / "preble" / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    done = subprocess.run([*preble_command(), "--version"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"preble {preble.__version__}\n"), done.stderr
    direct = [sys.executable, "-m", "preble.cli", "--version"]
    assert "the wrong one" in subprocess.run(direct, cwd=tmp_path, capture_output=True, text=True, check=False).stderr
