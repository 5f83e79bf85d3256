"""The commands that ask a running cluster: `raypd generate`, `embed` and `chat`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cluster.commands.command_line import (
    Address,
    Parameters,
    fail,
    run,
)
from cluster.errors import InvalidConfig


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    address: Address = "127.0.0.1:50051",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling: the same seed gives the same answer.")] = None,
    chat: Annotated[bool, typer.Option(help="Send the prompt as a user's chat message.")] = False,
    adapter: Annotated[str | None, typer.Option(help="Name of a LoRA adapter.")] = None,
    param: Parameters = None,
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
    from cluster.commands.print_answer import stream_answer

    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given |= {"lora_name": adapter} | _parsed(param)
    options: Any = {name: value for name, value in given.items() if value is not None} | {"timeout_s": timeout_s}
    text = sys.stdin.read() if prompt == "-" else prompt

    def ask() -> None:
        with BlockingClient(address) as client:
            stream_answer(client, [("user", text)] if chat else text, options, shows_times=times)

    run(ask)


def embed(
    texts: Annotated[list[str], typer.Argument(help="Texts to embed; - reads lines from standard input.")],
    address: Address = "127.0.0.1:50051",
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
    address: Address = "127.0.0.1:50051",
    system: Annotated[str, typer.Option(help="System message that the conversation begins with.")] = "",
    param: Parameters = None,
    history: Annotated[
        Path | None,
        typer.Option(help="File for the history of typed lines; default: in XDG_STATE_HOME. /dev/null keeps none."),
    ] = None,
) -> None:
    """Chat with the model of a running cluster.

    /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.
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
