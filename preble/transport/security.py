"""Who may talk to whom: CURVE keys on disk, the client allow-list, and the refusal to bind beyond loopback in the
clear.

A key directory holds any of

    server.key, server.key_secret    the worker's pair (all workers of a fleet may share one)
    client.key, client.key_secret    the router's pair
    clients/*.key                    public keys of the routers that a worker lets in

    routers/NAME/                    what a router of that name needs: copied to its machine, or moved there

in ZeroMQ's certificate format. A worker needs `server.key_secret` and `clients/`, a router `client.key_secret` and
`server.key`. A worker that runs looks at `clients/` at every handshake: a key put there is let in, one taken away is
refused from then on, and keeps at most the connection it has. Owns no socket; `server` and `client` apply the keys to
theirs.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.auth

from ..errors import InsecureBind, InvalidConfig

logger = logging.getLogger("preble.transport")

DOMAIN = "preble"  # ZAP domain: only sockets of this domain are authenticated by our allow-list
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_KEY_FILE_BYTES_MAX = 1 << 16
_BANNER = "# Preble CURVE {kind} key. {advice}\n"


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """A worker's key pair and the public keys of the routers it lets in (none: nobody gets in).

    With `clients`, a directory of keys, that directory is asked again at every handshake instead of `allowed`.
    """

    public: bytes
    secret: bytes = field(repr=False)
    allowed: frozenset[bytes] = frozenset()
    clients: Path | None = None


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A router's key pair and the public key of the workers it trusts."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes = b""


def create_keys(directory: str | os.PathLike[str], *, overwrite: bool = False) -> list[Path]:
    """Make a server pair and a client pair that may talk to each other; return the files. Secrets are readable by the
    owner only.

    Raises `InvalidConfig` when a file exists already, unless `overwrite`; then nothing has been written.
    """
    root = Path(directory)
    names = ["server.key", "server.key_secret", "client.key", "client.key_secret", "clients/client.key"]
    files = [root / name for name in names]
    taken = [str(file) for file in files if file.exists()]
    if taken and not overwrite:
        raise InvalidConfig(f"key files exist: {', '.join(taken)}")
    (root / "clients").mkdir(parents=True, exist_ok=True)
    for role in ("server", "client"):
        public, secret = zmq.curve_keypair()
        _write(root / f"{role}.key", public, None)
        _write(root / f"{role}.key_secret", public, secret)
        if role == "client":
            _write(root / "clients" / "client.key", public, None)
    return files


def add_clients(directory: str | os.PathLike[str], names: Sequence[str]) -> list[Path]:
    """Make a pair for each router named and let it in; return what each needs: `routers/NAME`, a key directory.

    `directory` has a server pair (`create_keys`). Raises `InvalidConfig` for a name that cannot be a file's or is
    taken, or without a server pair; then nothing has been written.
    """
    root = Path(directory)
    server, _ = _load(root / "server.key", secret=False)
    homes = [root / "routers" / _check_name(name) for name in names]
    if len(set(names)) != len(names):
        raise InvalidConfig(f"client names must differ, got {', '.join(names)}")
    public_files = [root / "clients" / f"{name}.key" for name in names]
    taken = [str(path) for path in (*homes, *public_files) if path.exists()]
    if taken:
        raise InvalidConfig(f"key files exist: {', '.join(taken)}")
    for home, public_file in zip(homes, public_files, strict=True):
        home.mkdir(parents=True, mode=0o700)
        public, secret = zmq.curve_keypair()
        _write(home / "client.key", public, None)
        _write(home / "client.key_secret", public, secret)
        _write(home / "server.key", server, None)
        _write(public_file, public, None)
    return homes


def remove_clients(directory: str | os.PathLike[str], names: Sequence[str]) -> list[Path]:
    """Take the keys of these routers out of `clients/`; return the files that were there. Their own files stay.

    Raises `InvalidConfig` for one that is not there; then nothing has been removed.
    """
    files = [Path(directory) / "clients" / f"{_check_name(name)}.key" for name in names]
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        raise InvalidConfig(f"no such client keys: {', '.join(missing)}")
    for file in files:
        file.unlink(missing_ok=True)
    return files


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidConfig(f"a client's name has letters, digits, '-', '_' and inner dots, got {name!r}")
    return name


def load_server_keys(directory: str | os.PathLike[str]) -> ServerKeys:
    """A worker's keys. Raises `InvalidConfig` naming the file that is missing or broken."""
    root = Path(directory)
    public, secret = _load(root / "server.key_secret", secret=True)
    clients = root / "clients"
    if not clients.is_dir():
        raise InvalidConfig(f"{clients} is missing: it holds the public keys of the routers that may connect")
    allowed = frozenset(_load(file, secret=False)[0] for file in sorted(clients.glob("*.key")))
    if not allowed:
        logger.warning("no client keys in %s: no router can connect", clients)
    return ServerKeys(public, secret, allowed, clients)


