"""Certificates for the inside of a cluster, right or wrong in one respect."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from kv_transfer.trust.tls import CLUSTER_NAME, TlsFiles, TlsMaterial

_DAY = datetime.timedelta(days=1)
_BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


def certified(
    name: str = CLUSTER_NAME, usages: Sequence[ObjectIdentifier] = _BOTH, ends_in: datetime.timedelta = _DAY
) -> TlsMaterial:
    """A certificate for this name and these usages, of an authority of its own."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ends = datetime.datetime.now(datetime.UTC) + ends_in

    def build(subject: str, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(_name(subject)).issuer_name(_name("authority"))
        builder = builder.public_key(public_key).serial_number(x509.random_serial_number())
        return builder.not_valid_before(ends - 10 * _DAY).not_valid_after(ends)

    authority = build("authority", authority_key.public_key()).add_extension(x509.BasicConstraints(True, None), True)
    leaf = (
        build(name, key.public_key())
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    )
    pem = serialization.Encoding.PEM
    return TlsMaterial(
        authority.sign(authority_key, hashes.SHA256()).public_bytes(pem),
        leaf.sign(authority_key, hashes.SHA256()).public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def write_tls_files(directory: Path, material: TlsMaterial) -> TlsFiles:
    """Write the three files as cert-manager names them; the key's is its owner's alone."""
    files = TlsFiles(*(str(directory / name) for name in ("ca.crt", "tls.crt", "tls.key")))
    Path(files.authority).write_bytes(material.authority)
    Path(files.certificate).write_bytes(material.certificate)
    key = Path(files.key)
    key.touch(mode=0o600)
    key.write_bytes(material.key)
    return files


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
