"""The Secrets with which the processes of a cluster authenticate each other and encrypt; every pod mounts them.

The manifests do not contain these Secrets: either cert-manager makes the certificate, or the operator of the cluster
creates the Secret (commands_for_secrets). Every pod has the files at the same paths, including the head, where `raypd
serve` checks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.config import ClusterConfig
from cluster.errors import InvalidConfig
from cluster.manifests.objects import Manifest, manifest, secret_volume
from cluster.parameters.json_types import JSON
from cluster.settings.internal_tls import InternalTlsConfig
from cluster.settings.kubernetes import KubernetesConfig
from kv_transfer.trust.tls import CLUSTER_NAME

INTERNAL_TLS_DIRECTORY: Final = "/etc/raypd-internal-tls"
CLUSTER_SECRET_DIRECTORY: Final = "/etc/raypd-cluster-secret"
BLOCK_HASH_KEY_DIRECTORY: Final = "/etc/raypd-block-hash-key"

_AUTHORITY_LIFETIME: Final = "87600h"
"""Ten years, so that the authority, which signs for this cluster alone, does not expire before the cluster ends."""
_LIFETIME: Final = "2160h"
_RENEWED_BEFORE: Final = "720h"


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one Secret. keys: the files' names, in the Secret and in the directory"""

    volume: str
    secret: str
    directory: str
    keys: tuple[str, ...]

    def path(self, key: str) -> Path:
        assert key in self.keys
        return Path(self.directory) / key


def inside_settings(config: ClusterConfig) -> dict[str, Any]:
    """Return the settings that name the files' paths in the pods. Raises InvalidConfig if the settings contradict."""
    if mistakes := list(_mistakes(config)):
        raise InvalidConfig("kubernetes", mistakes)
    kubernetes = config.kubernetes
    settings: dict[str, Any] = {}
    if (tls := _tls_files(kubernetes)) is not None:
        ca, certificate, key = (str(tls.path(name)) for name in tls.keys)
        settings["internal_tls"] = InternalTlsConfig.model_validate({"ca": ca, "certificate": certificate, "key": key})
    if (secret := _cluster_secret(kubernetes)) is not None:
        settings["cluster_secret_file"] = secret.path("secret")
    if (hash_key := _block_hash_key(kubernetes)) is not None:
        settings["block_hash_key_file"] = hash_key.path("key")
    return settings


def inside_volumes(kubernetes: KubernetesConfig) -> list[JSON]:
    """Return the volumes of every pod of the Ray cluster; only their owner and raypd's group can read the files."""
    return [secret_volume(files.volume, files.secret, files.keys) for files in _all_files(kubernetes)]


def inside_mounts(kubernetes: KubernetesConfig) -> list[JSON]:
    """Return the mounts of these volumes, which are the same in every pod of the Ray cluster."""
    return [{"name": files.volume, "mountPath": files.directory, "readOnly": True} for files in _all_files(kubernetes)]


def internal_certificates(kubernetes: KubernetesConfig) -> list[Manifest]:
    """Return the objects from which cert-manager makes the certificate and an authority for this cluster alone.

    As cert-manager documents it, these are a self-signed issuer, the authority's certificate, and an issuer with the
    authority's key (https://cert-manager.io/docs/configuration/selfsigned/#bootstrapping-ca-issuers). The list is empty
    without kubernetes.internal_tls.cert_manager.
    """
    if kubernetes.internal_tls is None or not kubernetes.internal_tls.cert_manager:
        return []
    name = f"{kubernetes.name}-internal"
    authority: Manifest = {
        "isCA": True,
        "commonName": f"{kubernetes.name} cluster authority",
        "secretName": f"{name}-ca",
        "duration": _AUTHORITY_LIFETIME,
        # If the authority's key changed, old and new certificates would not verify each other until all are renewed.
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Never"},
        "issuerRef": _issuer_ref(f"{name}-self-signed"),
    }
    certificate: Manifest = {
        "secretName": kubernetes.internal_tls.secret,
        "dnsNames": [CLUSTER_NAME],
        "usages": ["digital signature", "server auth", "client auth"],
        "duration": _LIFETIME,
        "renewBefore": _RENEWED_BEFORE,
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "issuerRef": _issuer_ref(name),
    }
    return [
        _cert_manager("Issuer", f"{name}-self-signed", kubernetes, {"selfSigned": {}}),
        _cert_manager("Certificate", f"{name}-ca", kubernetes, authority),
        _cert_manager("Issuer", name, kubernetes, {"ca": {"secretName": f"{name}-ca"}}),
        _cert_manager("Certificate", name, kubernetes, certificate),
    ]


def commands_for_secrets(kubernetes: KubernetesConfig) -> list[str]:
    """Return the commands that create the Secrets that the manifests lack; no command contains a secret."""
    create = f"kubectl -n {kubernetes.namespace} create secret generic"
    drawn = [files for files in (_cluster_secret(kubernetes), _block_hash_key(kubernetes)) if files is not None]
    commands = [f"openssl rand -hex 32 | {create} {one.secret} --from-file={one.keys[0]}=/dev/stdin" for one in drawn]
    tls = _tls_files(kubernetes)
    if tls is not None and not internal_certificates(kubernetes):
        commands.append(f"{create} {tls.secret} {' '.join(f'--from-file={key}' for key in tls.keys)}")
    return commands


def _mistakes(config: ClusterConfig) -> Iterator[str]:
    files = {
        "cluster_secret_file": config.cluster_secret_file is not None,
        "block_hash_key_file": config.block_hash_key_file is not None,
        "internal_tls": isinstance(config.internal_tls, InternalTlsConfig),
    }
    for setting in [setting for setting, is_file in files.items() if is_file]:
        secret = f"kubernetes.{setting.removesuffix('_file')}"
        yield f"{setting}: in pods the files come from Secrets: set {secret} instead"
    is_off = config.internal_tls is False and "internal_tls" in config.model_fields_set
    if is_off and config.kubernetes.internal_tls is not None:
        yield "internal_tls is false, but kubernetes.internal_tls names its certificates: leave one of the two out"


def _all_files(kubernetes: KubernetesConfig) -> list[_Files]:
    every = (_tls_files(kubernetes), _cluster_secret(kubernetes), _block_hash_key(kubernetes))
    return [files for files in every if files is not None]


def _tls_files(kubernetes: KubernetesConfig) -> _Files | None:
    if kubernetes.internal_tls is None:
        return None
    keys = ("ca.crt", "tls.crt", "tls.key")
    return _Files("internal-tls", kubernetes.internal_tls.secret, INTERNAL_TLS_DIRECTORY, keys)


def _cluster_secret(kubernetes: KubernetesConfig) -> _Files | None:
    if kubernetes.cluster_secret is None:
        return None
    return _Files("cluster-secret", kubernetes.cluster_secret.secret, CLUSTER_SECRET_DIRECTORY, ("secret",))


def _block_hash_key(kubernetes: KubernetesConfig) -> _Files | None:
    if kubernetes.block_hash_key is None:
        return None
    return _Files("block-hash-key", kubernetes.block_hash_key.secret, BLOCK_HASH_KEY_DIRECTORY, ("key",))


def _issuer_ref(name: str) -> Manifest:
    return {"name": name, "kind": "Issuer", "group": "cert-manager.io"}


def _cert_manager(kind: str, name: str, kubernetes: KubernetesConfig, spec: Manifest) -> Manifest:
    return manifest("cert-manager.io/v1", kind, name, kubernetes, spec=spec)
