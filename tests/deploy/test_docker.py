"""The image, as far as it can be tried without a container engine: its Dockerfile's form, and its installation."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tools.install_environment import uv_environment, uv_options

_ROOT = Path(__file__).parents[2]
_DOCKER = _ROOT / "deploy" / "docker"
_DOCKERFILE = (_DOCKER / "Dockerfile").read_text()
_NOT_IN_IMAGES = {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}
_NO_NETWORK = re.compile("error sending request for url|dns error")


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
    lines = [*(_DOCKER / "install.sh").read_text().splitlines(), *_DOCKERFILE.splitlines()]
    installs = [line for line in lines if "pip install" in line]
    assert len(installs) == 3
    assert [line for line in installs if "--constraint constraints.txt" not in line and "--no-deps" not in line] == []


@pytest.mark.parametrize("arguments", [["dependencies", "rocm"], ["everything"]])
def test_what_the_installation_does_not_know_it_refuses(arguments: list[str]) -> None:
    result = subprocess.run(
        ["sh", str(_DOCKER / "install.sh"), *arguments], capture_output=True, text=True, timeout=60, check=False
    )

    assert result.returncode == 2
    assert "it can be" in result.stderr


@pytest.mark.more
@pytest.mark.timeout(900)
def test_the_installation_works_in_an_empty_environment(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """The RUN lines of the CPU image, in the order of the file, in a directory that holds what it has copied so far.

    As a builder of images would, it keeps what all packages but raypd made of an empty environment until a file changes
    that they were installed by.
    """
    cache = getattr(pytestconfig, "cache", None)
    layers = tmp_path if cache is None else cache.mkdir("image")
    source, environment = tmp_path / "src", layers / "environment"
    source.mkdir()
    shutil.rmtree(environment, ignore_errors=True)
    pip_settings = _run(sys.executable, "-m", "pip", "config", "list", variables=dict(os.environ))
    variables = {name: value for name, value in uv_environment(pip_settings).items() if name not in _NOT_IN_IMAGES}
    python = str(environment / "bin" / "python")
    variables |= {"PYTHON": python, "VARIANT": "cpu", "UV_NO_PROGRESS": "1"}
    variables["PATH"] = os.pathsep.join([str(_make_uv(tmp_path / "bin", pip_settings)), variables["PATH"]])
    # Like `python -m venv`, in a tenth of the time; Ray asks for it.
    variables["VIRTUALENV_OVERRIDE_APP_DATA"] = str(tmp_path / "seeds")
    _run(sys.executable, "-m", "virtualenv", "--no-periodic-update", environment, variables=variables)
    stage = _DOCKERFILE.partition("AS build")[2].partition("\nFROM ")[0]
    not_run = []
    for instruction, words in re.findall(r"^(COPY|RUN) (.*)$", stage, re.MULTILINE):
        if instruction == "COPY":
            _copy(words.split(), source)
        elif "install.sh dependencies" in words:
            _install_once(words, source, variables, environment)
        elif "install.sh" in words:
            _install(words, source, variables)
        else:
            not_run.append(words)
    assert not_run == ["python -m venv /opt/raypd && python -m pip install --constraint constraints.txt uv"]

    _share_byte_code(environment)

    # Nothing is missing or of a version that another package cannot do with, but for a gigabyte for GPUs.
    check = _run(python, "-m", "pip", "check", variables=variables, may_fail=True)
    assert re.fullmatch(r"xgrammar \S+ requires triton, which is not installed\.\n", check)
    # matplotlib comes with the extra `plan`, which clusters do without.
    missing = _run(python, "-c", _NOT_INSTALLED, variables=variables, directory=tmp_path)
    assert missing == "['cupy', 'matplotlib', 'triton']\n"
    # Commands, protocol files and the demo model have come along, and run.
    raypd = environment / "bin" / "raypd"
    said = _run(raypd, "manifests", "--check", variables=variables, directory=tmp_path)
    assert said == "16 objects, nothing wrong\n"
    said = _run(raypd, "doctor", "--gpu", "h200", variables=variables, directory=tmp_path)
    assert said.startswith("ok       model files: demo_model: 4 million parameters")
    allowed = json.loads(_run(python, "-c", _GRAMMAR, variables=variables, directory=tmp_path))
    assert {"a", "b"} <= set(allowed)
    assert all(re.fullmatch("[ab]{1,2}", token) for token in allowed)
    shutil.rmtree(environment)


def _make_uv(directory: Path, pip_settings: str) -> Path:
    """Make a uv that looks for packages where pip does; returns its directory."""
    options = shlex.join(uv_options(pip_settings))
    directory.mkdir()
    (directory / "uv").write_text(f'#!/bin/sh\nexec {sys.executable} -m uv "$@" {options}\n')
    (directory / "uv").chmod(0o755)
    return directory


def _share_byte_code(environment: Path) -> None:
    """Share the byte code of the same files here, wherever uv has linked both to its cache: compiling takes long.

    Python looks at a file's size and time before it takes its byte code for it.
    """
    ours, theirs = (sysconfig.get_path("purelib", vars={"base": str(base)}) for base in (sys.prefix, environment))
    for directory, _, names in os.walk(ours):
        target = theirs + directory.removeprefix(ours)
        if directory.endswith("__pycache__") and Path(target).parent.exists():
            Path(target).mkdir(exist_ok=True)
            for name in names:
                with contextlib.suppress(OSError):
                    os.link(Path(directory, name), Path(target, name))


def _install_once(command: str, source: Path, variables: dict[str, str], environment: Path) -> None:
    """Or take what the same files and the same command made of the same Python before."""
    files = [path.read_bytes() for path in sorted(source.iterdir())]
    key = hashlib.sha256(b"\0".join([sys.version.encode(), command.encode(), *files])).hexdigest()[:16]
    layer = environment.parent / f"dependencies-{key}"
    if not layer.exists():
        for outdated in environment.parent.glob("dependencies-*"):
            shutil.rmtree(outdated)
        _install(command, source, variables)
        environment.rename(layer)
    shutil.rmtree(environment, ignore_errors=True)
    # Whatever comes on top makes files of its own, and leaves the layer's alone.
    shutil.copytree(layer, environment, symlinks=True, copy_function=os.link)


_NOT_INSTALLED = """
import ast, importlib.util, pathlib
missing = set()
for floor in ("cluster", "actors", "kv_transfer"):
    directory = pathlib.Path(importlib.util.find_spec(floor).submodule_search_locations[0])
    assert "site-packages" in directory.parts
    for path in directory.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            missing |= {name.partition(".")[0] for name in names}
