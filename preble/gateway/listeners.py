"""Where the gateway listens: a port, in HTTP or HTTPS, a Unix socket, and the endpoint picker's port. Owns sockets, the
socket's file and its permissions, and the certificate.

With several processes the first one has the Unix socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import stat
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from ..errors import InvalidConfig
from .certificate_times import certificate_times
from .core.config import GatewayConfig
from .core.doors import NETWORK, UNIX, Door
from .core.sibling_processes import ProcessSlot

logger = logging.getLogger("preble.gateway")

BACKLOG = 2048
OWNER_ONLY = 0o177  # what a mask takes away
EXPIRES_SOON = timedelta(days=14)  # at the most: of one that holds for days, a tenth of its time is soon


@dataclass(frozen=True, slots=True)
class GatewayListener:
    """A socket that listens, by which door its connections come in, and what encrypts them."""

    socket: socket.socket
    door: Door
    tls: ssl.SSLContext | None = None
    path: Path | None = None  # of a Unix socket's file, which goes with it

    def close(self) -> None:
        """Listen no longer."""
        self.socket.close()
        if self.path is not None:
            with contextlib.suppress(OSError):  # somebody took it away
                self.path.unlink()

    def read_certificate(self, config: GatewayConfig) -> None:
        """Take the certificate as it is now for new connections. Raises `InvalidConfig`; then the old one stays."""
        if self.tls is not None and config.tls_certificate is not None:
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config)  # a pair that does not fit must not get half in
            _load(self.tls, config)


def open_listeners(config: GatewayConfig, slot: ProcessSlot | None) -> list[GatewayListener]:
    """What the configuration asks for, the port first. Raises `InvalidConfig` for what cannot be had."""
    tls = None if config.tls_certificate is None else _server_context(config)
    port = config.port if slot is None else slot.port
    listeners = [GatewayListener(_listen(config.host, port, shared=slot is not None), NETWORK, tls)]
    if config.unix_socket is not None and (slot is None or slot.index == 0):
        try:
            listeners.append(_unix_listener(Path(config.unix_socket)))
        except BaseException:
            listeners[0].close()
            raise
    return listeners


def open_picker_listener(config: GatewayConfig, slot: ProcessSlot | None) -> GatewayListener | None:
    """Where data planes ask the endpoint picker: HTTP/2, at a port that all processes share; None where none is asked
    for. Raises `InvalidConfig`."""
    if config.picker_port is None:
        return None
    tls = None if config.tls_certificate is None else _server_context(config, "h2")
    return GatewayListener(_listen(config.host, config.picker_port, shared=slot is not None), NETWORK, tls)


def _listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; `shared` with other processes. Raises `InvalidConfig` if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InvalidConfig(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _unix_listener(path: Path) -> GatewayListener:
    """A socket that its owner alone can open. One that an earlier life has left is replaced; nothing else is."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear(path)
        mask = os.umask(OWNER_ONLY)  # from its first moment on
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise InvalidConfig(f"unix_socket {path}: {error.strerror or error}") from error
    except InvalidConfig:
        listener.close()
        raise
    return GatewayListener(listener, UNIX, path=path)


def _clear(path: Path) -> None:
    """Take away a socket at which nobody listens. Raises `InvalidConfig` for anything else that is there."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise InvalidConfig(f"unix_socket {path}: there is a file of that name, and it is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise InvalidConfig(f"unix_socket {path}: somebody listens there")


def say_expiry(config: GatewayConfig, unix_seconds: float) -> None:
    """Log a sentence if of the file's certificates the first to expire has done so by now, or soon will. It is used all
    the same: that is for clients to judge."""
    times: list[tuple[datetime, datetime]] = []
    if config.tls_certificate is not None:
        with contextlib.suppress(OSError):  # it was taken away after it was read
            times = certificate_times(Path(config.tls_certificate))
    if not times:
        return
    now = datetime.fromtimestamp(unix_seconds, timezone.utc)
    begin, end = min(times, key=lambda one: one[1])
    named = config.tls_certificate, f"{end:%Y-%m-%d %H:%M} UTC"
    if end <= now:
        logger.warning("tls_certificate %s expired on %s: clients refuse it", *named)
    elif end - now <= min(EXPIRES_SOON, (end - begin) / 10):
        logger.warning("tls_certificate %s expires on %s: renew it, then send SIGHUP", *named)


def _server_context(config: GatewayConfig, protocol: str = "http/1.1") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    _load(context, config)
    return context


def _load(context: ssl.SSLContext, config: GatewayConfig) -> None:
    try:
        # Without an answer to give, a key with a password would be asked for at the terminal.
        context.load_cert_chain(config.tls_certificate or "", config.tls_key, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or getattr(error, "reason", None) or "they are no certificate and its key"
        raise InvalidConfig(f"tls_certificate {config.tls_certificate}, tls_key {config.tls_key}: {reason}") from error
