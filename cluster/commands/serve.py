"""The commands that start and stop clusters: `raypd serve`, `stop` and `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.commands.command_line import (
    DEFAULTS,
    ConfigFile,
    NumBoth,
    NumDecode,
    NumEncode,
    NumPrefill,
    RayAddress,
    load,
    load_to_start,
    run,
)
from cluster.settings.http import HttpConfig


def serve(
    config: ConfigFile = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Directory of the checkpoint, in Hugging Face format; default: the demo model."),
    ] = None,
    prefill: NumPrefill = None,
    decode: NumDecode = None,
    both: NumBoth = None,
    encode: NumEncode = None,
    host: Annotated[
        str | None,
        typer.Option(help=f"Address that ingresses listen on for clients; default: {DEFAULTS.ingress.host}."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help=f"Port of the gRPC API; 0 takes a free port. Default: {DEFAULTS.ingress.port}.")
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            help=f"Port of the OpenAI-compatible HTTP API; 0 takes a free port. Default: {HttpConfig().port}."
        ),
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="Separate port of the operators' API; default: it shares --port.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Server certificate (PEM), with which ingresses serve TLS; needs --tls-key.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the server certificate (PEM).")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="Root certificates of clients (PEM): clients then have to show a certificate (mutual TLS)."),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(help="File of the bearer tokens that are accepted, see `raypd token`; default: none are needed."),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow listening beyond loopback without TLS.")] = False,
    request_trace: Annotated[
        Path | None,
        typer.Option(
            help="Directory for a trace of all requests (times, lengths, engines; no texts), which `raypd bench "
            "--trace` replays; default: none is written."
        ),
    ] = None,
    ray_address: RayAddress = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            help="Return as soon as the cluster serves, and leave it running until `raypd stop`; needs a running Ray "
            "cluster.",
        ),
    ] = False,
) -> None:
    """Start a cluster and serve until Ctrl-C or SIGTERM.

    Without options, one prefill and one decode engine serve the demo model on
    this machine's CPU. Options override the settings file, and the defaults
    below hold where the file has no such setting.

    Example: raypd serve --model /models/Llama-3.1-8B --prefill 1 --decode 2
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
            "request_trace": {"directory": _path(request_trace)},
        },
        "ray": {"address": ray_address},
    }
    from cluster.start.local_ray import import_ray
    from cluster.start.running import serve_until_signalled, start_detached

    cluster_config = load_to_start(config, overrides, import_ray)

    run(lambda: (start_detached if detach else serve_until_signalled)(cluster_config, Console()))


def stop(
    config: ConfigFile = None,
    ray_address: RayAddress = None,
    namespace: Annotated[
        str | None,
        typer.Option(help=f"Ray namespace in which the raypd cluster runs; default: {DEFAULTS.ray.namespace}."),
    ] = None,
) -> None:
    """Drain and stop the raypd cluster that runs in a Ray cluster.

    Requests may finish within the setting drain_timeout_s. The Ray cluster
    keeps running.

    Example: raypd stop --ray-address 10.0.0.1:6379
    """
    from cluster.start.running import stop_cluster

    cluster_config = load(config, {"ray": {"address": ray_address, "namespace": namespace}})
    run(lambda: stop_cluster(cluster_config, Console()))


def demo(
    config: ConfigFile = None,
    num_requests: Annotated[int, typer.Option(min=2, help="Number of prompts that are sent at once.")] = 16,
) -> None:
    """Start a cluster, send prompts, show the times of each request, and stop.

    Without --config, one prefill and one decode engine serve the demo model on
    this machine's CPU.
    """
    from cluster.start.local_ray import import_ray

    cluster_config = load_to_start(config, {"ingress": {"port": 0}}, import_ray)

    from cluster.commands.demo import run_demo

    run(lambda: run_demo(cluster_config, num_requests, Console()))


def _path(path: Path | None) -> str | None:
    """Return the absolute path, which names the same file in processes that run in other directories."""
    return None if path is None else str(path.resolve())
