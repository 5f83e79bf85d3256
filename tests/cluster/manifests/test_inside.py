"""Secrets and certificates of the inside: every pod has them as files, no manifest shows them, and they fit.

Tests of cluster/manifests/secret_files.py, cluster/commands/access.py.
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from typer.testing import CliRunner

from cluster.checks.internal_files import InternalFiles
from cluster.cli import app
from cluster.config import ClusterConfig
from cluster.manifests.inside import commands_for_secrets
from cluster.manifests.objects import to_yaml
from cluster.manifests.render import render, render_trial
from kv_transfer.trust.tls import InternalTls, TlsMaterial
from tests.cluster.manifests.cert_manager_schemas import cert_manager_validator
from tests.cluster.manifests.deployments import of_kind, worker_groups

_EVERYTHING: Any = {"internal_tls": {"cert_manager": True}, "cluster_secret": {}, "block_hash_key": {"secret": "mine"}}
_PATHS = {
    "raypd-internal-tls": ("/etc/raypd-internal-tls", ["ca.crt", "tls.crt", "tls.key"]),
    "raypd-cluster-secret": ("/etc/raypd-cluster-secret", ["secret"]),
    "mine": ("/etc/raypd-block-hash-key", ["key"]),
}


def _config(**kubernetes: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"kubernetes": kubernetes})


def _pods(objects: Any) -> dict[str, Any]:
    """The pods of the Ray cluster, by group."""
    groups = worker_groups(objects) | {"head": of_kind(objects, "RayCluster")["spec"]["headGroupSpec"]}
    return {name: group["template"]["spec"] for name, group in groups.items()}


def test_every_pod_has_every_file_read_only_for_its_own_group() -> None:
    pods = _pods(render(_config(**_EVERYTHING)))

    assert set(pods) == {"head", "ingress", "prefill", "decode"}
    for pod in pods.values():
        secrets = {volume["name"]: volume["secret"] for volume in pod["volumes"] if "secret" in volume}
        [container] = pod["containers"]
        mounted = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert {one["secretName"]: one["defaultMode"] for one in secrets.values()} == dict.fromkeys(_PATHS, 0o440)
        for name, secret in secrets.items():
            path, keys = _PATHS[secret["secretName"]]
            assert secret["items"] == [{"key": key, "path": key} for key in keys]
            assert mounted[name] == {"name": name, "mountPath": path, "readOnly": True}
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


def test_the_served_settings_name_the_files_that_are_mounted() -> None:
    files = InternalFiles.of(_served(render(_config(**_EVERYTHING))))
    assert files.tls is not None
    tls = files.tls
    named = {str(files.secret), str(files.block_hash_key), tls.authority, tls.certificate, tls.key}
    assert named == {f"{path}/{key}" for path, keys in _PATHS.values() for key in keys}


def test_nothing_is_mounted_and_nothing_is_asked_of_cert_manager_unless_it_is_set() -> None:
    for is_encrypted in (False, True):
        objects = render(ClusterConfig(internal_tls=is_encrypted))
        assert "cert-manager" not in to_yaml(objects)
        assert not any("secret" in volume for pod in _pods(objects).values() for volume in pod["volumes"])
        assert _served(objects).internal_tls is is_encrypted


def _served(objects: Any) -> ClusterConfig:
    text = of_kind(objects, "ConfigMap", "raypd-config")["data"]["cluster.yaml"]
    return ClusterConfig.model_validate(yaml.safe_load(text))


def test_no_manifest_holds_a_secret() -> None:
    for objects in (render(_config(**_EVERYTHING)), render_trial(_config(**_EVERYTHING))):
        assert "Secret" not in {one["kind"] for one in objects}
        text = to_yaml(objects)
        assert not re.search("[0-9a-fA-F]{32}", text)
        assert "PRIVATE KEY" not in text


def test_a_trial_has_the_files_too() -> None:
    objects = render_trial(_config(**_EVERYTHING))
    cluster = of_kind(objects, "RayJob")["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        volumes = group["template"]["spec"]["volumes"]
        assert {volume["secret"]["secretName"] for volume in volumes if "secret" in volume} == set(_PATHS)
    assert of_kind(objects, "Certificate", "raypd-internal")


@pytest.mark.parametrize("kind", ["Certificate", "Issuer"])
def test_cert_manager_takes_its_objects(kind: str) -> None:
    objects: Any = [one for one in render(_config(**_EVERYTHING)) if one["apiVersion"] == "cert-manager.io/v1"]
    chosen = [one for one in objects if one["kind"] == kind]

    assert len(objects) == 4
    assert len(chosen) == 2
    assert [error.message for one in chosen for error in cert_manager_validator(kind).iter_errors(one)] == []
    chosen[0]["spec"]["isCa"] = True
    assert list(cert_manager_validator(kind).iter_errors(chosen[0])), "a field that it does not know is noticed"


def test_each_certificate_is_signed_by_an_issuer_that_is_there() -> None:
    objects = render(_config(**_EVERYTHING))
    authority, leaf = (_spec(objects, "Certificate", name) for name in ("raypd-internal-ca", "raypd-internal"))

    assert _spec(objects, "Issuer", authority["issuerRef"]["name"]) == {"selfSigned": {}}
    assert _spec(objects, "Issuer", leaf["issuerRef"]["name"]) == {"ca": {"secretName": authority["secretName"]}}
    assert leaf["secretName"] == "raypd-internal-tls"
    # An authority's key in a pod would let whoever reads it make certificates.
    assert authority["secretName"] not in _PATHS


def _spec(objects: Any, kind: str, name: str) -> Any:
    return of_kind(objects, kind, name)["spec"]


_USAGES = {"server auth": ExtendedKeyUsageOID.SERVER_AUTH, "client auth": ExtendedKeyUsageOID.CLIENT_AUTH}


class _Issued:
    """The certificates that cert-manager issues for the rendered objects: only what they ask for is in them."""

    def __init__(self, objects: Any) -> None:
        self._authority, self._leaf = (
            _spec(objects, "Certificate", name) for name in ("raypd-internal-ca", "raypd-internal")
        )
        self._authority_key, self._key = (
            ec.generate_private_key(ec.SECP256R1()),
            ec.generate_private_key(ec.SECP256R1()),
        )
        self._root_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._authority["commonName"])])

    def root(self) -> bytes:
        """A certificate of the authority; each call is a renewal with the same key."""
        assert self._authority["isCA"]
        assert self._authority["privateKey"]["rotationPolicy"] == "Never"
        builder = self._builder(self._root_name, self._authority_key.public_key(), self._authority["duration"])
        builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(self._authority_key.public_key()), False
        )
        return builder.sign(self._authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def material(self, root: bytes) -> TlsMaterial:
        """The three files of the Secret, under that root."""
        names = [x509.DNSName(name) for name in self._leaf["dnsNames"]]
        usages = [_USAGES[usage] for usage in self._leaf["usages"] if usage in _USAGES]
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._authority_key.public_key())
        certificate = (
            self._builder(x509.Name([]), self._key.public_key(), self._leaf["duration"])
            # Without a subject the names are critical (RFC 5280, 4.2.1.6).
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(identifier, critical=False)
            .sign(self._authority_key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        key = self._key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return TlsMaterial(root, certificate.public_bytes(pem), key)

    def _builder(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey, duration: str
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        hours = datetime.timedelta(hours=int(duration.removesuffix("h")))
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._root_name).public_key(public_key)
        return builder.serial_number(x509.random_serial_number()).not_valid_before(now).not_valid_after(now + hours)


def test_processes_can_use_what_cert_manager_issues_also_when_it_renews_the_authority() -> None:
    issued = _Issued(render(_config(**_EVERYTHING)))
    first, renewed = issued.root(), issued.root()
    assert first != renewed
    before = issued.material(first)
    InternalTls(before)
    # A pod that has the new root still meets certificates of before, and the other way about.
    InternalTls(TlsMaterial(renewed, before.certificate, before.key))
    InternalTls(TlsMaterial(first, issued.material(renewed).certificate, before.key))


def test_the_commands_that_make_the_secrets_are_said_and_draw_them() -> None:
    config = _config(
        internal_tls={"secret": "certs"}, cluster_secret={}, block_hash_key={"secret": "mine"}, namespace="n"
    )
    assert commands_for_secrets(config.kubernetes) == [
        "openssl rand -hex 32 | kubectl -n n create secret generic raypd-cluster-secret --from-file=secret=/dev/stdin",
        "openssl rand -hex 32 | kubectl -n n create secret generic mine --from-file=key=/dev/stdin",
        "kubectl -n n create secret generic certs --from-file=ca.crt --from-file=tls.crt --from-file=tls.key",
    ]
    assert commands_for_secrets(_config(internal_tls={"cert_manager": True}).kubernetes) == []


def test_the_command_line_says_which_secrets_the_pods_wait_for(tmp_path: Path) -> None:
    file = tmp_path / "raypd.yaml"
    file.write_text("kubernetes: {cluster_secret: {}}")
    result = CliRunner().invoke(app, ["manifests", "--config", str(file)])

    assert result.exit_code == 0
    assert "# the pods wait for a Secret: openssl rand -hex 32 | kubectl -n raypd create secret" in result.stderr
    assert "kubectl" not in result.stdout.replace("kubectl apply", "")
