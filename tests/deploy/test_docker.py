"""The image, as far as it can be tried without a container engine: its Dockerfile's form, and its installation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_DOCKER = _ROOT / "deploy" / "docker"
_DOCKERFILE = (_DOCKER / "Dockerfile").read_text()
_NO_NETWORK = re.compile(
    "Failed to establish a new connection|Temporary failure in name resolution|NameResolutionError"
)


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    result = subprocess.run([hadolint, _DOCKER / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)

    assert (result.returncode, result.stdout) == (0, "")


def _copied() -> list[tuple[list[str], str]]:
    """The COPY lines that take from the repository, in order: what, and whereto in /src."""
    lines = re.findall(r"^COPY (?!--from)(.*)$", _DOCKERFILE, re.MULTILINE)
    return [(words[:-1], words[-1]) for words in map(str.split, lines)]


def test_everything_that_is_copied_is_there_and_not_kept_back() -> None:
    ignored = (_DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = {name for names, _ in _copied() for name in names}

    assert ignored.index("*") < min(ignored.index(f"!{name}") for name in allowed)
    assert copied == allowed
    assert [name for name in copied if not (_ROOT / name).exists()] == []


def test_the_image_runs_as_somebody_who_may_do_nothing_and_says_how_it_is() -> None:
    runtime = _DOCKERFILE.partition("AS runtime")[2]

    assert re.search(r"^USER 1000:1000$", runtime, re.MULTILINE)
    assert runtime.index("USER") < runtime.index("HEALTHCHECK") < runtime.index("ENTRYPOINT")
    assert "sudo" not in _DOCKERFILE


def test_base_images_have_a_full_version_and_packages_are_pinned() -> None:
    [base] = re.findall(r"^ARG PYTHON_IMAGE=(.*)$", _DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    assert set(re.findall(r"^FROM (\S+)", _DOCKERFILE, re.MULTILINE)) == {"${PYTHON_IMAGE}"}
    installs = [line for line in (_DOCKER / "install.sh").read_text().splitlines() if "-m pip install" in line]
    assert [line for line in installs if "--constraint constraints.txt" not in line and "--no-deps" not in line] == []


@pytest.mark.parametrize("arguments", [["dependencies", "rocm"], ["everything"]])
def test_what_the_installation_does_not_know_it_refuses(arguments: list[str]) -> None:
    result = subprocess.run(
        ["sh", str(_DOCKER / "install.sh"), *arguments], capture_output=True, text=True, timeout=60, check=False
    )

    assert result.returncode == 2
    assert "it can be" in result.stderr


@pytest.mark.slow  # 80 s of processor time, and gigabytes: `make test` has ten minutes of two cores.
@pytest.mark.timeout(1200)
def test_the_installation_works_in_an_empty_environment(tmp_path: Path) -> None:
    """The RUN lines of the CPU image, in the order of the file, in a directory that holds what it has copied so far."""
    source, environment = tmp_path / "src", tmp_path / "venv"
    source.mkdir()
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=120)
    variables = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    # Byte code of everything, of which little is imported here, would cost half as much again.
    variables |= {"PYTHON": str(environment / "bin" / "python"), "VARIANT": "cpu", "PIP_NO_COMPILE": "1"}
    stage = _DOCKERFILE.partition("AS build")[2].partition("\nFROM ")[0]
    for instruction, words in re.findall(r"^(COPY|RUN) (.*)$", stage, re.MULTILINE):
        if instruction == "COPY":
            _copy(words.split(), source)
        elif "install.sh" in words:
            _install(words, source, variables)

    installed = environment / "bin"
    said = subprocess.run(
        [installed / "raypd", "manifests", "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=tmp_path,
    )
    assert said.stdout == "14 objects, nothing wrong\n"
    version = subprocess.run([installed / "ray", "--version"], capture_output=True, text=True, timeout=120, check=True)
    assert version.stdout.startswith("ray, version 2.60")
    # Every protocol file and the demo model have come along.
    code = "import cluster.ingress.process, cluster.config as c; assert (c.DEMO_MODEL / 'model.safetensors').exists()"
    subprocess.run([installed / "python", "-c", code], check=True, timeout=120, cwd=tmp_path)
    # 1.5 GB, of which the temporary directories of three runs are kept.
    shutil.rmtree(environment)


def _install(command: str, source: Path, variables: dict[str, str]) -> None:
    result = subprocess.run(
        command, shell=True, cwd=source, env=variables, capture_output=True, text=True, timeout=900, check=False
    )
    if result.returncode != 0 and _NO_NETWORK.search(result.stderr):
        pytest.skip("no package index can be reached, which the image is installed from")
    assert result.returncode == 0, result.stdout + result.stderr


def _copy(words: list[str], source: Path) -> None:
    *names, target = words
    for name in names:
        if (_ROOT / name).is_dir():
            shutil.copytree(_ROOT / name, source / target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(_ROOT / name, source / target)
