"""Requests that ask for everything that a fault could break, and their answers where nothing fails."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

from actors.config import EngineConfig
from actors.core.outputs.model_runner_output import TokenLogprobs
from cluster.parameters.generation import GenerateChunk, GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from kv_transfer.config import KVTransferConfig
from tests.engine_pair import engine_config
from tests.integration.recovering_cluster import RecoveringCluster, collect, recovering_cluster
from tests.reference import greedy_tokens, random_prompt
from tests.token_rules import ALLOWED, words_in

NUM_PROMPT_TOKENS: Final = 44
NUM_TOKENS: Final = 16
CUT: Final = 6
"""Positions that the client has when something dies in the middle of its answer."""

Answers = dict[str, list[GenerateChunk]]


@dataclass(frozen=True, slots=True)
class Expected:
    """directory: of the checkpoint; requests, answers: by name"""

    directory: Path
    requests: dict[str, GenerateRequest]
    answers: Answers


@functools.cache
def expected_answers(directory: Path) -> Expected:
    """The requests, and what a cluster answers where nothing fails."""
    return asyncio.run(_answer(directory))


async def _answer(directory: Path) -> Expected:
    async with recovering_cluster(engines_config(directory), ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        sampling = SamplingOptions(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        prompt = random_prompt(NUM_PROMPT_TOKENS)
        plain = await collect(cluster.serving, GenerateRequest(prompt=TokenPrompt(prompt), sampling=sampling))
        assert token_ids_of(plain) == greedy_tokens(directory, tuple(prompt), NUM_TOKENS)
        requests = _requests(directory, plain)
        return Expected(directory, requests, await ask_all(cluster, requests))


async def ask_all(cluster: RecoveringCluster, requests: dict[str, GenerateRequest]) -> Answers:
    """All of them at once."""
    async with asyncio.TaskGroup() as tasks:
        answers = {name: tasks.create_task(collect(cluster.serving, request)) for name, request in requests.items()}
    return {name: answer.result() for name, answer in answers.items()}


def engines_config(directory: Path) -> EngineConfig:
    """Small steps: the prompts of all requests take many of them."""
    transfer = KVTransferConfig(transport="tcp")
    return engine_config(directory, block_size=8, num_blocks=384, max_num_batched_tokens=64, transfer=transfer)


def token_ids_of(chunks: list[GenerateChunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def text_of(chunks: list[GenerateChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def assert_same(name: str, answer: list[GenerateChunk], expected: list[GenerateChunk]) -> None:
    """An answer is what is expected, whoever gave it. name: for messages"""
    assert (name, token_ids_of(answer)) == (name, token_ids_of(expected))
    assert (name, text_of(answer)) == (name, text_of(expected))
    positions = [chunk.first_position for chunk in answer if chunk.token_ids]
    counts = [len(chunk.token_ids) for chunk in answer if chunk.token_ids]
    assert positions == [positions[0] + sum(counts[:index]) for index in range(len(counts))], name
    _assert_same_logprobs(name, answer, expected)
    assert [chunk.seed is not None for chunk in answer] == [True] + [False] * (len(answer) - 1)
    assert [chunk.end is not None for chunk in answer] == [False] * (len(answer) - 1) + [True]
    end, expected_end = answer[-1].end, expected[-1].end
    assert end is not None
    assert expected_end is not None
    assert (end.finish_reason, end.stop_reason) == (expected_end.finish_reason, expected_end.stop_reason), name
    assert end.usage.num_prompt_tokens == expected_end.usage.num_prompt_tokens
    assert end.usage.num_output_tokens == expected_end.usage.num_output_tokens, name
    assert end.usage.num_cached_tokens <= end.usage.num_prompt_tokens
    assert end.timings.ttft_s is not None
    assert (end.timings.tpot_s is not None) == (sum(counts) > 1)
    assert (end.timings.tpot_s or 0.0) >= 0


def _requests(directory: Path, plain: list[GenerateChunk]) -> dict[str, GenerateRequest]:
    """One for each promise. plain: a greedy answer to the prompt that most of them have."""
    prompt, token_ids = random_prompt(NUM_PROMPT_TOKENS), token_ids_of(plain)
    greedy = SamplingOptions(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    sampled = SamplingOptions(
        temperature=0.9, top_k=50, top_p=0.95, min_p=0.02, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True
    )
    likely = dict.fromkeys(token_ids[1:4], 3.0)
    asked: dict[str, tuple[SamplingOptions, tuple[int, ...]]] = {
        "greedy": (greedy, ()),
        "sampled": (sampled, ()),
        "short": (replace(sampled, seed=8, max_tokens=CUT + 2), ()),
        "stop string": (replace(greedy, stop=(_text_around_cut(plain),)), ()),
        "kept stop string": (replace(greedy, stop=(_text_around_cut(plain),), include_stop_str_in_output=True), ()),
        "held text": (replace(greedy, stop=(_text_around_cut(plain) + "never",)), ()),
        "stop token": (replace(sampled, stop_token_ids=tuple(range(3, 63)), min_tokens=CUT + 3), ()),
        "eos": (replace(sampled, ignore_eos=False, min_tokens=CUT + 1, logit_bias={0: 12.0}), ()),
        "ignored eos": (replace(sampled, logit_bias={0: 4.0}), ()),
        "logprobs": (replace(sampled, logprobs=3), ()),
        "prompt logprobs": (replace(sampled, logprobs=0, prompt_logprobs=2), ()),
        "repetition": (replace(greedy, repetition_penalty=1.8), ()),
        "presence": (replace(greedy, presence_penalty=1.9, logit_bias=likely), ()),
        "frequency": (replace(sampled, frequency_penalty=1.7, logit_bias=likely), ()),
        "allowed tokens": (replace(sampled, allowed_token_ids=ALLOWED), ()),
        "bad words": (replace(greedy, bad_words=words_in(directory, token_ids[1:]).words), ()),
        "resumed": (replace(greedy, logprobs=0), tuple(token_ids[:3])),
    }
    return {
        # Salted: each of them is computed and moved for itself, though they begin alike.
        name: GenerateRequest(
            prompt=TokenPrompt(prompt),
            request_id=name,
            sampling=sampling,
            output_token_ids=output_token_ids,
            cache_salt=name,
        )
        for name, (sampling, output_token_ids) in asked.items()
    }


def _text_around_cut(chunks: list[GenerateChunk]) -> str:
    """Text that begins before the cut, ends behind it, and is nowhere before."""
    before = "".join(chunk.text for chunk in chunks[:CUT])
    whole = text_of(chunks)
    for num_chars in range(1, len(before)):
        found = whole[len(before) - num_chars : len(before) + 2]
        if whole.find(found) == len(before) - num_chars:
            return found
    raise AssertionError(f"no such text in {whole!r}")


def _assert_same_logprobs(name: str, answer: list[GenerateChunk], expected: list[GenerateChunk]) -> None:
    """Equal but for rounding: a position is computed in another batch than it would have been."""
    ours, theirs = _logprobs_of(answer), _logprobs_of(expected)
    assert [(one.token_ids, one.rank) for one in ours] == [(one.token_ids, one.rank) for one in theirs], name
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4), name


def _logprobs_of(chunks: list[GenerateChunk]) -> list[TokenLogprobs]:
    """Return those of the prompt, if there are any, then those of the output."""
    return [logprobs for chunk in chunks for logprobs in (*(chunk.prompt_logprobs or ()), *(chunk.logprobs or ()))]
