"""Prefill on one engine, decode on another, and all on one: each token's log-probability against transformers' own.

Tokens are not compared: a rounding error may flip a greedy choice. What each engine chose is fed to the reference
(teacher forcing), whose log-probabilities must be the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from kv_transfer.params import KVTransferParams, TransferRole
from tests.gpu.conftest import Say, Site, Spawn
from tests.gpu.engine_peer import EnginePeer, Tokens
from tests.gpu.process import Process
from tests.reference import random_prompt
from tests.trusted import material

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

NUM_TOKENS = 16
PROMPT_LENGTHS = (100, 17, 64, 1, 150)
"""Lengths of several chunks, of whole blocks, of less than one."""

Dtype = Literal["float32", "bfloat16"]
MAX_ERROR: dict[Dtype, float] = {"float32": 5e-3, "bfloat16": 0.1}
"""The largest error of the mean over a request's tokens, in nats. A single wrong block moves it by whole nats."""


def make_config(checkpoint: Path, site: Site, dtype: Dtype) -> EngineConfig:
    device: Literal["cpu", "cuda"] = "cuda" if site.device.startswith("cuda") else "cpu"
    return EngineConfig(
        model=ModelConfig(model=str(checkpoint), dtype=dtype, device=device),
        cache=CacheConfig(block_size=16, num_blocks=256),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
    )


def only_this_gpu(site: Site) -> Site:
    """An engine takes the first GPU that it sees."""
    if not site.device.startswith("cuda:"):
        return site
    return Site("cuda:0", site.environment | {"CUDA_VISIBLE_DEVICES": site.device.removeprefix("cuda:")})


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("llama", "bfloat16")]
    + [(family, "float32") for family in ("gemma4", "deepseek_v3", "granite_4_hybrid")],
)
def test_log_probabilities_are_the_references_through_two_engines_as_through_one(
    sites: list[Site], spawn: Spawn, say: Say, checkpoint: Callable[[str], Path], family: str, dtype: Dtype
) -> None:
    directory = checkpoint(family)
    prompts = {f"r{length}": random_prompt(length) for length in PROMPT_LENGTHS}
    prefill, decode, single = (
        spawn(only_this_gpu(site), EnginePeer, name, make_config(directory, site, dtype), material())
        for site, name in zip((sites[0], sites[1], sites[0]), ("prefill-0", "decode-0", "single"), strict=True)
    )
    answers = {"two engines": hand_over(prefill, decode, prompts), "one engine": generate(single, prompts)}
    for name, tokens in answers.items():
        errors = {key: mean_error(directory, sites[0].device, prompts[key], tokens[key], dtype) for key in prompts}
        say(f"{family} in {dtype}, {name}: mean error of log-probabilities {max(errors.values()):.2g} at worst")
        assert max(errors.values()) < MAX_ERROR[dtype], errors
    for engine in (prefill, decode, single):
        assert engine.call("num_blocks_in_use") == 0


def hand_over(prefill: Process, decode: Process, prompts: dict[str, list[int]]) -> dict[str, Tokens]:
    """All at once. The first token is the prefill engine's."""
    for key, prompt in prompts.items():
        consumer = KVTransferParams(f"t-{key}", 0, TransferRole.CONSUMER, prefill.call("address"))
        producer = KVTransferParams(f"t-{key}", 0, TransferRole.PRODUCER, decode.call("address"))
        decode.call("submit", key, prompt, NUM_TOKENS, consumer)
        prefill.call("submit", key, prompt, NUM_TOKENS, producer)
    return {key: joined(prefill.call("wait", key), decode.call("wait", key)) for key in prompts}


def generate(single: Process, prompts: dict[str, list[int]]) -> dict[str, Tokens]:
    for key, prompt in prompts.items():
        single.call("submit", key, prompt, NUM_TOKENS, None)
    return {key: single.call("wait", key) for key in prompts}


def joined(first: Tokens, rest: Tokens) -> Tokens:
    assert (first.error, rest.error) == (None, None)
    assert (len(first.token_ids), rest.first_position, len(rest.token_ids)) == (1, 1, NUM_TOKENS - 1)
    return Tokens(0, first.token_ids + rest.token_ids, first.logprobs + rest.logprobs, is_over=True)


@torch.inference_mode()
def mean_error(directory: Path, device: str, prompt: list[int], tokens: Tokens, dtype: Dtype) -> float:
    """Mean distance between the engine's log-probabilities and transformers' own for the same tokens."""
    assert len(tokens.token_ids) == len(tokens.logprobs) == NUM_TOKENS
    model: Any = AutoModelForCausalLM.from_pretrained(  # a class that transformers chooses at run time
        directory, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    ids = torch.tensor([prompt + tokens.token_ids], device=device)
    logits = model.to(device)(ids).logits[0, len(prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    return float((expected.cpu() - torch.tensor(tokens.logprobs)).abs().mean())
