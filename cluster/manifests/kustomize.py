"""The manifests as a kustomize base with overlays; an overlay has JSON patches (RFC 6902) of the base's objects.

JSON patches are needed, since kustomize knows no merge keys of a RayCluster: a strategic-merge patch would replace the
whole list of worker groups.
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
"""The placeholder for the image in the files; kustomization.yaml of each overlay replaces it."""

_MADE_BY: Final = "# Made by `{command}`: change the settings, not this file.\n"
_KUSTOMIZATION: Final[Manifest] = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


def kustomize_files(base: ClusterConfig, overlays: Mapping[str, ClusterConfig], command: str) -> dict[Path, str]:
    """Return the text of each file, by its path relative to the directory that holds base/ and overlays/.

    overlays: the settings of each overlay, by its name
    command:  the command that makes the files, for a comment in each
    Raises InvalidConfig if an overlay lacks an object of the base, since these patches cannot remove objects.
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
    """Yield the operations of RFC 6902 that turn `before` into `after` when they are applied in order."""
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
    def key(one: Any) -> tuple[str, str]:  # Any: a rendered manifest, whose objects all have these fields
        return one["kind"], one["metadata"]["name"]

    return {key(one): one for one in objects}


def _without_image(config: ClusterConfig) -> ClusterConfig:
    return config.model_copy(update={"kubernetes": config.kubernetes.model_copy(update={"image": IMAGE_NAME})})


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _plain(text: str) -> str:
    """Remove the document separator at the begin of a file with one document."""
    return text.removeprefix("---\n")
