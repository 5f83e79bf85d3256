"""The options that several commands have, how commands load the settings, and how commands report errors and exit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from rich.console import Console

from cluster.config import ClusterConfig, find_checkpoint_mistakes, load_cluster_config
from cluster.errors import ClusterError, InvalidConfig

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Settings file (YAML); `raypd config --default` prints one with all settings."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address", help="Address of a running Ray cluster, as host:port; default: the variable RAY_ADDRESS."
    ),
]

DEFAULTS: Final = ClusterConfig()
"""The settings without a settings file, for the texts of help."""
NumPrefill = Annotated[
    int | None, typer.Option("--prefill", help=f"Number of prefill engines; default: {DEFAULTS.prefill.count}.")
]
NumDecode = Annotated[
    int | None, typer.Option("--decode", help=f"Number of decode engines; default: {DEFAULTS.decode.count}.")
]
NumBoth = Annotated[
    int | None,
    typer.Option("--both", help=f"Number of engines that prefill and decode; default: {DEFAULTS.both.count}."),
]
NumEncode = Annotated[
    int | None,
    typer.Option("--encode", help=f"Number of engines that encode images; default: {DEFAULTS.encode.count}."),
]
NumRanks = Annotated[
    int | None,
    typer.Option(
        "--tp",
        help="Number of tensor-parallel ranks of each engine (GPUs, if any); default: "
        f"{DEFAULTS.parallel.tensor_parallel_size}.",
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for each answer of the ingress.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return only when the change is complete, not when it is accepted.")]
WaitTimeout = Annotated[
    float, typer.Option("--wait-timeout", min=0, help="Seconds that --wait waits; the change goes on after that.")
]
Address = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        help="gRPC address of an ingress, as host:port; or several addresses, separated by commas, to try in turn.",
    ),
]
DEFAULT_ADDRESS: Final = f"{DEFAULTS.ingress.host}:{DEFAULTS.ingress.port}"
Parameters = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        "-p",
        help="Sampling parameter, as name=value; the value may be JSON. Repeat the option for several parameters: "
        "-p top_p=0.9 -p 'stop=[\"\\n\"]'.",
    ),
]

_INTERRUPTED = 130
"""The exit status after Ctrl-C: by convention 128 plus the number of SIGINT."""


def load(path: Path | None, overrides: dict[str, Any], *, looks_at_model: bool = True) -> ClusterConfig:
    """Load the settings as load_cluster_config() does, but print mistakes and end the process with exit status 2."""
    try:
        return load_cluster_config(path, overrides, looks_at_model=looks_at_model)
    except InvalidConfig as error:
        fail(error, exit_code=2)


def load_to_start(
    path: Path | None, overrides: dict[str, Any], meanwhile: Callable[[ClusterConfig], None]
) -> ClusterConfig:
    """Load the settings as load() does, and call `meanwhile` with them while a child process looks at the model."""
    config = load(path, overrides, looks_at_model=False)
    if mistakes := find_checkpoint_mistakes(config, partial(meanwhile, config)):
        fail(InvalidConfig("command line" if path is None else str(path), mistakes), exit_code=2)
    return config


def run(command: Any) -> None:  # The type is Any because a command may return anything; the result is ignored.
    """Run a command; print a ClusterError and end the process with exit status 1, and with 130 after Ctrl-C."""
    try:
        command()
    except ClusterError as error:
        fail(error, exit_code=1)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def fail(error: ClusterError, exit_code: int) -> NoReturn:
    """Print the error to standard error and end the process."""
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"raypd: {error}")
    sys.exit(exit_code)
