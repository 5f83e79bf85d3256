"""docs/deploy.md names commands, options, files and settings that there are."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_the_settings_are_settings(tmp_path: Path) -> None:
    [block] = re.findall(r"^```yaml\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
    config = ClusterConfig.model_validate(yaml.safe_load(block))

    assert config.prefill.labels == {"raypd.io/role": "prefill"}


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
