"""Certificates for tests: an authority of one's own and what it vouches for, made by the `openssl` program."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True, slots=True)
class Certificate:
    """The files of a certificate for localhost, which vouches for itself."""

    certificate: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        """What a server needs."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context

    def client_context(self) -> ssl.SSLContext:
        """What a client needs that trusts this one only."""
        return ssl.create_default_context(cafile=str(self.certificate))


def make_certificate(directory: Path, name: str = "server", *, days: int = 2) -> Certificate:
    """A new one in that directory; the test is skipped where there is no `openssl`."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    made = Certificate(directory / f"{name}.pem", directory / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(made.key), "-out", str(made.certificate), "-days", str(days), "-subj", f"/CN={name}"]
    subprocess.run([*command, "-addext", NAMES], check=True, capture_output=True)
    return made
