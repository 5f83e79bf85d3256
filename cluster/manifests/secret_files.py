"""Certificates and tokens from Secrets, for ingresses and for raypd's own commands in the pods.

Only ingresses get the token file. Only ingresses get the private key of their certificate, unless with mutual TLS: the
commands in other pods then need the certificate too, to show it to ingresses.
"""

from __future__ import annotations

from cluster.manifests.objects import secret_volume
from cluster.manifests.pod_groups import OPERATOR_FILE, TLS_DIRECTORY, TOKENS_DIRECTORY, TOKENS_FILE
from cluster.parameters.json_types import JSON
from cluster.settings.kubernetes import KubernetesConfig


def credential_variables(kubernetes: KubernetesConfig) -> dict[str, str]:
    """Return the environment variables with which `raypd drain` and `raypd status` in a pod authenticate."""
    variables = {}
    if kubernetes.tls is not None:
        variables["RAYPD_TLS_CA"] = f"{TLS_DIRECTORY}/ca.crt"
        if kubernetes.tls.mutual:
            variables |= {"RAYPD_TLS_CERT": f"{TLS_DIRECTORY}/tls.crt", "RAYPD_TLS_KEY": f"{TLS_DIRECTORY}/tls.key"}
    if kubernetes.tokens is not None:
        variables["RAYPD_TOKEN_FILE"] = f"{TOKENS_DIRECTORY}/{OPERATOR_FILE}"
        if kubernetes.tls is None:
            variables["RAYPD_INSECURE"] = "1"
    return variables


def credential_volumes(kubernetes: KubernetesConfig, *, is_ingress: bool) -> list[JSON]:
    """Return the volumes with certificates and tokens for a pod. is_ingress: whether an ingress runs in the pod"""
    volumes: list[JSON] = []
    if kubernetes.tls is not None:
        has_key = is_ingress or kubernetes.tls.mutual
        volumes.append(secret_volume("tls", kubernetes.tls.secret, [] if has_key else ["ca.crt"]))
    if kubernetes.tokens is not None:
        keys = [TOKENS_FILE, OPERATOR_FILE] if is_ingress else [OPERATOR_FILE]
        volumes.append(secret_volume("tokens", kubernetes.tokens.secret, keys))
    return volumes


def credential_mounts(kubernetes: KubernetesConfig) -> list[JSON]:
    """Return the mounts of the volumes with certificates and tokens."""
    mounts: list[JSON] = []
    if kubernetes.tls is not None:
        mounts.append({"name": "tls", "mountPath": TLS_DIRECTORY, "readOnly": True})
    if kubernetes.tokens is not None:
        mounts.append({"name": "tokens", "mountPath": TOKENS_DIRECTORY, "readOnly": True})
    return mounts
