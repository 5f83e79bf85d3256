"""The parts that commands share: options, settings, and how they end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from cluster.config import ClusterConfig, load_cluster_config
from cluster.errors import ClusterError, InvalidConfig

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="File of cluster settings (YAML); see `raypd config`.")
]
RayAddress = Annotated[
    str | None, typer.Option("--ray-address", help="Address of a running Ray cluster, as host:port.")
]

Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Longest time to wait for the ingress's answer, in seconds.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until the change is done.")]
WaitTimeout = Annotated[
    float, typer.Option("--wait-timeout", min=0, help="Longest time to wait for the change, in seconds.")
]
Address = Annotated[
    str,
    typer.Option(
        "--address", "-a", help="Address of the ingress, as host:port; several addresses are separated by commas."
    ),
]
Parameters = Annotated[
    list[str] | None,
    typer.Option("--param", "-p", help="Sampling parameter, as name=value: -p top_p=0.9 -p 'stop=[\"\\n\"]'."),
]

_INTERRUPTED = 130
"""By convention: 128 and the signal's number."""


def load(path: Path | None, overrides: dict[str, Any], *, looks_at_model: bool = True) -> ClusterConfig:
    """The settings; ends the process if they cannot be used. See load_cluster_config()."""
    try:
        return load_cluster_config(path, overrides, looks_at_model=looks_at_model)
    except InvalidConfig as error:
        fail(error, exit_code=2)


def run(command: Any) -> None:  # a callable without arguments, whose result nobody needs
    """Do it; a ClusterError is said, and ends the process."""
    try:
        command()
    except ClusterError as error:
        fail(error, exit_code=1)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def fail(error: ClusterError, exit_code: int) -> NoReturn:
    """Say it, and end the process."""
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"raypd: {error}")
    sys.exit(exit_code)
