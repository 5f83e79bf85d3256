"""docs/deploy.md names commands, options, files and settings that there are."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import kubernetes_validate  # type: ignore[import-untyped]  # it ships no types
import pytest
import typer.main
import yaml

from cluster.cli import app
from cluster.config import ClusterConfig

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "deploy.md").read_text()


def _commands() -> list[list[str]]:
    """Each call of raypd in the page, as words."""
    text = re.sub(r"\\\n\s*", "", _PAGE)
    calls = re.findall(r"(?:\braypd|python -m cluster) ([a-z][a-z-]*(?: [^\n`✓≈\u2013|;]*)?)", text)
    known = typer.main.get_command(app)
    names = set(getattr(known, "commands"))  # noqa: B009  # click's Group, whose type typer hides
    return [call.split() for call in calls if call.split()[0] in names]


def test_the_page_uses_most_commands() -> None:
    assert {words[0] for words in _commands()} >= {
        "doctor",
        "serve",
        "generate",
        "status",
        "drain",
        "manifests",
        "stop",
    }


@pytest.mark.parametrize("words", _commands(), ids=" ".join)
def test_every_option_of_a_command_exists(words: list[str]) -> None:
    commands = getattr(typer.main.get_command(app), "commands")  # noqa: B009  # as above
    known = {option for parameter in commands[words[0]].params for option in parameter.opts}

    assert [word for word in words if word.startswith("--") and word not in known] == []


def test_every_file_that_is_named_is_there() -> None:
    named = set(re.findall(r"\b(?:deploy|docs|tests|benchmarks)/[\w./-]*\w", _PAGE))

    assert [name for name in sorted(named) if "NAME" not in name and not (_ROOT / name).exists()] == []


def _settings() -> ClusterConfig:
    [block] = re.findall(r"^```yaml\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
    return ClusterConfig.model_validate(yaml.safe_load(block))


def test_the_settings_find_the_nodes_that_are_started() -> None:
    [head, *others] = [_node(words) for words in re.findall(r"^ray start (.*?) *≈", _PAGE, re.MULTILINE)]
    config = _settings()

    def found(labels: Mapping[str, str], resources: Mapping[str, float] = MappingProxyType({})) -> list[_Node]:
        return [one for one in (head, *others) if one.has(labels, resources)]

    prefill, decode = found(config.prefill.labels), found(config.decode.labels)
    ingress = found(config.ingress.labels, config.ingress.resources)
    assert [prefill, decode, ingress] == [[one] for one in others]
    assert found(config.controller.labels) == others


@dataclass(frozen=True)
class _Node:
    labels: Mapping[str, str]
    resources: Mapping[str, float]

    def has(self, labels: Mapping[str, str], resources: Mapping[str, float]) -> bool:
        """Values as Ray's label selectors have them: with ! in front, another one or none."""
        fits = [
            self.labels.get(key) != value[1:] if value.startswith("!") else self.labels.get(key) == value
            for key, value in labels.items()
        ]
        return all(fits) and all(self.resources.get(name, 0) >= amount for name, amount in resources.items())


def _node(arguments: str) -> _Node:
    words = shlex.split(arguments)
    options = dict(itertools.pairwise(words))
    labels = dict(pair.split("=") for pair in options.get("--labels", "").split(",") if pair)
    return _Node(labels, json.loads(options.get("--resources", "{}")))


def test_what_is_to_be_applied_is_what_kubernetes_takes() -> None:
    [claim] = [
        yaml.safe_load(text) for text in re.findall(r"<<'EOF'[^\n]*\n(.*?)^EOF$", _PAGE, re.MULTILINE | re.DOTALL)
    ]
    kubernetes_validate.validate(claim, "1.33", strict=True)

    overlays = (_ROOT / "deploy" / "kuberay" / "overlays").glob("gpu-*/raypd.yaml")
    claims = {yaml.safe_load(path.read_text())["kubernetes"]["models"]["claim"] for path in overlays}
    assert claims == {claim["metadata"]["name"]}


def test_every_overlay_is_described() -> None:
    overlays = {path.name for path in (_ROOT / "deploy" / "kuberay" / "overlays").iterdir()}

    assert [name for name in overlays if f"| `{name}` |" not in _PAGE] == []
