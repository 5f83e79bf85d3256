"""`raypd manifests`: print a cluster's Kubernetes objects, check them, or write them as kustomize files."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from rich.console import Console

from cluster.config import ClusterConfig, load_cluster_config
from cluster.errors import InvalidConfig
from cluster.manifests.inside import commands_for_secrets
from cluster.manifests.kustomize import kustomize_files
from cluster.manifests.objects import to_yaml
from cluster.manifests.render import render, render_trial
from cluster.manifests.rules import find_mistakes

SETTINGS_FILE: Final = "raypd.yaml"
"""The name of the settings file in base/ and in each directory of overlays/."""
_ANY_GPU: Final = "any"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `raypd manifests`; None for an option that was not given. gpu may be "any"."""

    prefill: int | None = None
    decode: int | None = None
    both: int | None = None
    encode: int | None = None
    tp: int | None = None
    gpu: str | None = None
    model: str | None = None
    models_claim: str | None = None
    image: str | None = None
    namespace: str | None = None

    def overrides(self) -> dict[str, Any]:
        """Return the overrides as load_cluster_config() takes them."""
        # A group without a count has one engine, so both and encode get no GPUs unless engines of them are wanted.
        optional = {"both": self.both, "encode": self.encode}
        counts = {"prefill": self.prefill, "decode": self.decode, **optional}
        wanted = {role for role in counts if self.gpu is not None and (role not in optional or optional[role])}
        kubernetes = {
            "gpu": None if self.gpu == _ANY_GPU else self.gpu,
            "models": {"claim": self.models_claim},
            "image": self.image,
            "namespace": self.namespace,
        }
        return {
            **{role: {"count": counts[role], "num_gpus": 1 if role in wanted else None} for role in counts},
            "parallel": {"tensor_parallel_size": self.tp},
            "model": {"model": self.model},
            "kubernetes": kubernetes,
        }


def print_manifests(
    path: Path | None, options: Options, console: Console, *, is_trial: bool, only_checks: bool
) -> None:
    """Print a cluster's manifests, once they pass the checks. Raises InvalidConfig.

    is_trial:    print the trial RayJob instead
    only_checks: print only the number of objects
    """
    config = load_cluster_config(path, options.overrides(), looks_at_model=False)
    objects = render_trial(config) if is_trial else render(config)
    _refuse("manifests", find_mistakes(objects))
    if config.kubernetes.models is None and "model" in config.model_fields_set:
        note = f"no volume is mounted, so the image has to contain {config.model.model}; --models-claim mounts one"
        _note(f"{note} (kubernetes.models)")
    for command in commands_for_secrets(config.kubernetes):
        _note(f"the pods wait for a Secret: {command}")
    if only_checks:
        console.print(f"{len(objects)} objects, nothing wrong", highlight=False)
        return
    sys.stdout.write(to_yaml(objects))


def check_files(paths: list[Path], console: Console) -> None:
    """Check the objects in YAML files, whether raypd made the files or not. Raises InvalidConfig."""
    num_objects = 0
    for path in paths:
        try:
            text = sys.stdin.read() if str(path) == "-" else path.read_text()
            objects = [one for one in yaml.safe_load_all(text) if one is not None]
        except OSError as error:
            raise InvalidConfig(str(path), [f"cannot be read: {error.strerror}"]) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InvalidConfig(str(path), [f"is not YAML: {error}"]) from error
        _refuse(
            str(path), find_mistakes(objects) if objects else ["holds no object: did the program that wrote it fail?"]
        )
        num_objects += len(objects)
    console.print(f"{num_objects} objects, nothing wrong", highlight=False)


def write_kustomization(directory: Path, console: Console, *, only_checks: bool) -> None:
    """Write the kustomize files of base/ and overlays/ in a directory, from the settings there. Raises InvalidConfig.

    only_checks: write nothing, and raise InvalidConfig with the files that would change
    """
    files = files_of(directory)
    stale = [path for path, text in files.items() if not _is_text(directory / path, text)]
    known = {directory / path for path in files}
    left = [path for path in sorted(directory.glob("overlays/*/*.yaml")) if path not in known]
    left = [path for path in left if path.name != SETTINGS_FILE]
    if only_checks:
        mistakes = [f"{path} differs from what the settings give" for path in stale]
        mistakes += [f"{path.relative_to(directory)} is not used any more" for path in left]
        _refuse(str(directory), mistakes)
        console.print(f"{len(files)} files, all up to date with the settings", highlight=False)
        return
    for path in stale:
        (directory / path).write_text(files[path])
        console.print(f"wrote {directory / path}", highlight=False)
    for path in left:
        path.unlink()
        console.print(f"removed {path}", highlight=False)


def files_of(directory: Path) -> dict[Path, str]:
    """Render the settings in base/ and overlays/ of a directory. Raises InvalidConfig.

    Returns the text of each file by its path, relative to the directory.
    """
    base = _load(directory / "base" / SETTINGS_FILE)
    settings = sorted(directory.glob(f"overlays/*/{SETTINGS_FILE}"))
    overlays = {path.parent.name: _load(path) for path in settings}
    for name, config in {"base": base, **overlays}.items():
        _refuse(name, find_mistakes(render(config)))
    return kustomize_files(base, overlays, "raypd manifests --kustomize")


def _load(path: Path) -> ClusterConfig:
    return load_cluster_config(path, {}, looks_at_model=False)


def _is_text(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


def _note(text: str) -> None:
    """Print a note to standard error, as a comment of YAML."""
    Console(stderr=True).print(f"# {text}", highlight=False, soft_wrap=True)


def _refuse(source: str, mistakes: list[str]) -> None:
    if mistakes:
        raise InvalidConfig(source, mistakes)
