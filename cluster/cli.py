"""The command `raypd`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from cluster.command_line import ConfigFile as _ConfigFile
from cluster.command_line import RayAddress as _RayAddress
from cluster.command_line import fail as _fail
from cluster.command_line import load as _load
from cluster.command_line import run as _run
from cluster.deploy_cli import doctor, manifests, show_config
from cluster.engine_connection import EngineRole
from cluster.errors import InvalidConfig

app = typer.Typer(
    name="raypd",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for an answer.")]
_Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done.")]
_WaitTimeout = Annotated[float, typer.Option("--wait-timeout", min=0, help="Seconds to wait for that.")]
_Address = Annotated[
    str, typer.Option("--address", "-a", help="host:port of the cluster's ingress; several with commas between them.")
]
_Params = Annotated[
    list[str] | None,
    typer.Option("--param", "-p", help="A sampling parameter, as name=value: -p top_p=0.9 -p 'stop=[\"\\n\"]'."),
]


@app.callback()
def credentials(
    token_file: Annotated[
        Path | None, typer.Option(help="File of a bearer token, for a client's commands; or set RAYPD_TOKEN.")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="The ingress has TLS.")] = False,
    tls_ca: Annotated[Path | None, typer.Option(help="Roots for its certificate; default: the system's.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate to show it, for mutual TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The key of that.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Send the token in plain text too.")] = False,
) -> None:
    """Serve large language models on Ray, with prefill and decode on separate nodes."""
    from cluster.access_commands import use_credentials

    use_credentials(
        {
            "TOKEN_FILE": token_file,
            "TLS": tls,
            "TLS_CA": tls_ca,
            "TLS_CERT": tls_cert,
            "TLS_KEY": tls_key,
            "INSECURE": insecure,
        }
    )


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="Its name in logs and errors.")],
    tenant: Annotated[str | None, typer.Option(help="Whose it is; default: its name.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May change the cluster.")] = False,
    requests_per_s: Annotated[float | None, typer.Option(help="At each ingress.")] = None,
    tokens_per_s: Annotated[float | None, typer.Option(help="Of prompts and outputs, at each ingress.")] = None,
    concurrent: Annotated[int | None, typer.Option(help="Requests at once, at each ingress.")] = None,
) -> None:
    """Make a bearer token, and show its entry for the token file (ingress.tokens)."""
    from cluster.access_commands import print_new_token

    limits = {"requests_per_s": requests_per_s, "tokens_per_s": tokens_per_s, "concurrent": concurrent}
    _run(lambda: print_new_token(Console(), name=name, tenant=tenant, admin=admin, **limits))


@app.command()
def serve(
    config: _ConfigFile = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory, Hugging Face format.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Number of prefill engines.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of decode engines.")] = None,
    both: Annotated[int | None, typer.Option(help="Number of engines that do both.")] = None,
    encode: Annotated[int | None, typer.Option(help="Number of engines that encode images.")] = None,
    host: Annotated[str | None, typer.Option(help="Address for clients.")] = None,
    port: Annotated[int | None, typer.Option(help="Port for clients; 0 takes a free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port for OpenAI's API; 0 takes a free one.")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Port of AdminService; default: the same.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="The ingress's certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The key of that.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Roots of the certificates that clients need.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="File of bearer tokens that clients need.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Plain text beyond loopback too.")] = False,
    ray_address: _RayAddress = None,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running; `raypd stop` ends it.")] = False,
) -> None:
    """Start a cluster and serve until Ctrl-C or SIGTERM. Without arguments: the demo model on 1P1D, on the CPU."""
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
    cluster_config = _load(config, overrides)

    from cluster.running import serve_until_signalled, start_detached

    _run(lambda: (start_detached if detach else serve_until_signalled)(cluster_config, Console()))


@app.command()
def stop(
    config: _ConfigFile = None,
    ray_address: _RayAddress = None,
    namespace: Annotated[str | None, typer.Option(help="Ray namespace; default: raypd.")] = None,
) -> None:
    """Drain and end the cluster that runs in a Ray cluster, whoever started it."""
    from cluster.running import stop_cluster

    cluster_config = _load(config, {"ray": {"address": ray_address, "namespace": namespace}})
    _run(lambda: stop_cluster(cluster_config, Console()))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads it from standard input.")],
    address: _Address = "127.0.0.1:50051",
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="For the same answer again.")] = None,
    chat: Annotated[bool, typer.Option(help="Send the prompt as a user's chat message.")] = False,
    adapter: Annotated[str | None, typer.Option(help="A LoRA adapter for the model.")] = None,
    param: _Params = None,
    times: Annotated[bool, typer.Option("--times", help="Show TTFT and TPOT when it is over.")] = False,
    timeout_s: Annotated[float | None, typer.Option("--timeout", min=0.0, help="Seconds for the answer.")] = None,
) -> None:
    """Stream a running cluster's answer. Several addresses: if one ingress dies, the answer goes on at another."""
    from cluster.client import BlockingClient
    from cluster.generate_command import stream_answer

    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given |= {"lora_name": adapter} | _parsed(param)
    options: Any = {name: value for name, value in given.items() if value is not None} | {"timeout_s": timeout_s}
    text = sys.stdin.read() if prompt == "-" else prompt

    def ask() -> None:
        with BlockingClient(address) as client:
            stream_answer(client, [("user", text)] if chat else text, options, shows_times=times)

    _run(ask)


