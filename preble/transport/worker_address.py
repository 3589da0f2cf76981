"""Addresses of workers and servers as people write them: which are none and what to write instead, and why nobody
answers at one. Owns the sentences; connecting is `client`'s and `engine_servers`'.

    tcp://HOST:PORT, ipc://PATH, inproc://NAME     a `preble worker`
    http://HOST[:PORT], https://HOST[:PORT]        a server that runs already: SGLang, vLLM
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from urllib.parse import SplitResult, urlsplit

from ..errors import InvalidInput, TransportError

FORMS = "tcp://HOST:PORT or ipc://PATH of a `preble worker`, http://HOST:PORT of an SGLang or vLLM server"
SERVER_SCHEMES = ("http://", "https://")
LOOK_UP_SECONDS = 5.0
PROBE_SECONDS = 1.0
_SHOWN_CHARS = 120
_BLANK = re.compile(r"[\s\x00-\x1f]")
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s/:]+):\d{1,5}")
_WHO = re.compile(r"//[^/@]*@")
_RANK = re.compile(r"rank=\d{1,9}")
_NO_NAME = {getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)}


class UnknownHost(TransportError):
    """No machine has that name: trying again in a moment is of little use."""


def is_server(address: str) -> bool:
    """Whether it is an address of a server that is spoken to over HTTP."""
    return address.startswith(SERVER_SCHEMES)


def check_worker_address(address: str) -> None:
    """Raise `InvalidInput` for what can be no worker's endpoint and no server's URL, as far as its form shows. The
    message says what to write instead."""
    wrong = _wrong(address)
    if wrong:
        shown = _WHO.sub("//...@", repr(address))  # a password is not for logs
        shown = shown if len(shown) <= _SHOWN_CHARS else shown[:_SHOWN_CHARS] + "..."
        raise InvalidInput(f"the worker's address {shown} {wrong}")


def _wrong(address: str) -> str:
    """What is wrong with it, "" if nothing."""
    if not isinstance(address, str) or not address:
        return f"must be {FORMS}"
    if "," in address and not address.startswith("ipc://"):
        return f"has a comma: write several addresses apart, such as {' '.join(filter(None, address.split(',')))[:80]}"
    if _BLANK.search(address):
        return f"has blanks in it: an address is {FORMS}"
    scheme, mark, rest = address.partition("://")
    if not mark:
        return _without_scheme(address)
    if scheme in ("http", "https"):
        return _wrong_url(address)
    if scheme == "tcp":
        return _wrong_endpoint(rest)
    if scheme in ("ipc", "inproc"):
        return "" if rest else f"names nothing: an address is {FORMS}"
    return f"begins with {scheme}://, which workers do not speak: an address is {FORMS}"


def _without_scheme(address: str) -> str:
    if _HOST_AND_PORT.fullmatch(address):
        return f"does not say what is there: write tcp://{address} for a `preble worker`, http://{address} for a server"
    return f"has no scheme: an address is {FORMS}"


def _wrong_endpoint(rest: str) -> str:
    host, mark, port = rest.rpartition(":")
    if not mark or rest.endswith("]"):
        return f"has no port: write tcp://{rest.rstrip('/')}:PORT"
    if not (port.isdecimal() and port.isascii() and len(port) <= 5 and 0 < int(port) <= 65_535):
        return "must end with a port from 1 to 65535, and with nothing after it"
    if host == "*":
        return f"is where a worker listens: write tcp://HOST:{port} with the name of its machine"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return f"needs brackets around an IPv6 address: write tcp://[{host}]:{port}"
    return "" if host.strip("[]") and "/" not in host else f"names no host: write tcp://HOST:{port}"


def _wrong_url(address: str) -> str:
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "must be like http://HOST:PORT, with a port from 1 to 65535"
    if not host or port == 0:
        return "must be like http://HOST:PORT, with a port from 1 to 65535"
    if "@" in parts.netloc:
        return "holds a user's name: a server's key is the `api_key` of its table in `servers`"
    if parts.query or not (parts.fragment == "" or _RANK.fullmatch(parts.fragment)):
        return f"has more than a server's address: write {_base(parts, parts.path)}"
    path = parts.path.rstrip("/")
    cut = next((path[: path.index(end)] for end in ("/v1", "/generate") if _has_step(path, end)), None)
    return (
        "" if cut is None else f"names one of the server's paths, which Preble adds itself: write {_base(parts, cut)}"
    )


def _has_step(path: str, step: str) -> bool:
    return path.endswith(step) or f"{step}/" in path


def _base(parts: SplitResult, path: str) -> str:
    return f"{parts.scheme}://{parts.netloc}{path.rstrip('/')}"


# --- who is there -----------------------------------------------------------------------------------------------------


async def find_host(address: str) -> None:
    """Look the name in an address up. Raises `UnknownHost` if it is none, `TransportError` if nobody says."""
    place = _place(address)
    if place is None or _is_number(place[0]):
        return
    looking = asyncio.get_running_loop().getaddrinfo(*place, type=socket.SOCK_STREAM)
    try:
        await asyncio.wait_for(looking, LOOK_UP_SECONDS)
    except socket.gaierror as error:
        if error.errno in _NO_NAME:
            raise UnknownHost(f"unknown host {place[0]}: no machine has that name") from error
        raise TransportError(f"the name {place[0]} cannot be looked up: {error.strerror}") from error
    except UnicodeError as error:
        raise UnknownHost(f"unknown host {place[0]}: that is no name of a machine") from error
    except asyncio.TimeoutError as error:
        raise TransportError(f"the name {place[0]} was not looked up in {LOOK_UP_SECONDS:g} s") from error


async def why_silent(address: str) -> str:
    """Why nobody answers there, found out by connecting once; "" where that says nothing."""
    place = _place(address)
    if place is None:
        return ""
    try:
        await find_host(address)
        _, writer = await asyncio.wait_for(asyncio.open_connection(*place), PROBE_SECONDS)
    except TransportError as error:
        return str(error)
    except ConnectionRefusedError:
        return f"connection refused: nothing listens on port {place[1]} of {place[0]}"
    except asyncio.TimeoutError:
        return f"{place[0]} does not answer: is a firewall between?"
    except OSError as error:
        return f"{place[0]} cannot be reached: {error.strerror or type(error).__name__}"
    writer.close()
    return ""


def _place(address: str) -> tuple[str, int] | None:
    """Host and port; None of what has none."""
    if not address.startswith(("tcp://", *SERVER_SCHEMES)):
        return None
    parts = urlsplit(address)
    return (parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0))


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
