"""Show what the demo model writes, and count how much of it is Python.

    python -m tools.judge_demo_model --model cluster/demo_model

Each prompt is continued greedily and by sampling as `raypd demo` samples. A continuation counts as Python if it parses
once it is cut at the end of its last whole statement, and if the prompt's function or class has a body then.
"""

import ast
import textwrap
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM

from cluster.config import DEMO_MODEL
from tools.demo_checkpoint import BOS_ID, EOS_ID, PAD_ID

_SEED = 7
_TEMPERATURE = 0.7
_TOP_K = 50
PROMPTS = (
    "def fibonacci(n):",
    "class Stack:",
    "def read_file(path):",
    "def factorial(n):",
    "def is_prime(n):",
    "def binary_search(items, target):",
    "def count_words(text):",
    "class Queue:",
    "class BankAccount:",
    "class Node:",
    "def reverse_string(text):",
    "def average(numbers):",
    "import json",
    # Nothing of this name is among the exercises.
    "def sum_of_squares(numbers):",
    "class Robot:",
    "def is_vowel(char):",
)


def main(
    model: Annotated[Path, typer.Option(help="The checkpoint's folder.")] = DEMO_MODEL,
    samples: Annotated[int, typer.Option(help="Sampled continuations of each prompt.", min=1)] = 10,
    tokens: Annotated[int, typer.Option(help="The most tokens of a continuation.", min=1)] = 160,
    shown: Annotated[int, typer.Option(help="Sampled continuations of each prompt that are printed.", min=0)] = 1,
) -> None:
    """Continue the prompts, print some of the texts, and the shares that are Python."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(_SEED)
    num_greedy = num_sampled = 0
    for prompt in PROMPTS:
        [greedy] = continuations(network, tokenizer, prompt, tokens, num_samples=0)
        sampled = continuations(network, tokenizer, prompt, tokens, samples)
        good = sum(is_python(prompt, text) for text in sampled)
        num_greedy += is_python(prompt, greedy)
        num_sampled += good
        typer.echo(f"== {prompt}   greedy: {is_python(prompt, greedy)}, sampled: {good} of {samples}")
        for text in [greedy, *sampled[:shown]]:
            typer.echo(textwrap.indent(prompt + text, "  | "))
            typer.echo("  --")
    typer.echo(f"greedy: {num_greedy} of {len(PROMPTS)} are Python")
    typer.echo(f"sampled: {num_sampled} of {len(PROMPTS) * samples} are Python")


@torch.no_grad()
def continuations(
    network: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, num_tokens: int, num_samples: int
) -> list[str]:
    """Return the texts that follow a prompt: one that is greedy if num_samples is 0."""
    prompt_ids = tokenizer.encode(prompt).ids
    how = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        do_sample=num_samples > 0,
        temperature=_TEMPERATURE if num_samples else None,
        top_k=_TOP_K if num_samples else None,
        num_return_sequences=max(1, num_samples),
        max_new_tokens=num_tokens,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    outputs: Tensor = network.generate(torch.tensor([prompt_ids]), how)  # type: ignore[misc, assignment]  # its self is a Protocol
    return [tokenizer.decode(output[len(prompt_ids) :].tolist()) for output in outputs]


def is_python(prompt: str, continuation: str) -> bool:
    """Return whether the prompt and its continuation, but for what was broken off at its end, are Python."""
    whole = cut_at_last_statement(prompt + continuation)
    if whole is None or len(whole) <= len(prompt):
        return False
    return bool(ast.parse(whole).body)


def cut_at_last_statement(text: str) -> str | None:
    """Return the text without the lines of its last, broken statement; None if no more than half is left."""
    lines = text.rstrip().splitlines()
    for num_lines in range(len(lines), len(lines) // 2, -1):
        candidate = "\n".join(lines[:num_lines])
        try:
            ast.parse(candidate)
        except SyntaxError:
            continue
        return candidate
    return None


if __name__ == "__main__":
    typer.run(main)
