"""The fields of cert-manager.io/v1 objects that the manifests use, as its CRDs define them (read in August 2026).

An extract in our own words of deploy/crds/cert-manager.io_{certificates,issuers}.yaml of cert-manager's repository on
GitHub: names, types and choices. A field that is not here is refused, so whoever uses one more looks it up there first.
"""

from __future__ import annotations

from typing import Any, Final

import jsonschema

_TEXT: Final = {"type": "string"}
_DURATION: Final = {"type": "string", "pattern": r"^([0-9]+h)?([0-9]+m)?([0-9]+s)?$", "minLength": 2}
"""A part of what Go's time.ParseDuration takes; days are not among it."""


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_PRIVATE_KEY: Final = _object(
    (),
    algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
    size={"type": "integer"},
    rotationPolicy={"enum": ["Never", "Always"]},
)
_USAGES: Final = ["signing", "digital signature", "key encipherment", "cert sign", "server auth", "client auth"]
_SPECS: Final = {
    "Certificate": _object(
        ("issuerRef", "secretName"),
        isCA={"type": "boolean"},
        commonName={"type": "string", "maxLength": 64},
        dnsNames={"type": "array", "items": _TEXT},
        usages={"type": "array", "items": {"enum": _USAGES}},
        secretName=_TEXT,
        duration=_DURATION,
        renewBefore=_DURATION,
        privateKey=_PRIVATE_KEY,
        issuerRef=_object(("name",), name=_TEXT, kind={"enum": ["Issuer", "ClusterIssuer"]}, group=_TEXT),
    ),
    "Issuer": _object((), selfSigned=_object(()), ca=_object(("secretName",), secretName=_TEXT)),
}


def cert_manager_validator(kind: str) -> jsonschema.Draft7Validator:
    """For cert-manager.io/v1 objects of this kind."""
    metadata = {"type": "object"}
    required = ("apiVersion", "kind", "metadata", "spec")
    schema = _object(required, apiVersion=_TEXT, kind=_TEXT, metadata=metadata, spec=_SPECS[kind])
    return jsonschema.Draft7Validator(schema)
