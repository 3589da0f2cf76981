"""`preble keygen`, and the list of clients that a running worker goes by: added and removed while it serves."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from preble import SamplingParams, cli
from preble.errors import HandshakeRefused, NoWorkers
from preble.router import Router
from preble.transport.security import AllowList, create_keys, load_client_keys, load_server_keys
from tests.support.transport import WorkerProcess, asynchronous, collect, expected_tokens, fast


def keygen(*arguments: str) -> int:
    """`preble keygen ARGUMENTS...`."""
    return cli.main(["keygen", *arguments])


def files_of(root: Path) -> dict[str, bytes]:
    """Every file of a directory."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


# --- the command ------------------------------------------------------------------------------------------------------


def test_keys_are_made_and_named_and_secrets_are_private(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "new" / "keys"
    assert keygen("--into", str(keys)) == 0
    assert keygen("--into", str(keys), "--clients", "blue", "green.eu") == 0
    shown = capsys.readouterr().out.split()
    assert str(keys / "server.key_secret") in shown and str(keys / "routers/blue") in shown
    secrets = sorted(name for name in files_of(keys) if name.endswith("_secret"))
    assert secrets == [
        "client.key_secret",
        "routers/blue/client.key_secret",
        "routers/green.eu/client.key_secret",
        "server.key_secret",
    ]
    for name in secrets:
        assert stat.S_IMODE((keys / name).stat().st_mode) == 0o600
    assert not any("secret" in text for text in shown if Path(text).name == "blue")


def test_one_call_makes_a_fleet_and_its_clients(tmp_path: Path) -> None:
    assert keygen("--into", str(tmp_path), "--clients", "blue") == 0
    server, blue = load_server_keys(tmp_path), load_client_keys(tmp_path / "routers/blue")
    assert blue.server == server.public and blue.public in server.allowed and len(server.allowed) == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "key files exist"),
        (["--clients", "new", "blue"], "key files exist: .*blue"),
        (["--clients", "a", "a"], "must differ"),
        (["--clients", "../a"], "name"),
        (["--clients", ".hidden"], "name"),
        (["--clients", ""], "name"),
        (["--remove", "blue", "nobody"], "no such client keys: .*nobody"),
        (["--remove", "../server"], "name"),
    ],
)
def test_nothing_is_overwritten_or_half_done(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keygen("--into", str(tmp_path), "--clients", "blue") == 0
    before = files_of(tmp_path)
    assert keygen("--into", str(tmp_path), *arguments) == 2
    assert files_of(tmp_path) == before
    assert re.search(named, capsys.readouterr().err)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert keygen("--into", str(tmp_path / "file/keys")) == 2
    assert "--into" in capsys.readouterr().err


def test_a_name_that_was_removed_is_not_given_away_again(tmp_path: Path) -> None:
    assert keygen("--into", str(tmp_path), "--clients", "blue") == 0
    assert keygen("--into", str(tmp_path), "--remove", "blue") == 0
    assert keygen("--into", str(tmp_path), "--clients", "blue") == 2, "its own files are still there"


# --- the list of clients, read again ----------------------------------------------------------------------------------


def client_key(root: Path, name: str) -> bytes:
    """The public key of one router."""
    return load_client_keys(root / "routers" / name).public


def test_the_list_follows_its_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keygen("--into", str(tmp_path), "--clients", "blue")
    allowed = AllowList(load_server_keys(tmp_path))
    blue, first = client_key(tmp_path, "blue"), load_client_keys(tmp_path).public
    assert allowed.callback("preble", blue) and allowed.callback("preble", first)
    assert not allowed.callback("preble", zmq.curve_keypair()[0])
    keygen("--into", str(tmp_path), "--clients", "green")
    assert allowed.callback("preble", client_key(tmp_path, "green"))
    keygen("--into", str(tmp_path), "--remove", "blue")
    assert not allowed.callback("preble", blue) and allowed.callback("preble", first)


def test_a_broken_key_shuts_out_itself_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    create_keys(tmp_path)
    allowed = AllowList(load_server_keys(tmp_path))
    (tmp_path / "clients/broken.key").write_text("no key")
    with caplog.at_level(logging.ERROR):
        assert allowed.callback("preble", load_client_keys(tmp_path).public)
        assert not allowed.callback("preble", b"")
    assert "broken.key" in caplog.text


def test_a_link_to_nothing_among_the_client_keys_disturbs_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_keys(tmp_path)
    allowed = AllowList(load_server_keys(tmp_path))
    (tmp_path / "clients/gone.key").symlink_to(tmp_path / "nowhere")
    assert allowed.callback("", load_client_keys(tmp_path).public)
    assert "gone.key" in caplog.text


def test_without_its_directory_nobody_is_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_keys(tmp_path)
    keys, client = load_server_keys(tmp_path), load_client_keys(tmp_path).public
    allowed = AllowList(keys)
    (tmp_path / "clients").rename(tmp_path / "elsewhere")
    assert not allowed.callback("preble", client)
    (tmp_path / "elsewhere").rename(tmp_path / "clients")
    assert allowed.callback("preble", client)


def test_files_are_read_again_only_when_something_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_keys(tmp_path)
    allowed = AllowList(load_server_keys(tmp_path))
    allowed.callback("preble", b"x")
    monkeypatch.setattr("preble.transport.security._public_key", lambda file: pytest.fail("read again"))
    assert allowed.callback("preble", load_client_keys(tmp_path).public)


# --- a worker that runs -----------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[WorkerProcess]:
    """A worker with keys, and one more router known to it."""
    keygen("--into", str(tmp_path), "--clients", "blue")
    worker = WorkerProcess("--curve-keys", str(tmp_path))
    yield worker
    worker.stop()


async def answers(worker: WorkerProcess, keys: Path) -> bool:
    """Whether a router with these keys is served."""
    try:
        async with Router([worker.endpoint], keys=load_client_keys(keys), config=fast(handshake_seconds=5.0)) as router:
            tokens, _ = await collect(router.generate([1, 2, 3], SamplingParams(max_new_tokens=3)))
    except (HandshakeRefused, NoWorkers):
        return False
    assert tokens == expected_tokens([1, 2, 3], 3)
    return True


@asynchronous
async def test_routers_are_let_in_and_shut_out_while_the_worker_serves(guarded: WorkerProcess, tmp_path: Path) -> None:
    assert await answers(guarded, tmp_path / "routers/blue")
    keygen("--into", str(tmp_path), "--clients", "green")
    assert await answers(guarded, tmp_path / "routers/green")
    keygen("--into", str(tmp_path), "--remove", "blue")
    assert not await answers(guarded, tmp_path / "routers/blue")
    assert await answers(guarded, tmp_path / "routers/green") and await answers(guarded, tmp_path)


@asynchronous
async def test_a_connection_outlives_the_removal_of_its_key(guarded: WorkerProcess, tmp_path: Path) -> None:
    keys = load_client_keys(tmp_path / "routers/blue")
    async with Router([guarded.endpoint], keys=keys, config=fast()) as router:
        os.unlink(tmp_path / "clients/blue.key")
        tokens, _ = await collect(router.generate([4, 5], SamplingParams(max_new_tokens=3)))
    assert tokens == expected_tokens([4, 5], 3)


def test_a_worker_refuses_to_bind_beyond_loopback_without_keys(capsys: pytest.CaptureFixture[str]) -> None:
    for option, endpoint in (("--bind", "tcp://0.0.0.0:*"), ("--events-bind", "tcp://0.0.0.0:*")):
        assert cli.main(["worker", "--engine", "simulated", option, endpoint]) == 1
        assert "refusing to bind tcp://0.0.0.0:* without keys" in capsys.readouterr().err
