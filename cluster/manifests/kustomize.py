"""The same manifests as a kustomize base with overlays: each overlay is the JSON patch (RFC 6902) from the base to it.

A strategic-merge patch would replace the whole list of worker groups: to kustomize a RayCluster is just some object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cluster.config import ClusterConfig
from cluster.errors import InvalidConfig
from cluster.manifests.objects import Manifest, to_yaml
from cluster.manifests.render import image_of, render, render_trial
from cluster.parameters.json_types import JSON

IMAGE_NAME: Final = "raypd"
"""The image's name in the files; each overlay's kustomization.yaml says which image that is."""

_MADE_BY: Final = "# Made by `{command}`: change the settings, not this file.\n"
_KUSTOMIZATION: Final[Manifest] = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


def kustomize_files(base: ClusterConfig, overlays: Mapping[str, ClusterConfig], command: str) -> dict[Path, str]:
    """The text of each file, by its path from the directory that holds base/ and overlays/.

    command: that makes them, for whoever looks into one
    Raises InvalidConfig if an overlay lacks an object of the base: a patch cannot take one away here.
    """
    header = _MADE_BY.format(command=command)
    base_objects = _by_key(render(_without_image(base)))
    files = {
        Path("base/manifests.yaml"): header + to_yaml(base_objects.values()),
        Path("base/kustomization.yaml"): header + _kustomization(["manifests.yaml"]),
        Path("trial/manifests.yaml"): header + to_yaml(render_trial(_without_image(base))),
        Path("trial/kustomization.yaml"): header + _kustomization(["manifests.yaml"], images=_images(base)),
    }
    for name, config in overlays.items():
        directory = Path("overlays") / name
        for file_name, text in _overlay(name, config, base_objects).items():
            files[directory / file_name] = header + text
    return files


def json_patch(before: JSON, after: JSON, path: str = "") -> Iterator[Manifest]:
    """Operations, by RFC 6902, that make `after` out of `before`; applied in order."""
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() - after.keys():
            yield {"op": "remove", "path": f"{path}/{_escaped(key)}"}
        for key, value in after.items():
            if key in before:
                yield from json_patch(before[key], value, f"{path}/{_escaped(key)}")
            else:
                yield {"op": "add", "path": f"{path}/{_escaped(key)}", "value": value}
    elif isinstance(before, list) and isinstance(after, list):
        common = min(len(before), len(after))
        for index in range(common):
            yield from json_patch(before[index], after[index], f"{path}/{index}")
        for index in range(len(before) - 1, common - 1, -1):
            yield {"op": "remove", "path": f"{path}/{index}"}
        for value in after[common:]:
            yield {"op": "add", "path": f"{path}/-", "value": value}
    else:
        yield {"op": "replace", "path": path, "value": after}


def _overlay(name: str, config: ClusterConfig, base: Mapping[tuple[str, str], Manifest]) -> dict[str, str]:
    objects = _by_key(render(_without_image(config)))
    if missing := base.keys() - objects.keys():
        raise InvalidConfig(f"overlay {name}", [f"it lacks {kind}/{which} of the base" for kind, which in missing])
    new = [one for key, one in objects.items() if key not in base]
    files: dict[str, str] = {}
    patches: list[JSON] = []
    for (kind, object_name), before in base.items():
        operations: list[JSON] = list(json_patch(before, objects[kind, object_name]))
        if not operations:
            continue
        file_name = f"{kind.lower()}-{object_name}.patch.yaml"
        files[file_name] = _plain(to_yaml([operations]))
        patches.append({"path": file_name, "target": _target(before)})
    resources: list[JSON] = ["../../base"]
    if new:
        files["more.yaml"] = to_yaml(new)
        resources.append("more.yaml")
    further: dict[str, JSON] = {"patches": patches} if patches else {}
    files["kustomization.yaml"] = _kustomization(resources, **further, images=_images(config))
    return files


def _kustomization(resources: list[JSON], **further: JSON) -> str:
    kustomization: JSON = {**_KUSTOMIZATION, "resources": resources, **further}
    return _plain(to_yaml([kustomization]))


def _images(config: ClusterConfig) -> JSON:
    repository, _, tag = image_of(config).rpartition(":")
    return [{"name": IMAGE_NAME, "newName": repository, "newTag": tag}]


def _target(one: Manifest) -> Manifest:
    group, slash, version = str(one["apiVersion"]).rpartition("/")
    metadata = one["metadata"]
    assert isinstance(metadata, dict)
    target: Manifest = {"group": group} if slash else {}
    return target | {"version": version, "kind": one["kind"], "name": metadata["name"]}


def _by_key(objects: Sequence[Manifest]) -> dict[tuple[str, str], Manifest]:
    def key(one: Any) -> tuple[str, str]:  # its form is known: it has just been rendered
        return one["kind"], one["metadata"]["name"]

    return {key(one): one for one in objects}


def _without_image(config: ClusterConfig) -> ClusterConfig:
    return config.model_copy(update={"kubernetes": config.kubernetes.model_copy(update={"image": IMAGE_NAME})})


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _plain(text: str) -> str:
    """Strip the separator of documents from a file that has one document."""
    return text.removeprefix("---\n")
