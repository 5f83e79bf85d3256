"""A request's answer is the same when engines die under it, whatever it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from actors.core.requests.request import FinishReason
from tests.integration.promises import (
    CUT,
    NUM_PROMPT_TOKENS,
    NUM_TOKENS,
    Answers,
    Expected,
    ask_all,
    assert_same,
    engines_config,
    expected_answers,
    token_ids_of,
)
from tests.integration.recovering_cluster import RecoveringCluster, recovering_cluster
from tests.kv_transfer.swallowing_proxy import SwallowingProxy
from tests.reference import random_prompt
from tests.token_rules import ALLOWED, ruled_tokens, words_in

_TIMEOUT_S: Final = 60.0


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], Path]) -> Expected:
    return expected_answers(checkpoint("llama"))


@dataclass(slots=True)
class _Run:
    """One run of all requests, in which engines die. answers: what is to come."""

    cluster: RecoveringCluster
    answers: Answers

    def stop_at(self, engine_id: str, position: int) -> None:
        """Let nothing of an engine through from this position on."""
        num_requests = sum(len(token_ids_of(answer)) > position for answer in self.answers.values())
        self.cluster.tap.close([engine_id], position, num_requests)

    async def kill_stopped(self, engine_id: str, successor: str) -> None:
        """Kill an engine once all requests that get there have stopped, and the others have ended.

        Another one has joined by then. A request that was still on its way to its second engine would seem to be what
        both of them died of.
        """
        await self.cluster.tap.has_stopped.wait()
        while self.cluster.serving.num_requests_in_flight > self.cluster.tap.num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await self.cluster.join(successor)
        await self.cluster.kill(engine_id)

    async def kill_in_step(self, engine_id: str) -> None:
        """Kill an engine in the step that its barrier holds."""
        await self.cluster.barriers[engine_id].is_reached.wait()
        await self.cluster.kill(engine_id)


async def _prefill_dies_in_its_first_step(run: _Run) -> None:
    run.cluster.barriers["prefill-0"].close(0)
    await run.kill_in_step("prefill-0")


async def _prefill_dies_during_handoffs(run: _Run) -> None:
    run.cluster.barriers["prefill-0"].close(4)
    await run.kill_in_step("prefill-0")


async def _decode_dies_during_handoffs(run: _Run) -> None:
    barrier = run.cluster.barriers["prefill-0"]
    barrier.close(4)
    await barrier.is_reached.wait()
    await run.cluster.join("decode-1")
    await run.cluster.kill("decode-0")
    barrier.open()


async def _decode_dies_after_the_first_token(run: _Run) -> None:
    run.stop_at("decode-0", 1)
    await run.kill_stopped("decode-0", "decode-1")


async def _decode_dies_twice(run: _Run) -> None:
    run.stop_at("decode-0", CUT)
    await run.cluster.tap.has_stopped.wait()
    run.stop_at("decode-1", CUT + 2)
    await run.cluster.join("decode-1")
    await run.cluster.kill("decode-0")
    await run.kill_stopped("decode-1", "decode-2")


async def _decode_dies_and_then_prefill(run: _Run) -> None:
    run.stop_at("decode-0", CUT)
    await run.cluster.tap.has_stopped.wait()
    run.cluster.barriers["prefill-0"].close(0)
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
    expected: Expected,
) -> None:
    requests, answers = expected.requests, expected.answers
    engine_ids = ["prefill-0", *(f"decode-{n}" for n in range(3 if fault is _decode_dies_twice else 2))]
    async with recovering_cluster(engines_config(expected.directory), engine_ids) as cluster:
        await cluster.join("prefill-0", "decode-0")
        async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(fault(_Run(cluster, answers)))
            asking = tasks.create_task(ask_all(cluster, requests))
        for name, answer in asking.result().items():
            assert_same(name, answer, answers[name])
        await cluster.until_idle()


@pytest.mark.parametrize("position", [0, CUT], ids=["before the first token", "in the middle"])
async def test_an_answer_is_the_same_when_a_living_engine_is_cut_off(position: int, expected: Expected) -> None:
    requests, answers = expected.requests, expected.answers
    async with recovering_cluster(engines_config(expected.directory), ["prefill-0", "decode-0"]) as cluster:
        with SwallowingProxy(cluster.port_of("decode-0")) as proxy:
            cluster.reach_through("decode-0", proxy.address)
            await cluster.join("prefill-0", "decode-0")
            run = _Run(cluster, answers)
            run.stop_at("decode-0", max(1, position))
            if position == 0:
                cluster.barriers["prefill-0"].close(3)
            async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                asking = tasks.create_task(ask_all(cluster, requests))
                has_come = cluster.tap.has_stopped if position else cluster.barriers["prefill-0"].is_reached
                await has_come.wait()
                cluster.tap.close([], 0, 0)
                await cluster.cut_off("decode-0", proxy.cut)
                cluster.barriers["prefill-0"].open()
            for name, answer in asking.result().items():
                assert_same(name, answer, answers[name])
            await cluster.until_idle()


def test_the_requests_are_what_they_are_meant_to_be(expected: Expected) -> None:
    """Or the test above would prove less than it seems to."""
    answers = expected.answers
    ends = {name: answer[-1].end for name, answer in answers.items()}
    reasons = {name: (end.finish_reason, end.stop_reason) for name, end in ends.items() if end is not None}
    assert reasons["eos"] == (FinishReason.STOP, 0)
    for name in ("stop string", "kept stop string"):
        assert reasons[name][0] is FinishReason.STOP
        assert CUT < len(token_ids_of(answers[name])) < NUM_TOKENS
    assert reasons["stop token"][0] is FinishReason.STOP
    assert CUT + 3 <= len(token_ids_of(answers["stop token"])) < NUM_TOKENS
    assert 0 in token_ids_of(answers["ignored eos"])
    assert len(token_ids_of(answers["short"])) == CUT + 2
    assert len(token_ids_of(answers["resumed"])) == NUM_TOKENS - 3
    assert sum(len(chunk.logprobs or ()) for chunk in answers["logprobs"]) == NUM_TOKENS
    assert len(answers["prompt logprobs"][0].prompt_logprobs or ()) == NUM_PROMPT_TOKENS - 1
    plain = token_ids_of(answers["greedy"])
    assert set(token_ids_of(answers["allowed tokens"])) <= set(ALLOWED)
    words = words_in(expected.directory, plain[1:]).token_ids
    assert token_ids_of(answers["bad words"]) == ruled_tokens(
        expected.directory, random_prompt(NUM_PROMPT_TOKENS), NUM_TOKENS, bad_words=words
    )
    for name in ("sampled", "bad words", "repetition", "presence", "frequency", "stop token"):
        assert token_ids_of(answers[name]) != plain, name
