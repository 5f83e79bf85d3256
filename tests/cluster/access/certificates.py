"""Certificates for tests, made on the spot."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certified:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority with its root at .root."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.root = directory / f"{name}.pem"
        builder = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        self.root.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def certify(self, name: str, address: str = "127.0.0.1") -> Certified:
        """A certificate for that address; one of the same name replaces its files."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_name(name), key).add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False
        )
        files = Certified(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        files.certificate.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
            .not_valid_after(datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
        )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
