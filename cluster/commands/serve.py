"""The commands that start and stop clusters: `raypd serve`, `stop` and `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.commands.command_line import (
    ConfigFile,
    RayAddress,
    load,
    run,
)


def serve(
    config: ConfigFile = None,
    model: Annotated[Path | None, typer.Option(help="Directory of the checkpoint, in Hugging Face format.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Number of prefill engines.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of decode engines.")] = None,
    both: Annotated[int | None, typer.Option(help="Number of engines that prefill and decode.")] = None,
    encode: Annotated[int | None, typer.Option(help="Number of engines that encode images.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on for clients.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the gRPC API; 0 takes a free port.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of the OpenAI API; 0 takes a free port.")] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="Port of AdminService; default: the port of the gRPC API.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Server certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the server certificate (PEM).")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Root certificates of clients, for mutual TLS (PEM).")
    ] = None,
    tokens: Annotated[Path | None, typer.Option(help="File of the bearer tokens that clients may use.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plain text beyond loopback.")] = False,
    ray_address: RayAddress = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the cluster serves; `raypd stop` ends it.")
    ] = False,
) -> None:
    """Start a cluster and serve until Ctrl-C or SIGTERM.

    Without arguments, one prefill and one decode engine serve the demo model on the CPU.
    """
    overrides: dict[str, Any] = {
        "model": {"model": str(model) if model is not None else None},
        "prefill": {"count": prefill},
        "decode": {"count": decode},
        "both": {"count": both},
        "encode": {"count": encode},
        "ingress": {
            "host": host,
            "port": port,
            "http": {"port": http_port},
            "admin_port": admin_port,
            "tls": {"certificate": _path(tls_cert), "key": _path(tls_key), "client_ca": _path(tls_client_ca)},
            "tokens": _path(tokens),
            "insecure": insecure or None,
        },
        "ray": {"address": ray_address},
    }
    cluster_config = load(config, overrides)

    from cluster.start.running import serve_until_signalled, start_detached

    run(lambda: (start_detached if detach else serve_until_signalled)(cluster_config, Console()))


def stop(
    config: ConfigFile = None,
    ray_address: RayAddress = None,
    namespace: Annotated[str | None, typer.Option(help="Ray namespace; default: raypd.")] = None,
) -> None:
    """Drain and stop the raypd cluster that runs in a Ray cluster."""
    from cluster.start.running import stop_cluster

    cluster_config = load(config, {"ray": {"address": ray_address, "namespace": namespace}})
    run(lambda: stop_cluster(cluster_config, Console()))


def demo(
    config: ConfigFile = None,
    num_requests: Annotated[int, typer.Option(min=2, help="Number of concurrent prompts.")] = 16,
) -> None:
    """Start a cluster, send prompts of mixed length, show where their time went, and stop the cluster."""
    cluster_config = load(config, {"ingress": {"port": 0}})

    from cluster.commands.demo import run_demo

    run(lambda: run_demo(cluster_config, num_requests, Console()))


def _path(path: Path | None) -> str | None:
    """Return the absolute path, which means the same file to processes in other directories."""
    return None if path is None else str(path.resolve())
