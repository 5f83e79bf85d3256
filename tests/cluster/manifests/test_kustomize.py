"""deploy/kuberay/ is what `raypd manifests` gives, and kustomize makes of it what the renderer does.

Tests of cluster/commands/manifests.py.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cluster.commands.manifests import files_of
from cluster.manifests.kustomize import json_patch
from cluster.manifests.render import render_trial
from cluster.parameters.json_types import JSON
from tests.cluster.manifests.deployments import KUBERAY, OVERLAYS, rendered, settings


def test_the_committed_files_are_what_their_settings_give() -> None:
    files = files_of(KUBERAY)
    stale = [str(path) for path, text in files.items() if (KUBERAY / path).read_text() != text]
    written_by_hand = {KUBERAY / "base" / "raypd.yaml", *KUBERAY.glob("overlays/*/raypd.yaml")}
    there = set(KUBERAY.rglob("*.yaml"))

    assert stale == [], "run `raypd manifests --kustomize deploy/kuberay`"
    assert there == written_by_hand | {KUBERAY / path for path in files}
    assert {path.name for path in (KUBERAY / "overlays").iterdir()} == set(OVERLAYS)


def _load_all(text: str) -> list[Any]:
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def _load(text: str) -> Any:
    [document] = _load_all(text)
    return document


def _by_name(objects: Any) -> dict[tuple[str, str], Any]:
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def _built(directory: str) -> dict[tuple[str, str], Any]:
    result = subprocess.run(
        ["kubectl", "kustomize", str(KUBERAY / directory)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return _by_name(_load_all(result.stdout))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here; the next test does not need it")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_builds_what_the_renderer_gives(overlay: str) -> None:
    assert _built(f"overlays/{overlay}") == _by_name(rendered(overlay))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here")
def test_kubectl_builds_the_trial() -> None:
    assert _built("trial") == _by_name(render_trial(settings("cpu-demo")))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_patches_lead_from_the_base_to_the_overlay(overlay: str) -> None:
    directory = KUBERAY / "overlays" / overlay
    objects = _by_name(_load_all((KUBERAY / "base" / "manifests.yaml").read_text()))
    kustomization = _load((directory / "kustomization.yaml").read_text())
    for patch in kustomization.get("patches", []):
        target = patch["target"]
        key = target["kind"], target["name"]
        assert objects[key]["apiVersion"] == "/".join(filter(None, [target.get("group"), target["version"]]))
        objects[key] = _patched(objects[key], _load((directory / patch["path"]).read_text()))
    if "more.yaml" in kustomization["resources"]:
        objects |= _by_name(_load_all((directory / "more.yaml").read_text()))
    [image] = kustomization["images"]
    text = yaml.safe_dump([*objects.values()]).replace(
        f"image: {image['name']}\n", f"image: {image['newName']}:{image['newTag']}\n"
    )

    assert _by_name(_load(text)) == _by_name(rendered(overlay))


_json = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["a", "b"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b/c", "d~e", "0"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(_json, _json)
def test_a_patch_leads_from_any_document_to_any_other(before: JSON, after: JSON) -> None:
    assert _patched(before, list(json_patch(before, after))) == after


def _patched(document: Any, operations: Any) -> Any:
    """RFC 6902's add, remove and replace, written from its text."""
    root = {"document": copy.deepcopy(document)}
    for operation in operations:
        parent: Any = root
        path: list[str] = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        *way, last = ["document", *path]
        for part in way:
            parent = parent[int(part)] if isinstance(parent, list) else parent[part]
        if isinstance(parent, list):
            _change_list(parent, last, operation)
        elif operation["op"] == "remove":
            del parent[last]
        else:
            assert operation["op"] == "add" or last in parent
            parent[last] = operation["value"]
    return root["document"]


def _change_list(parent: list[Any], place: str, operation: Any) -> None:
    if operation["op"] == "remove":
        del parent[int(place)]
    elif operation["op"] == "replace":
        parent[int(place)] = operation["value"]
    else:
        parent.insert(len(parent) if place == "-" else int(place), operation["value"])
