"""From when till when the certificates of a PEM file hold. Owns the few fields of X.509 that say so (RFC 5280, section
4.1), which Python's `ssl` does not show of a certificate of one's own.
"""

from __future__ import annotations

import binascii
import re
import ssl
from datetime import datetime, timezone
from pathlib import Path

_VERSION, _UTC_TIME = 0xA0, 0x17  # tags; a version may be left out, a time may be a GeneralizedTime
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def certificate_times(path: Path) -> list[tuple[datetime, datetime]]:
    """Begin and end of each certificate in the file, in its order; those that cannot be read are left out. Raises
    `OSError`."""
    found = []
    for text in _PEM.findall(path.read_text("ascii", "replace")):
        try:
            found.append(_validity(ssl.PEM_cert_to_DER_cert(text)))
        except (ValueError, IndexError, binascii.Error):
            continue
    return found


def _validity(der: bytes) -> tuple[datetime, datetime]:
    """Of Certificate -> TBSCertificate [version] serialNumber signature issuer validity."""
    (_, certificate), *_ = _fields(der)
    (_, signed), *_ = _fields(certificate)
    fields = _fields(signed)
    validity = fields[4 if fields[0][0] == _VERSION else 3]
    begin, end = _fields(validity[1])
    return _time(*begin), _time(*end)


def _fields(data: bytes) -> list[tuple[int, bytes]]:
    """The tag and content of each field that follows another (DER: definite lengths only)."""
    found, at = [], 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length & 0x80:
            more = length & 0x7F
            length, at = int.from_bytes(data[at : at + more], "big"), at + more
        found.append((tag, data[at : at + length]))
        at += length
    return found


def _time(tag: int, content: bytes) -> datetime:
    """Two digits of a year are those of 1950 to 2049."""
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("20" if int(text[:2]) < 50 else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc)
