"""Whatever a request asks for, its answer is the same when engines die under it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from actors.config import EngineConfig
from actors.core.request import FinishReason
from cluster.generation import GenerateChunk, GenerateRequest, SamplingOptions, TokenPrompt
from kv_transfer.config import KVTransferConfig
from tests.engine_pair import engine_config
from tests.integration.recovering_cluster import RecoveringCluster, collect, recovering_cluster
from tests.reference import greedy_tokens, random_prompt

_NUM_TOKENS: Final = 16
_TIMEOUT_S: Final = 30.0
_CUT: Final = 6
"""Positions that the client has when a decode engine dies."""
_Answers = dict[str, list[GenerateChunk]]


def _requests(plain: list[GenerateChunk]) -> dict[str, GenerateRequest]:
    """One for each promise. plain: a greedy answer to the prompt that most of them have."""
    prompt, token_ids = random_prompt(44), _token_ids(plain)
    greedy = SamplingOptions(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    sampled = SamplingOptions(
        temperature=0.9, top_k=50, top_p=0.95, min_p=0.02, seed=7, max_tokens=_NUM_TOKENS, ignore_eos=True
    )
    likely = dict.fromkeys(token_ids[1:4], 3.0)
    asked: dict[str, tuple[SamplingOptions, tuple[int, ...]]] = {
        "greedy": (greedy, ()),
        "sampled": (sampled, ()),
        "short": (replace(sampled, seed=8, max_tokens=_CUT + 2), ()),
        "stop string": (replace(greedy, stop=(_text_around_cut(plain),)), ()),
        "kept stop string": (replace(greedy, stop=(_text_around_cut(plain),), include_stop_str_in_output=True), ()),
        "held text": (replace(greedy, stop=(_text_around_cut(plain) + "never",)), ()),
        "stop token": (replace(sampled, stop_token_ids=tuple(range(3, 63)), min_tokens=_CUT + 3), ()),
        "eos": (replace(sampled, ignore_eos=False, min_tokens=_CUT + 1, logit_bias={0: 12.0}), ()),
        "ignored eos": (replace(sampled, logit_bias={0: 4.0}), ()),
        "logprobs": (replace(sampled, logprobs=3), ()),
        "repetition": (replace(greedy, repetition_penalty=1.8), ()),
        "presence": (replace(greedy, presence_penalty=1.9, logit_bias=likely), ()),
        "frequency": (replace(sampled, frequency_penalty=1.7, logit_bias=likely), ()),
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


async def _ask_all(cluster: RecoveringCluster, requests: dict[str, GenerateRequest]) -> _Answers:
    async with asyncio.TaskGroup() as tasks:
        answers = {name: tasks.create_task(collect(cluster.serving, request)) for name, request in requests.items()}
    return {name: answer.result() for name, answer in answers.items()}


@pytest.fixture(scope="module")
def directory(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def expected(directory: Path) -> tuple[dict[str, GenerateRequest], _Answers]:
    """The requests, and their answers where nothing fails."""

    async def ask() -> tuple[dict[str, GenerateRequest], _Answers]:
        async with recovering_cluster(_config(directory), ["prefill-0", "decode-0"]) as cluster:
            await cluster.join("prefill-0", "decode-0")
            sampling = SamplingOptions(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
            prompt = random_prompt(44)
            plain = await collect(cluster.serving, GenerateRequest(prompt=TokenPrompt(prompt), sampling=sampling))
            assert _token_ids(plain) == greedy_tokens(directory, tuple(prompt), _NUM_TOKENS)
            requests = _requests(plain)
            return requests, await _ask_all(cluster, requests)

    return asyncio.run(ask())


def _config(directory: Path) -> EngineConfig:
    """Small steps: the prompts of all requests take many of them."""
    transfer = KVTransferConfig(transport="tcp")
    return engine_config(directory, block_size=8, num_blocks=384, max_num_batched_tokens=64, transfer=transfer)


@dataclass(slots=True)
class _Run:
    """One run of all requests, in which engines die. answers: what is to come."""

    cluster: RecoveringCluster
    answers: _Answers

    def stop_at(self, engine_id: str, position: int) -> None:
        """Let nothing of an engine through from this position on."""
        num_requests = sum(len(_token_ids(answer)) > position for answer in self.answers.values())
        self.cluster.tap.close([engine_id], position, num_requests)

    async def kill_stopped(self, engine_id: str, successor: str) -> None:
        """Kill an engine once all requests that get there have stopped; another one has joined by then."""
        await self.cluster.tap.has_stopped.wait()
        await self.cluster.join(successor)
        await self.cluster.kill(engine_id)

    async def kill_in_step(self, engine_id: str) -> None:
        """Kill an engine in the step that its gate holds."""
        await self.cluster.gates[engine_id].is_reached.wait()
        await self.cluster.kill(engine_id)


async def _prefill_dies_in_its_first_step(run: _Run) -> None:
    run.cluster.gates["prefill-0"].close(0)
    await run.kill_in_step("prefill-0")


async def _prefill_dies_during_handoffs(run: _Run) -> None:
    run.cluster.gates["prefill-0"].close(4)
    await run.kill_in_step("prefill-0")


async def _decode_dies_during_handoffs(run: _Run) -> None:
    gate = run.cluster.gates["prefill-0"]
    gate.close(4)
    await gate.is_reached.wait()
    await run.cluster.join("decode-1")
    await run.cluster.kill("decode-0")
    gate.open()


async def _decode_dies_after_the_first_token(run: _Run) -> None:
    run.stop_at("decode-0", 1)
    await run.kill_stopped("decode-0", "decode-1")


async def _decode_dies_twice(run: _Run) -> None:
    run.stop_at("decode-0", _CUT)
    await run.cluster.tap.has_stopped.wait()
    run.stop_at("decode-1", _CUT + 2)
    await run.cluster.join("decode-1")
    await run.cluster.kill("decode-0")
    await run.kill_stopped("decode-1", "decode-2")


async def _decode_dies_and_then_prefill(run: _Run) -> None:
    run.stop_at("decode-0", _CUT)
    await run.cluster.tap.has_stopped.wait()
    run.cluster.gates["prefill-0"].close(0)
    await run.kill_stopped("decode-0", "decode-1")
    await run.kill_in_step("prefill-0")


_FAULTS: Final = (
    _prefill_dies_in_its_first_step,
    _prefill_dies_during_handoffs,
    _decode_dies_during_handoffs,
    _decode_dies_after_the_first_token,
    _decode_dies_twice,
    _decode_dies_and_then_prefill,
)


@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.__name__.strip("_"))
async def test_an_answer_is_the_same_when(
    fault: Callable[[_Run], Coroutine[Any, Any, None]],
    directory: Path,
    expected: tuple[dict[str, GenerateRequest], _Answers],
) -> None:
    requests, answers = expected
    engine_ids = ["prefill-0", *(f"decode-{n}" for n in range(3 if fault is _decode_dies_twice else 2))]
    async with recovering_cluster(_config(directory), engine_ids) as cluster:
        await cluster.join("prefill-0", "decode-0")
        async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(fault(_Run(cluster, answers)))
            asking = tasks.create_task(_ask_all(cluster, requests))
        for name, answer in asking.result().items():
            _assert_same(name, answer, answers[name])
        await cluster.until_idle()


def _assert_same(name: str, answer: list[GenerateChunk], expected: list[GenerateChunk]) -> None:
    assert (name, _token_ids(answer)) == (name, _token_ids(expected))
    assert (name, _text(answer)) == (name, _text(expected))
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
    assert end.timings.tpot_s is not None
    assert end.timings.tpot_s >= 0


def _assert_same_logprobs(name: str, answer: list[GenerateChunk], expected: list[GenerateChunk]) -> None:
    """Equal but for rounding: a position is computed in another batch than it would have been."""
    ours = [logprobs for chunk in answer for logprobs in chunk.logprobs or ()]
    theirs = [logprobs for chunk in expected for logprobs in chunk.logprobs or ()]
    assert [(one.token_ids, one.rank) for one in ours] == [(one.token_ids, one.rank) for one in theirs], name
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4), name


def test_the_requests_are_what_they_are_meant_to_be(expected: tuple[dict[str, GenerateRequest], _Answers]) -> None:
    """Or the test above would prove less than it seems to."""
    _, answers = expected
    ends = {name: answer[-1].end for name, answer in answers.items()}
    reasons = {name: (end.finish_reason, end.stop_reason) for name, end in ends.items() if end is not None}
    assert reasons["eos"] == (FinishReason.STOP, 0)
    for name in ("stop string", "kept stop string"):
        assert reasons[name][0] is FinishReason.STOP
        assert _CUT < len(_token_ids(answers[name])) < _NUM_TOKENS
    assert reasons["stop token"][0] is FinishReason.STOP
    assert _CUT + 3 <= len(_token_ids(answers["stop token"])) < _NUM_TOKENS
    assert 0 in _token_ids(answers["ignored eos"])
    assert len(_token_ids(answers["short"])) == _CUT + 2
    assert len(_token_ids(answers["resumed"])) == _NUM_TOKENS - 3
    assert sum(len(chunk.logprobs or ()) for chunk in answers["logprobs"]) == _NUM_TOKENS
    plain = _token_ids(answers["greedy"])
    for name in ("sampled", "repetition", "presence", "frequency", "stop token"):
        assert _token_ids(answers[name]) != plain, name


def _text_around_cut(chunks: list[GenerateChunk]) -> str:
    """Text that begins before the cut, ends behind it, and is nowhere before."""
    before = "".join(chunk.text for chunk in chunks[:_CUT])
    whole = _text(chunks)
    for num_chars in range(1, len(before)):
        found = whole[len(before) - num_chars : len(before) + 2]
        if whole.find(found) == len(before) - num_chars:
            return found
    raise AssertionError(f"no such text in {whole!r}")


def _token_ids(chunks: list[GenerateChunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def _text(chunks: list[GenerateChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)