print(sorted(name for name in missing if importlib.util.find_spec(name) is None))
"""
"""Prints what raypd's installed code imports anywhere, and nobody has installed."""


_GRAMMAR = """
import importlib.util, json, threading
from actors.config import GrammarConfig
from actors.core.requests.sampling_params import StructuredOutputParams
from actors.model.grammar.manager import XGrammarManager
import cluster.api.process
from cluster.config import DEMO_MODEL
from cluster.text.model_tokenizer import ModelTokenizer
assert importlib.util.find_spec("triton") is None
tokenizer = ModelTokenizer.from_directory(DEMO_MODEL, use_fastokens=True).backend
num_tokens = tokenizer.get_vocab_size()
is_ready = threading.Event()
manager = XGrammarManager.of_checkpoint(
    GrammarConfig(),
    DEMO_MODEL,
    vocab_size=num_tokens,
    stop_token_ids=(tokenizer.token_to_id("<|eos|>"),),
    on_ready=is_ready.set,
)
manager.start_compiling("request", StructuredOutputParams("regex", "[ab]{2}"), ())
assert is_ready.wait(250)
assert manager.take_compiled() == {"request": None}
[words] = manager.fill_bitmask(["request"]).tolist()
manager.shutdown()
print(json.dumps([tokenizer.decode([i]) for i in range(num_tokens) if words[i // 32] >> i % 32 & 1]))
"""
"""Imports an ingress. Prints the tokens that an answer which has to be [ab]{2} may begin with: xgrammar does without
triton."""


def _run(*command: str | Path, variables: dict[str, str], directory: Path | None = None, may_fail: bool = False) -> str:
    result = subprocess.run(
        command, env=variables, cwd=directory, capture_output=True, text=True, timeout=300, check=False
    )
    assert may_fail or result.returncode == 0, result.stdout + result.stderr
    return result.stdout


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
