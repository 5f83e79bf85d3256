"""`raypd manifests` as it is typed.

Tests of cluster/manifests/trial.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli import app
from tests.cluster.manifests.deployments import KUBERAY, of_kind, worker_groups

_ENGINES = ["manifests", "--prefill", "4", "--decode", "8", "--gpu", "h200", "--tp", "2", "--model", "/models/m"]
_ISSUE = [*_ENGINES, "--models-claim", "weights"]


def test_a_cluster_is_printed_as_the_command_line_says() -> None:
    result = CliRunner().invoke(app, [*_ISSUE, "--image", "registry.example/raypd:1", "--namespace", "llm"])
    objects = list(yaml.safe_load_all(result.output))
    groups = worker_groups(objects)

    assert result.exit_code == 0
    assert {name: group["replicas"] for name, group in groups.items()} == {"ingress": 1, "prefill": 4, "decode": 8}
    assert groups["decode"]["resources"] == {"CPU": "2", "GPU": "2"}
    assert groups["decode"]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert of_kind(objects, "RayCluster")["metadata"]["namespace"] == "llm"
    assert of_kind(objects, "Namespace")["metadata"]["name"] == "llm"


def test_no_engines_of_a_role_on_the_command_line_go_before_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("{both: {count: 3}, encode: {count: 1}}")
    result = CliRunner().invoke(app, [*_ENGINES, "--config", str(file), "--both", "0", "--encode", "0"])

    assert result.exit_code == 0, result.output
    assert worker_groups(list(yaml.safe_load_all(result.stdout))).keys() == {"ingress", "prefill", "decode"}


def test_the_checkpoint_comes_from_a_claim_that_every_pod_mounts() -> None:
    objects = list(yaml.safe_load_all(CliRunner().invoke(app, _ISSUE).output))
    groups = worker_groups(objects) | {"head": of_kind(objects, "RayCluster")["spec"]["headGroupSpec"]}

    for group in groups.values():
        pod = group["template"]["spec"]
        assert {
            "name": "models",
            "persistentVolumeClaim": {"claimName": "weights", "readOnly": True},
        } in pod["volumes"]
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in pod["containers"][0]["volumeMounts"]


def test_a_checkpoint_that_no_volume_holds_is_said() -> None:
    result = CliRunner().invoke(app, [*_ENGINES, "--check"])

    assert (result.exit_code, result.stdout) == (0, "17 objects, nothing wrong\n")
    assert result.stderr == (
        "# no volume is mounted, so the image has to contain /models/m; --models-claim mounts one (kubernetes.models)\n"
    )
    assert CliRunner().invoke(app, ["manifests", "--check"]).stderr == ""


def test_engines_for_images_are_rendered_too() -> None:
    result = CliRunner().invoke(app, [*_ISSUE, "--encode", "2"])
    groups = worker_groups(list(yaml.safe_load_all(result.output)))

    assert groups["encode"]["replicas"] == 2
    assert groups["encode"]["resources"]["GPU"] == "2"


def test_checking_says_how_much_there_is() -> None:
    result = CliRunner().invoke(app, [*_ISSUE, "--check"])

    assert (result.exit_code, result.output) == (0, "17 objects, nothing wrong\n")


def test_files_of_others_are_checked_too(tmp_path: Path) -> None:
    cluster = of_kind(yaml.safe_load_all(CliRunner().invoke(app, _ISSUE).output), "RayCluster")
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump(cluster))
    del cluster["spec"]["workerGroupSpecs"][1]["minReplicas"]
    bad.write_text(yaml.safe_dump(cluster))

    assert CliRunner().invoke(app, ["manifests", "--check", str(good)]).output == "1 objects, nothing wrong\n"
    assert CliRunner().invoke(app, ["manifests", "--check", "-"], input=good.read_text()).exit_code == 0
    result = CliRunner().invoke(app, ["manifests", "--check", str(good), str(bad)])
    assert result.exit_code == 1
    assert f"{bad}: RayCluster/raypd: prefill: minReplicas and maxReplicas must both be set" in result.output


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (b"", "-: holds no object: did the program that wrote it fail?"),
        (b"# nothing\n---\n", "-: holds no object: did the program that wrote it fail?"),
        (b"error: no such overlay", "-: number 1 is no Kubernetes object: it needs apiVersion and kind"),
        (b"kind: Job\n", "-: number 1 is no Kubernetes object: it needs apiVersion and kind"),
        (b"a: [", "-: is not YAML: "),
        (b"\xff\xfe", "-: is not YAML: "),
    ],
)
def test_what_holds_no_objects_does_not_pass(text: bytes, mistake: str) -> None:
    result = CliRunner().invoke(app, ["manifests", "--check", "-"], input=text)

    assert result.exit_code == 1
    assert mistake in result.output


def test_a_trial_is_a_ray_job() -> None:
    result = CliRunner().invoke(app, ["manifests", "--trial"])

    assert of_kind(yaml.safe_load_all(result.output), "RayJob")["spec"]["entrypoint"] == (
        "raypd demo --config /etc/raypd/cluster.yaml"
    )


def test_files_that_are_not_as_their_settings_say_are_named_and_written_anew(tmp_path: Path) -> None:
    directory = tmp_path / "kuberay"
    shutil.copytree(KUBERAY, directory)
    kustomize = ["manifests", "--kustomize", str(directory)]
    assert CliRunner().invoke(app, [*kustomize, "--check"]).exit_code == 0

    (directory / "overlays" / "rdma" / "more.yaml").write_text("spoilt")
    (directory / "overlays" / "rdma" / "old.patch.yaml").write_text("[]")
    result = CliRunner().invoke(app, [*kustomize, "--check"])
    assert result.exit_code == 1
    assert "overlays/rdma/more.yaml differs from what the settings give" in result.output
    assert "overlays/rdma/old.patch.yaml is not used any more" in result.output

    assert CliRunner().invoke(app, kustomize).exit_code == 0
    assert CliRunner().invoke(app, [*kustomize, "--check"]).exit_code == 0


def test_a_gpu_that_is_not_known_is_refused_with_those_that_are() -> None:
    result = CliRunner().invoke(app, ["manifests", "--gpu", "h300"])

    assert result.exit_code == 1
    assert "kubernetes.gpu = 'h300': Input should be 'a100', 'h100', 'h200', 'b200' or 'l40s'" in result.output
