"""The command `raypd`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from cluster.commands.command_line import ConfigFile as _ConfigFile
from cluster.commands.command_line import RayAddress as _RayAddress
from cluster.commands.command_line import fail as _fail
from cluster.commands.command_line import load as _load
from cluster.commands.command_line import run as _run
from cluster.commands.deploy import doctor, manifests, show_config
from cluster.engine_connection import EngineRole
from cluster.errors import InvalidConfig

app = typer.Typer(
    name="raypd",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Longest time to wait for the ingress's answer, in seconds.")
]
_Wait = Annotated[bool, typer.Option("--wait", help="Wait until the change is done.")]
_WaitTimeout = Annotated[
    float, typer.Option("--wait-timeout", min=0, help="Longest time to wait for the change, in seconds.")
]
_Address = Annotated[
    str,
    typer.Option(
        "--address", "-a", help="Address of the ingress, as host:port; several addresses are separated by commas."
    ),
]
_Params = Annotated[
    list[str] | None,
    typer.Option("--param", "-p", help="Sampling parameter, as name=value: -p top_p=0.9 -p 'stop=[\"\\n\"]'."),
]


@app.callback()
def credentials(
    token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token that client commands send; or set RAYPD_TOKEN.")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Connect to the ingress with TLS.")] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(help="Root certificates that verify the ingress (PEM); default: the system's.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Client certificate for mutual TLS (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the client certificate (PEM).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Send the token without TLS, too.")] = False,
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
    name: Annotated[str, typer.Argument(help="Name of the token in logs and errors.")],
    tenant: Annotated[
        str | None, typer.Option(help="Tenant that the token belongs to; default: the token's name.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Allow the token to change the cluster.")] = False,
    requests_per_s: Annotated[
        float | None, typer.Option(help="Requests per second, at each ingress; default: no limit.")
    ] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option(help="Tokens of prompts and outputs per second, at each ingress; default: no limit.")
    ] = None,
    concurrent: Annotated[
        int | None, typer.Option(help="Requests at once, at each ingress; default: no limit.")
    ] = None,
) -> None:
    """Create a bearer token, and print its entry for the token file (ingress.tokens)."""
    from cluster.access_commands import print_new_token

    limits = {"requests_per_s": requests_per_s, "tokens_per_s": tokens_per_s, "concurrent": concurrent}
    _run(lambda: print_new_token(Console(), name=name, tenant=tenant, admin=admin, **limits))


@app.command()
def serve(
    config: _ConfigFile = None,
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
    ray_address: _RayAddress = None,
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
    cluster_config = _load(config, overrides)

    from cluster.running import serve_until_signalled, start_detached

    _run(lambda: (start_detached if detach else serve_until_signalled)(cluster_config, Console()))


@app.command()
def stop(
    config: _ConfigFile = None,
    ray_address: _RayAddress = None,
    namespace: Annotated[str | None, typer.Option(help="Ray namespace; default: raypd.")] = None,
) -> None:
    """Drain and stop the raypd cluster that runs in a Ray cluster."""
    from cluster.running import stop_cluster

    cluster_config = _load(config, {"ray": {"address": ray_address, "namespace": namespace}})
    _run(lambda: stop_cluster(cluster_config, Console()))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    address: _Address = "127.0.0.1:50051",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling: the same seed gives the same answer.")] = None,
    chat: Annotated[bool, typer.Option(help="Send the prompt as a user's chat message.")] = False,
    adapter: Annotated[str | None, typer.Option(help="Name of a LoRA adapter.")] = None,
    param: _Params = None,
    times: Annotated[
        bool, typer.Option("--times", help="Print the time to the first token and the time per further token.")
    ] = False,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.0, help="Longest time for the whole answer, in seconds.")
    ] = None,
) -> None:
    """Send a prompt to a running cluster and stream the answer.

    With several addresses, the answer goes on at another ingress if one dies.
    """
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
    texts: Annotated[list[str], typer.Argument(help="Texts to embed; - reads lines from standard input.")],
    address: _Address = "127.0.0.1:50051",
    pooling: Annotated[
        Literal["last", "mean", "cls"] | None,
        typer.Option(help="How the vectors of tokens become one; default: as the checkpoint says."),
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="Scale embeddings to length 1; default: as the checkpoint says.")
    ] = None,
    dimensions: Annotated[int | None, typer.Option(min=1, help="Number of dimensions to keep.")] = None,
    truncate_prompt_tokens: Annotated[
        int | None, typer.Option(help="Cut each text to so many tokens; -1 cuts it to the model's context.")
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.0, help="Longest time for the whole answer, in seconds.")
    ] = None,
) -> None:
    """Print the embeddings of texts, one line of JSON for each text."""
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
    system: Annotated[str, typer.Option(help="System message that the conversation begins with.")] = "",
    param: _Params = None,
    history: Annotated[
        Path | None,
        typer.Option(help="File for the history of typed lines; default: in XDG_STATE_HOME. /dev/null keeps none."),
    ] = None,
) -> None:
    """Chat with the model of a running cluster.

    /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.
    """
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
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh the status until Ctrl-C.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two refreshes.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print raypd.v1.GetStatusResponse as JSON.")] = False,
    timeout_s: _Timeout = 10.0,
) -> None:
    """Show a running cluster's engines, links, KV transfers, requests and the controller's decisions."""
    from cluster.status_command import show_status

    watch_s = interval_s if watch else None
    _run(lambda: asyncio.run(show_status(address, Console(), watch_s=watch_s, as_json=as_json, timeout_s=timeout_s)))


@app.command()
def scale(
    address: _Address = "127.0.0.1:50051",
    prefill: Annotated[int | None, typer.Option(min=0, help="Number of prefill engines.")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="Number of decode engines.")] = None,
    both: Annotated[int | None, typer.Option(min=0, help="Number of engines that prefill and decode.")] = None,
    encode: Annotated[int | None, typer.Option(min=0, help="Number of engines that encode images.")] = None,
    timeout_s: _Timeout = 10.0,
) -> None:
    """Change the number of engines of a running cluster. Engines that leave finish their requests first."""
    from cluster.admin_commands import scale as ask

    counts = {"prefill": prefill, "decode": decode, "both": both, "encode": encode}
    _run(lambda: asyncio.run(ask(address, Console(), counts, timeout_s=timeout_s)))


@app.command()
def drain(
    engine: Annotated[str | None, typer.Argument(help="Name of the engine, as `raypd status` shows it.")] = None,
    address: _Address = "127.0.0.1:50051",
    node: Annotated[
        str | None, typer.Option(help="Drain everything on this node (address, hostname or id) instead.")
    ] = None,
    for_good: Annotated[bool, typer.Option("--for-good", help="Do not start another engine in its place.")] = False,
    wait: _Wait = False,
    wait_timeout_s: _WaitTimeout = 600.0,
    timeout_s: _Timeout = 10.0,
) -> None:
    """Let an engine finish its requests, then restart it; or move everything off a node.

    The engine gets no new requests meanwhile.
    """
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
    model: Annotated[
        Path,
        typer.Option(help="Directory of the new checkpoint, in Hugging Face format, at the same path on every node."),
    ],
    address: _Address = "127.0.0.1:50051",
    wait: _Wait = False,
    wait_timeout_s: _WaitTimeout = 600.0,
    timeout_s: _Timeout = 10.0,
) -> None:
    """Replace the model without an interruption.

    Engines are replaced group by group; both checkpoints are served meanwhile.
    """
    from cluster.admin_commands import update as ask

    wait_s = wait_timeout_s if wait else None
    directory = str(model.resolve())
    _run(lambda: asyncio.run(ask(address, Console(), directory, wait_s=wait_s, timeout_s=timeout_s)))


@app.command()
def load_adapter(
    name: Annotated[str, typer.Argument(help="Name of the adapter in requests.")],
    directory: Annotated[
        Path, typer.Argument(help="Directory of the adapter in PEFT's format, at the same path on every node.")
    ],
    address: _Address = "127.0.0.1:50051",
    timeout_s: _Timeout = 60.0,
) -> None:
    """Load a LoRA adapter into a running cluster, or load new weights for one."""
    from cluster.admin_commands import load_adapter as ask

    # Not resolved: what is allowed is decided where the files are read.
    _run(lambda: asyncio.run(ask(address, Console(), name, str(directory.absolute()), timeout_s=timeout_s)))


@app.command()
def unload_adapter(
    name: Annotated[str, typer.Argument(help="Name of the adapter.")],
    address: _Address = "127.0.0.1:50051",
    timeout_s: _Timeout = 10.0,
) -> None:
    """Unload a LoRA adapter. Requests that use it finish with it; new requests are refused."""
    from cluster.admin_commands import unload_adapter as ask

    _run(lambda: asyncio.run(ask(address, Console(), name, timeout_s=timeout_s)))


@app.command()
def set_role(
    engine: Annotated[str, typer.Argument(help="Name of the engine, as `raypd status` shows it.")],
    role: Annotated[EngineRole, typer.Argument(help="The engine's new role.")],
    address: _Address = "127.0.0.1:50051",
    timeout_s: _Timeout = 10.0,
) -> None:
    """Change the role of an engine without a restart. The engine keeps its prefix cache."""
    from cluster.admin_commands import set_role as ask

    _run(lambda: asyncio.run(ask(address, Console(), engine, role.value, timeout_s=timeout_s)))


@app.command()
def reset_prefix_cache(
    engine: Annotated[str, typer.Argument(help="Name of the engine; default: all engines.")] = "",
    address: _Address = "127.0.0.1:50051",
    preempt: Annotated[
        bool,
        typer.Option("--preempt", help="Preempt running requests, so that their blocks are forgotten, too."),
    ] = False,
    timeout_s: _Timeout = 30.0,
) -> None:
    """Empty the prefix cache of one engine or all engines."""
    from cluster.admin_commands import reset_prefix_cache as ask

    _run(lambda: asyncio.run(ask(address, Console(), engine, preempt=preempt, timeout_s=timeout_s)))


@app.command()
def profile(
    engine: Annotated[str, typer.Argument(help="Name of the engine, as `raypd status` shows it.")],
    address: _Address = "127.0.0.1:50051",
    duration_s: Annotated[
        float, typer.Option("--seconds", min=0.01, max=60.0, help="Length of the profile, in seconds.")
    ] = 5.0,
    trace: Annotated[Path | None, typer.Option(help="File for the trace (.json.gz), which Perfetto shows.")] = None,
    timeout_s: _Timeout = 60.0,
) -> None:
    """Profile an engine with torch's profiler, and print where its time goes. The engine is slower meanwhile."""
    from cluster.admin_commands import profile as ask

    _run(lambda: asyncio.run(ask(address, Console(), engine, duration_s, trace=trace, timeout_s=timeout_s)))


@app.command()
def rotate_secret(address: _Address = "127.0.0.1:50051", timeout_s: _Timeout = 30.0) -> None:
    """Replace the secret by which engines and ingresses authenticate each other. Nothing is interrupted."""
    from cluster.admin_commands import rotate_secret as ask

    _run(lambda: asyncio.run(ask(address, Console(), timeout_s=timeout_s)))


@app.command()
def demo(
    config: _ConfigFile = None,
    num_requests: Annotated[int, typer.Option(min=2, help="Number of concurrent prompts.")] = 16,
) -> None:
    """Start a cluster, send prompts of mixed length, show where their time went, and stop the cluster."""
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