@app.command()
def embed(
    texts: Annotated[list[str], typer.Argument(help="What to embed; - reads lines from standard input.")],
    address: _Address = "127.0.0.1:50051",
    pooling: Annotated[
        Literal["last", "mean", "cls"] | None, typer.Option(help="Default: the checkpoint's own.")
    ] = None,
    normalize: Annotated[bool | None, typer.Option(help="To length 1; default: the checkpoint's own.")] = None,
    dimensions: Annotated[int | None, typer.Option(min=1, help="Keep so many numbers.")] = None,
    truncate_prompt_tokens: Annotated[int | None, typer.Option(help="Tokens to read; -1: all that fit.")] = None,
    timeout_s: Annotated[float | None, typer.Option("--timeout", min=0.0, help="Seconds for the answer.")] = None,
) -> None:
    """Print texts' embeddings, a line of JSON for each."""
    from cluster.client import BlockingClient
    from cluster.embed_command import print_embeddings

    given: dict[str, Any] = {
        "pooling": pooling,
        "normalize": normalize,
        "dimensions": dimensions,
        "truncate_prompt_tokens": truncate_prompt_tokens,
    }
    options: Any = {name: value for name, value in given.items() if value is not None} | {"timeout_s": timeout_s}
    lines = [line.rstrip("\n") for text in texts for line in (sys.stdin if text == "-" else [text])]

    def ask() -> None:
        with BlockingClient(address) as client:
            print_embeddings(client, lines, options)

    _run(ask)


@app.command()
def chat(
    address: _Address = "127.0.0.1:50051",
    system: Annotated[str, typer.Option(help="What the model is told before everything else.")] = "",
    param: _Params = None,
    history: Annotated[
        Path | None, typer.Option(help="File of what was typed; default: in XDG_STATE_HOME. /dev/null: none.")
    ] = None,
) -> None:
    """Talk with a running cluster's model. /help shows what can be done; Ctrl-C stops an answer, Ctrl-D leaves."""
    from cluster.chat.command import chat as talk
    from cluster.chat.conversation import Conversation
    from cluster.chat.keyboard import default_history
    from cluster.client import BlockingClient

    params = {name: value for name, value in _parsed(param).items() if value is not None}

    def talk_on() -> None:
        with BlockingClient(address) as client:
            talk(client, Conversation(system, params), history or default_history())

    _run(talk_on)


@app.command()
def status(
    address: _Address = "127.0.0.1:50051",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it on the screen.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: raypd.v1.GetStatusResponse.")] = False,
    timeout_s: _Timeout = 10.0,
) -> None:
    """Show a running cluster's engines, links, KV transfers, requests and the controller's decisions."""
    from cluster.status_command import show_status

    watch_s = interval_s if watch else None
    _run(lambda: asyncio.run(show_status(address, Console(), watch_s=watch_s, as_json=as_json, timeout_s=timeout_s)))


@app.command()
def scale(
    address: _Address = "127.0.0.1:50051",
    prefill: Annotated[int | None, typer.Option(min=0, help="Prefill engines that are wanted.")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="Decode engines that are wanted.")] = None,
    both: Annotated[int | None, typer.Option(min=0, help="Engines that do both.")] = None,
    encode: Annotated[int | None, typer.Option(min=0, help="Engines that encode images.")] = None,
    timeout_s: _Timeout = 10.0,
) -> None:
    """Change how many engines a running cluster has. Those that leave end their work first."""
    from cluster.admin_commands import scale as ask

    counts = {"prefill": prefill, "decode": decode, "both": both, "encode": encode}
    _run(lambda: asyncio.run(ask(address, Console(), counts, timeout_s=timeout_s)))


@app.command()
def drain(
    engine: Annotated[str | None, typer.Argument(help="The engine's name, as in `raypd status`.")] = None,
    address: _Address = "127.0.0.1:50051",
    node: Annotated[
        str | None, typer.Option(help="Instead: everything on this node (address, hostname or id).")
    ] = None,
    for_good: Annotated[bool, typer.Option("--for-good", help="Do not replace it.")] = False,
    wait: _Wait = False,
    wait_timeout_s: _WaitTimeout = 600.0,
    timeout_s: _Timeout = 10.0,
) -> None:
    """Take an engine out of service once its work is done, and start it anew; or all of a node, elsewhere."""
    from cluster import admin_commands

    wait_s = wait_timeout_s if wait else None
    if (engine is None) == (node is None):
        _fail(InvalidConfig("drain", ["name an engine, or a node with --node"]), exit_code=2)
    if engine is not None:
        draining = admin_commands.drain(
            address, Console(), engine, for_good=for_good, wait_s=wait_s, timeout_s=timeout_s
        )
    else:
        assert node is not None
        draining = admin_commands.drain_node(address, Console(), node, wait_s=wait_s, timeout_s=timeout_s)
    _run(lambda: asyncio.run(draining))


