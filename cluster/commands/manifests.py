"""`raypd manifests`: a cluster as Kubernetes objects, printed, checked, or written as kustomize files."""

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
"""In base/ and in each directory of overlays/."""
_ANY_GPU: Final = "any"


@dataclass(frozen=True, slots=True)
class Options:
    """The command line's settings; None where there is none. gpu: also "any"."""

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
        # There are engines of the latter kinds only if they are asked for: a group with any setting of its own has one.
        optional = {"both": self.both or None, "encode": self.encode or None}
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
    """Print them, once they pass the checks. Raises InvalidConfig."""
    config = load_cluster_config(path, options.overrides(), looks_at_model=False)
    objects = render_trial(config) if is_trial else render(config)
    _refuse("manifests", find_mistakes(objects))
    if config.kubernetes.models is None and "model" in config.model_fields_set:
        note = f"no volume holds {config.model.model}, so the image has to: or give kubernetes.models, --models-claim"
        _note(note)
    for command in commands_for_secrets(config.kubernetes):
        _note(f"the pods wait for a Secret: {command}")
    if only_checks:
        console.print(f"{len(objects)} objects, nothing wrong", highlight=False)
        return
    sys.stdout.write(to_yaml(objects))


def check_files(paths: list[Path], console: Console) -> None:
    """Check YAML files, whoever wrote them. Raises InvalidConfig."""
    num_objects = 0
    for path in paths:
        try:
            text = sys.stdin.read() if str(path) == "-" else path.read_text()
            objects = [one for one in yaml.safe_load_all(text) if one is not None]
        except OSError as error:
            raise InvalidConfig(str(path), [f"cannot be read: {error.strerror}"]) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InvalidConfig(str(path), [f"is not YAML: {error}"]) from error
        _refuse(str(path), find_mistakes(objects) if objects else ["holds no object: has what was to write it failed?"])
        num_objects += len(objects)
    console.print(f"{num_objects} objects, nothing wrong", highlight=False)


def write_kustomization(directory: Path, console: Console, *, only_checks: bool) -> None:
    """Write base/ and overlays/ there, or only say which files are not as they would be. Raises InvalidConfig."""
    files = files_of(directory)
    stale = [path for path, text in files.items() if not _is_text(directory / path, text)]
    known = {directory / path for path in files}
    left = [path for path in sorted(directory.glob("overlays/*/*.yaml")) if path not in known]
    left = [path for path in left if path.name != SETTINGS_FILE]
    if only_checks:
        mistakes = [f"{path} is not what the settings give" for path in stale]
        mistakes += [f"{path.relative_to(directory)} is of no use any more" for path in left]
        _refuse(str(directory), mistakes)
        console.print(f"{len(files)} files, as the settings give them", highlight=False)
        return
    for path in stale:
        (directory / path).write_text(files[path])
        console.print(f"wrote {directory / path}", highlight=False)
    for path in left:
        path.unlink()
        console.print(f"removed {path}", highlight=False)


def files_of(directory: Path) -> dict[Path, str]:
    """Render the settings in a directory and its overlays; returns texts by path from there. Raises InvalidConfig."""
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
    """Say beside the manifests what else is needed."""
    Console(stderr=True).print(f"# {text}", highlight=False, soft_wrap=True)


def _refuse(source: str, mistakes: list[str]) -> None:
    if mistakes:
        raise InvalidConfig(source, mistakes)
