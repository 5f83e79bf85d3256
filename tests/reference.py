"""The answers that we did not write: transformers' own generate(), greedy, in float32."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from actors.model.config.text_parts import SERVED_AS_TEXT
from tests.checkpoints import VOCAB_SIZE
from tests.multimodal import MultimodalClass


@functools.cache
def load_model(directory: Path) -> Any:  # a class that transformers chooses at run time
    """The stock model, once for each checkpoint; the whole one where raypd serves only its text part."""
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    auto_class: Any = MultimodalClass if model_type in SERVED_AS_TEXT else AutoModelForCausalLM
    model = auto_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def greedy_tokens(directory: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """The next tokens after a prompt, end-of-sequence ignored."""
    tokens = load_model(directory).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    output: list[int] = tokens[0, len(prompt) :].tolist()
    return output


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids beyond the special ones."""
    return random.Random(f"{seed} {length}").choices(range(3, VOCAB_SIZE), k=length)


@functools.cache
def logprobs_after(directory: Path, token_ids: tuple[int, ...]) -> torch.Tensor:
    """[len(token_ids), vocab_size]: of what follows each token, given those before it."""
    with torch.inference_mode():
        logits = load_model(directory)(torch.tensor([token_ids])).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


@torch.inference_mode()
def random_embeds(directory: Path, length: int, seed: int = 0) -> torch.Tensor:
    """[length, hidden_size] float32: each is a mixture of two tokens' embeddings, so it is no token's."""
    lookup = load_model(directory).get_input_embeddings()
    one, other = (lookup(torch.tensor(random_prompt(length, seed=2 * seed + offset))) for offset in (0, 1))
    mixed: torch.Tensor = 0.8 * one + 0.6 * other
    return mixed


def greedy_tokens_after(directory: Path, embeds: torch.Tensor, num_tokens: int) -> list[int]:
    """The next tokens after embeddings, end-of-sequence ignored."""
    tokens = load_model(directory).generate(
        inputs_embeds=embeds[None],
        attention_mask=torch.ones(1, len(embeds), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    output: list[int] = tokens[0].tolist()
    return output