@app.command()
def update(
    model: Annotated[Path, typer.Option(help="Checkpoint directory, Hugging Face format, the same on every node.")],
    address: _Address = "127.0.0.1:50051",
    wait: _Wait = False,
    wait_timeout_s: _WaitTimeout = 600.0,
    timeout_s: _Timeout = 10.0,
) -> None:
    """Serve another checkpoint: engines are replaced group by group, and both are served meanwhile."""
    from cluster.admin_commands import update as ask

    wait_s = wait_timeout_s if wait else None
    directory = str(model.resolve())
    _run(lambda: asyncio.run(ask(address, Console(), directory, wait_s=wait_s, timeout_s=timeout_s)))


@app.command()
def load_adapter(
    name: Annotated[str, typer.Argument(help="The name that requests will use.")],
    directory: Annotated[Path, typer.Argument(help="Its files in PEFT's format, the same on every node.")],
    address: _Address = "127.0.0.1:50051",
    timeout_s: _Timeout = 60.0,
) -> None:
    """Let requests name a LoRA adapter, or have new weights by its name, once the engines have loaded it."""
    from cluster.admin_commands import load_adapter as ask

    # Not resolved: what is allowed is decided where the files are read.
    _run(lambda: asyncio.run(ask(address, Console(), name, str(directory.absolute()), timeout_s=timeout_s)))


@app.command()
def unload_adapter(
    name: Annotated[str, typer.Argument(help="The adapter's name.")],
    address: _Address = "127.0.0.1:50051",
    timeout_s: _Timeout = 10.0,
) -> None:
    """Let no new request name a LoRA adapter; those that have it end with it."""
    from cluster.admin_commands import unload_adapter as ask

    _run(lambda: asyncio.run(ask(address, Console(), name, timeout_s=timeout_s)))


@app.command()
def set_role(
    engine: Annotated[str, typer.Argument(help="The engine's name, as in `raypd status`.")],
    role: Annotated[EngineRole, typer.Argument(help="What it does from now on.")],
    address: _Address = "127.0.0.1:50051",
    timeout_s: _Timeout = 10.0,
) -> None:
    """Let an engine serve in another role, without a restart. It keeps its prefix cache."""
    from cluster.admin_commands import set_role as ask

    _run(lambda: asyncio.run(ask(address, Console(), engine, role.value, timeout_s=timeout_s)))


@app.command()
def reset_prefix_cache(
    engine: Annotated[str, typer.Argument(help="The engine's name; default: every engine.")] = "",
    address: _Address = "127.0.0.1:50051",
    preempt: Annotated[bool, typer.Option("--preempt", help="Let requests that run there start over.")] = False,
    timeout_s: _Timeout = 30.0,
) -> None:
    """Let engines forget all cached prompts."""
    from cluster.admin_commands import reset_prefix_cache as ask

    _run(lambda: asyncio.run(ask(address, Console(), engine, preempt=preempt, timeout_s=timeout_s)))


@app.command()
def profile(
    engine: Annotated[str, typer.Argument(help="The engine's name, as in `raypd status`.")],
    address: _Address = "127.0.0.1:50051",
    duration_s: Annotated[float, typer.Option("--seconds", min=0.01, max=60.0, help="How long.")] = 5.0,
    trace: Annotated[Path | None, typer.Option(help="File for a trace, .json.gz, for Perfetto.")] = None,
    timeout_s: _Timeout = 60.0,
) -> None:
    """Show what an engine spends its time with, by torch's profiler. It is slower meanwhile."""
    from cluster.admin_commands import profile as ask

    _run(lambda: asyncio.run(ask(address, Console(), engine, duration_s, trace=trace, timeout_s=timeout_s)))


@app.command()
def rotate_secret(address: _Address = "127.0.0.1:50051", timeout_s: _Timeout = 30.0) -> None:
    """Replace the secret by which engines and ingresses prove themselves to each other. Nothing is interrupted."""
    from cluster.admin_commands import rotate_secret as ask

    _run(lambda: asyncio.run(ask(address, Console(), timeout_s=timeout_s)))


@app.command()
def demo(
    config: _ConfigFile = None,
    num_requests: Annotated[int, typer.Option(min=2, help="Concurrent prompts.")] = 16,
) -> None:
    """Start a cluster, send prompts of mixed length, show where each one's time went, stop."""
    cluster_config = _load(config, {"ingress": {"port": 0}})

    from cluster.demo import run_demo

    _run(lambda: run_demo(cluster_config, num_requests, Console()))


app.command("config")(show_config)
app.command()(doctor)
app.command()(manifests)


def main() -> None:
    """Entry point of `raypd` and of `python -m cluster`."""
    app()


def _path(path: Path | None) -> str | None:
    """As engines and ingresses find it, whatever directory they are in."""
    return None if path is None else str(path.resolve())


def _parsed(params: list[str] | None) -> dict[str, Any]:
    from cluster.sampling_words import parse_assignments

    try:
        return parse_assignments(params or (), "--param")
    except ValueError as error:
        _fail(InvalidConfig("command line", [str(error)]), exit_code=2)