def load_client_keys(directory: str | os.PathLike[str]) -> ClientKeys:
    """A router's keys. Raises `InvalidConfig` naming the file that is missing or broken."""
    root = Path(directory)
    public, secret = _load(root / "client.key_secret", secret=True)
    return ClientKeys(public, secret, _load(root / "server.key", secret=False)[0])


def check_bind(endpoint: str, *, has_keys: bool, insecure: bool) -> None:
    """Raise `InsecureBind` if binding there would let strangers in, `InvalidConfig` if the endpoint is none we know."""
    if is_loopback(endpoint) or has_keys:
        return
    if not insecure:
        raise InsecureBind(
            f"refusing to bind {endpoint} without keys: anyone who reaches it could run requests and read prompts; "
            "give CURVE keys, bind a loopback address, or allow it with insecure"
        )
    logger.warning("binding %s without keys: anyone who reaches it can run requests and read prompts", endpoint)


def is_loopback(endpoint: str) -> bool:
    """True if only this machine reaches the endpoint. Names other than localhost count as outside: they may change."""
    scheme, _, rest = endpoint.partition("://")
    if scheme in ("ipc", "inproc") and rest:
        return True
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port:
        raise InvalidConfig(f"endpoint must be tcp://HOST:PORT, ipc://PATH or inproc://NAME, got {endpoint!r}")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def apply_server_keys(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Make a socket, not yet bound, demand encryption and an allowed client key.

    Needs a `start_authenticator` in its context.
    """
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.curve_server = True
    socket.zap_domain = DOMAIN.encode()


def apply_client_keys(socket: zmq.Socket[Any], keys: ClientKeys) -> None:
    """Make a socket, not yet connected, encrypt and prove its key."""
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.curve_serverkey = keys.server


class AllowList:
    """Answers the authenticator, in its thread: is this public key one of ours, now?

    Files are read again only when a name, a size or a time in the directory has changed. One that cannot be read, or
    holds no key, lets nobody in and is logged.
    """

    def __init__(self, keys: ServerKeys) -> None:
        self._allowed = keys.allowed
        self._clients = keys.clients
        self._seen: list[tuple[str, int, int, int]] | None = None

    def callback(self, domain: str, key: bytes) -> bool:
        """The name is the authenticator's."""
        if self._clients is not None:
            self._read_again(self._clients)
        return key in self._allowed

    def _read_again(self, clients: Path) -> None:
        try:
            listing = sorted(_listing(clients))
        except OSError as error:
            logger.error("cannot read %s, so nobody is let in: %s", clients, error)
            self._allowed, self._seen = frozenset(), None
            return
        if listing != self._seen:
            self._allowed = frozenset(filter(None, (_public_key(clients / name) for name, *_ in listing)))
            self._seen = listing


def _listing(clients: Path) -> Iterator[tuple[str, int, int, int]]:
    for file in clients.glob("*.key"):
        try:
            status = file.stat()
        except OSError:  # a link to nothing, or just gone: it is no key, and disturbs no other
            yield file.name, 0, 0, 0
        else:
            yield file.name, status.st_ino, status.st_size, status.st_mtime_ns


def _public_key(file: Path) -> bytes:
    try:
        return _load(file, secret=False)[0]
    except InvalidConfig as error:
        logger.error("a client key is left out: %s", error)
        return b""


def start_authenticator(context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> Callable[[], None]:
    """Check client keys for every CURVE server socket of `context`, in a thread of its own. Returns what stops it."""
    from zmq.auth.thread import ThreadAuthenticator

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=AllowList(keys))
    return authenticator.stop


def _write(file: Path, public: bytes, secret: bytes | None) -> None:
    kind, advice = ("public", "Give it to the other side.") if secret is None else ("secret", "Keep it to yourself.")
    text = _BANNER.format(kind=kind, advice=advice) + f'metadata\ncurve\n    public-key = "{public.decode()}"\n'
    if secret is not None:
        text += f'    secret-key = "{secret.decode()}"\n'
    # The mode is set at creation: a secret must not be readable even for the moment before a chmod.
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret is not None else 0o644)
    with os.fdopen(descriptor, "w", encoding="ascii") as out:
        out.write(text)


def _load(file: Path, *, secret: bool) -> tuple[bytes, bytes]:
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _KEY_FILE_BYTES_MAX:  # a FIFO would never be read
            raise InvalidConfig(f"{file} is no CURVE key: it must be a file of at most {_KEY_FILE_BYTES_MAX} bytes")
        public_key, secret_key = zmq.auth.load_certificate(file)
    except (OSError, ValueError, IndexError) as error:  # IndexError: a line that names a key and gives none
        raise InvalidConfig(f"cannot read the CURVE key {file}: {error}") from error
    if secret and secret_key is None:
        raise InvalidConfig(f"{file} holds no secret key")
    if secret and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("secret key %s can be read by others (mode %o)", file, stat.S_IMODE(status.st_mode))
    if len(public_key) != 40 or (secret_key is not None and len(secret_key) != 40):
        raise InvalidConfig(f"{file} does not hold 40-character Z85 keys")
    return public_key, secret_key or b""
