"""Dates between which certificates are valid, and the warnings that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509

from cluster.access.server_tls import TlsConfig

_SOON: Final = timedelta(days=14)


@dataclass(frozen=True, slots=True)
class Validity:
    """The time in which one certificate is valid. subject: as RFC 4514 writes it."""

    subject: str
    begins: datetime
    ends: datetime

    def warning(self, now: datetime) -> str | None:
        """Return what a client would find wrong with the dates, now or within two weeks; None for nothing."""
        if now > self.ends:
            return f"{self.subject} expired at {_written(self.ends)}: clients refuse it"
        if now < self.begins:
            return f"{self.subject} is valid only from {_written(self.begins)} on: clients refuse it until then"
        if self.ends - now < _SOON:
            return f"{self.subject} expires at {_written(self.ends)}"
        return None


def read_validities(path: Path) -> list[Validity]:
    """Return the validity of each certificate of a PEM file, in its order.

    Raises OSError if the file cannot be read, ValueError if it holds no certificate or a broken one.
    """
    certificates = x509.load_pem_x509_certificates(path.read_bytes())
    return [
        Validity(one.subject.rfc4514_string(), one.not_valid_before_utc, one.not_valid_after_utc)
        for one in certificates
    ]


def find_certificate_warnings(tls: TlsConfig | None, now: datetime | None = None) -> list[str]:
    """Return what is wrong, or soon will be, with the dates of the server's certificates and the clients' roots.

    now: default: this machine's clock
    A certificate that has expired is no reason not to start: it may be renewed in place, and the clock may be wrong.
    """
    return [] if tls is None else list(_warnings(tls, now or datetime.now(UTC)))


def _warnings(tls: TlsConfig, now: datetime) -> Iterator[str]:
    for name, path in (("certificate", tls.certificate), ("client_ca", tls.client_ca)):
        if path is None:
            continue
        try:
            validities = read_validities(path)
        except (OSError, ValueError):
            continue  # Files that cannot be used at all are refused elsewhere, with the reason.
        for validity in validities:
            if (warning := validity.warning(now)) is not None:
                yield f"ingress.tls.{name} {path}: {warning}"


def _written(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
