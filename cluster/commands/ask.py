"""The commands that send prompts to a running cluster: `raypd generate`, `embed` and `chat`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cluster.commands.command_line import DEFAULT_ADDRESS, Address, Parameters, fail, run
from cluster.errors import InvalidConfig


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    address: Address = DEFAULT_ADDRESS,
    max_tokens: Annotated[int, typer.Option(min=1, help="Limit on the output, in tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 always takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Seed of sampling: the same seed gives the same output; default: a random one.")
    ] = None,
    chat: Annotated[
        bool, typer.Option(help="Send the prompt as a user's message, through the model's chat template.")
    ] = False,
    adapter: Annotated[
        str | None, typer.Option(help="Name of the LoRA adapter to use; default: the model without an adapter.")
    ] = None,
    ttft_ms: Annotated[
        float | None,
        typer.Option(help="Aim for the time to the first token, in milliseconds; default: the token's or cluster's."),
    ] = None,
    itl_ms: Annotated[
        float | None,
        typer.Option(help="Aim for the time from token to token, in milliseconds; default: the token's or cluster's."),
    ] = None,
    param: Parameters = None,
    times: Annotated[
        bool,
        typer.Option(
            "--times", help="Print the time to the first token (TTFT) and per further token (TPOT) at the end."
        ),
    ] = False,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.0, help="Seconds for the whole request; default: no limit.")
    ] = None,
) -> None:
    """Send a prompt to a running cluster and stream the output.

    With several addresses, the stream continues at another ingress if one
    fails.

    Example: raypd generate "The capital of France is" --max-tokens 20
    """
    from cluster.client import BlockingClient
    from cluster.commands.print_answer import stream_answer

    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given |= {"lora_name": adapter} | _parsed(param)
    options: Any = {name: value for name, value in given.items() if value is not None} | {"timeout_s": timeout_s}
    aims = {name: aim for name, aim in (("ttft_ms", ttft_ms), ("itl_ms", itl_ms)) if aim is not None}
    if aims:
        options["slo"] = aims
    text = sys.stdin.read() if prompt == "-" else prompt

    def ask() -> None:
        with BlockingClient(address) as client:
            stream_answer(client, [("user", text)] if chat else text, options, shows_times=times)

    run(ask)


def embed(
    texts: Annotated[list[str], typer.Argument(help="Texts to embed; - reads one text per line of standard input.")],
    address: Address = DEFAULT_ADDRESS,
    pooling: Annotated[
        Literal["last", "mean", "cls"] | None,
        typer.Option(help="How the tokens' vectors are pooled into one; default: the checkpoint's pooling."),
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="Scale each embedding to length 1; default: as the checkpoint sets it.")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Number of leading dimensions to keep; default: all.")
    ] = None,
    truncate_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Truncate each text to this number of tokens, or to the model's context with -1; default: no "
            "truncation, and longer texts are refused."
        ),
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.0, help="Seconds for the whole request; default: no limit.")
    ] = None,
) -> None:
    """Print the embeddings of texts, one line of JSON for each text.

    Example: raypd embed "first text" "second text"
    """
    from cluster.client import BlockingClient
    from cluster.commands.print_vectors import print_embeddings

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

    run(ask)


def chat(
    address: Address = DEFAULT_ADDRESS,
    system: Annotated[str, typer.Option(help="System message at the start of the conversation; default: none.")] = "",
    param: Parameters = None,
    history: Annotated[
        Path | None,
        typer.Option(
            help="File for the history of typed lines; /dev/null keeps none. Default: raypd/chat_history in "
            "XDG_STATE_HOME (~/.local/state)."
        ),
    ] = None,
) -> None:
    """Chat with the model of a running cluster.

    Within the chat, /help lists its commands, Ctrl-C stops an answer, and
    Ctrl-D ends the chat.
    """
    from cluster.client import BlockingClient
    from cluster.commands.terminal_chat.command import chat as talk
    from cluster.commands.terminal_chat.conversation import Conversation
    from cluster.commands.terminal_chat.keyboard import default_history

    params = {name: value for name, value in _parsed(param).items() if value is not None}

    def talk_on() -> None:
        with BlockingClient(address) as client:
            talk(client, Conversation(system, params), history or default_history())

    run(talk_on)


def _parsed(params: list[str] | None) -> dict[str, Any]:
    from cluster.commands.terminal_chat.sampling_words import parse_assignments

    try:
        return parse_assignments(params or (), "--param")
    except ValueError as error:
        fail(InvalidConfig("command line", [str(error)]), exit_code=2)
