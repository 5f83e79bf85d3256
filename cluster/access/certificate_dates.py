"""The dates between which certificates are valid, and warnings about them."""

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
    """The period in which a certificate is valid. subject: the certificate's, as an RFC 4514 string"""

    subject: str
    begins: datetime
    ends: datetime

    def warning(self, now: datetime) -> str | None:
        """Return what is wrong with the dates, or will be within two weeks; None if nothing is."""
        if now > self.ends:
            return f"{self.subject} expired at {_written(self.ends)}: clients refuse it"
        if now < self.begins:
            return f"{self.subject} is valid only from {_written(self.begins)} on: clients refuse it until then"
        if self.ends - now < _SOON:
            return f"{self.subject} expires at {_written(self.ends)}"
        return None


def read_validities(path: Path) -> list[Validity]:
    """Return the validity of each certificate in a PEM file, in the file's order.

    Raises OSError if the file cannot be read, ValueError if the file holds no certificate or a broken one.
    """
    certificates = x509.load_pem_x509_certificates(path.read_bytes())
    return [
        Validity(one.subject.rfc4514_string(), one.not_valid_before_utc, one.not_valid_after_utc)
        for one in certificates
    ]


def find_certificate_warnings(tls: TlsConfig | None, now: datetime | None = None) -> list[str]:
    """Return warnings about the dates of the server's certificates and of the root certificates of clients.

    now: the time to compare with; default: this machine's clock
    An expired certificate does not prevent a start: the file may be renewed in place, and the clock may be wrong.
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
