"""Greedy float32 tokens equal transformers' generate(), whatever the chunks, the blocks and the neighbours.

Tests of actors/model/forward.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.core.requests.sampling_params import SamplingParams
from actors.core.vllm_view import sampled_token_ids
from kv_transfer.layout import KeyOrder
from tests.actors.model.stepping import Sequence, Stepper, make_runner
from tests.checkpoints import FAMILIES, FURTHER_FAMILIES, VOCAB_SIZE
from tests.reference import greedy_tokens, random_prompt

pytestmark = pytest.mark.usefixtures("shared_models")

CheckpointOf = Callable[[str], Path]

NUM_OUTPUT_TOKENS = 12
PROMPT_LENGTHS = (1, 7, 16, 33, 40)
SAMPLE = ("gpt_oss", "falcon_40b", "stablelm", "gemma4", "mimo", "llama4")
"""The further families that are tried in `make test`."""


def generate(directory: Path, prompt: tuple[int, ...]) -> list[int]:
    return greedy_tokens(directory, prompt, NUM_OUTPUT_TOKENS)


def expected_outputs(directory: Path) -> dict[str, list[int]]:
    return {f"prompt of {length}": generate(directory, tuple(random_prompt(length))) for length in PROMPT_LENGTHS}


def add_all(stepper: Stepper) -> None:
    for length in PROMPT_LENGTHS:
        stepper.add(f"prompt of {length}", Sequence(random_prompt(length)))


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(family, marks=pytest.mark.more) for family in FURTHER_FAMILIES)]
)
def test_greedy_tokens_equal_generate_for_every_chunking_and_block_size(family: str, checkpoint: CheckpointOf) -> None:
    directory = checkpoint(family)
    expected = expected_outputs(directory)
    assert len({tuple(output) for output in expected.values()}) == len(PROMPT_LENGTHS)

    for block_size, chunk, key_order in (
        (16, 1 << 30, KeyOrder.PLAIN),
        (8, 17, KeyOrder.TRANSPOSED),
        (16, 6, KeyOrder.TRANSPOSED),
        (32, 13, KeyOrder.PLAIN),
        (1, 9, KeyOrder.PLAIN),
    ):
        stepper = Stepper(make_runner(directory, block_size=block_size, num_blocks=512, key_order=key_order))
        add_all(stepper)
        assert stepper.run(num_output_tokens=NUM_OUTPUT_TOKENS, chunk=chunk) == expected, (block_size, chunk)


@pytest.mark.parametrize(
    "family",
    [
        *(*FAMILIES, *SAMPLE),
        *(pytest.param(family, marks=pytest.mark.more) for family in FURTHER_FAMILIES if family not in SAMPLE),
    ],
)
def test_one_batch_mixes_prefill_chunks_and_decodes(family: str, checkpoint: CheckpointOf) -> None:
    directory = checkpoint(family)
    stepper = Stepper(make_runner(directory, block_size=8, num_blocks=64, key_order=KeyOrder.TRANSPOSED))
    add_all(stepper)

    stepper.step({"prompt of 33": 20})
    stepper.step({"prompt of 16": 16, "prompt of 33": 13})
    stepper.step({"prompt of 7": 3, "prompt of 16": 1, "prompt of 40": 31, "prompt of 33": 1})
    stepper.step({"prompt of 40": 8, "prompt of 33": 1, "prompt of 7": 4, "prompt of 1": 1})
    outputs = stepper.run(num_output_tokens=NUM_OUTPUT_TOKENS)

    assert outputs == expected_outputs(directory)


def test_nothing_is_sampled_before_the_prompt_is_through(checkpoint: CheckpointOf) -> None:
    stepper = Stepper(make_runner(checkpoint("llama")))
    stepper.add("long", Sequence(random_prompt(40)))
    stepper.add("short", Sequence(random_prompt(7)))

    output = stepper.step({"long": 39, "short": 7})

    assert output.req_ids == ["long", "short"]
    assert sampled_token_ids(output)[0] == []
    assert len(sampled_token_ids(output)[1]) == 1
    assert sampled_token_ids(stepper.step({"long": 1}))[0] != []


def test_preempted_request_goes_on_with_the_same_tokens_in_other_blocks(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("gemma3")
    stepper = Stepper(make_runner(directory, block_size=4, max_num_seqs=5, key_order=KeyOrder.TRANSPOSED))
    add_all(stepper)
    stepper.run(num_output_tokens=5, chunk=20)

    stepper.preempt("prompt of 33")
    stepper.step({"prompt of 7": 1, "prompt of 40": 1})
    outputs = stepper.run(num_output_tokens=NUM_OUTPUT_TOKENS, chunk=20)

    assert outputs == expected_outputs(directory)


def test_a_request_that_is_set_aside_leaves_its_row_to_another(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    stepper = Stepper(make_runner(directory, max_num_seqs=1))
    stepper.add("prompt of 33", Sequence(random_prompt(33)))
    stepper.run(num_output_tokens=4)

    stepper.preempt("prompt of 33")
    stepper.add("prompt of 7", Sequence(random_prompt(7)))
    for _ in range(3):
        sequence = stepper.sequences["prompt of 7"]
        stepper.step({"prompt of 7": sequence.num_tokens - sequence.num_computed})
    stepper.finish("prompt of 7")
    outputs = stepper.run(num_output_tokens=NUM_OUTPUT_TOKENS)

    assert outputs["prompt of 33"] == expected_outputs(directory)["prompt of 33"]


def test_blocks_computed_elsewhere_are_decoded_from_without_computing_the_prompt(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("qwen3")
    prompt = random_prompt(33)
    producer = Stepper(make_runner(directory), seed=1)
    producer.add("r", Sequence(prompt))
    producer.step({"r": 33})
    consumer = Stepper(make_runner(directory), seed=2)
    handed_over = Sequence(prompt, output=list(producer.sequences["r"].output), num_computed=33)
    consumer.add("r", handed_over)
    consumer.allocate(handed_over, 33)

    for source, target in zip(producer.sequences["r"].blocks, handed_over.blocks, strict=True):
        consumer.runner.kv_cache[target] = producer.runner.kv_cache[source]
    outputs = consumer.run(num_output_tokens=NUM_OUTPUT_TOKENS)

    assert outputs["r"] == generate(directory, tuple(prompt))
    assert producer.runner.layout.model_fingerprint == consumer.runner.layout.model_fingerprint


@pytest.mark.parametrize("key_order", KeyOrder)
def test_a_nan_left_in_a_block_by_an_earlier_request_reaches_nobody(
    key_order: KeyOrder, checkpoint: CheckpointOf
) -> None:
    directory = checkpoint("gemma2")
    runner = make_runner(directory, block_size=16, key_order=key_order)
    runner.kv_cache.fill_(float("nan"))
    stepper = Stepper(runner)
    add_all(stepper)

    outputs = stepper.run(num_output_tokens=NUM_OUTPUT_TOKENS, chunk=9)

    assert outputs == expected_outputs(directory)


def test_nans_in_logits_are_counted_for_the_request_that_has_them(checkpoint: CheckpointOf) -> None:
    stepper = Stepper(make_runner(checkpoint("llama")))
    stepper.add("ill", Sequence(random_prompt(20)))
    stepper.add("well", Sequence(random_prompt(21)))
    stepper.run(num_output_tokens=1)

    stepper.runner.kv_cache[stepper.sequences["ill"].blocks[0]] = float("nan")
    output = stepper.step({"ill": 1, "well": 1})

    assert output.num_nans_in_logits == {"ill": VOCAB_SIZE}


def test_sampled_tokens_do_not_depend_on_the_batch(checkpoint: CheckpointOf) -> None:
    runner = make_runner(checkpoint("llama"))
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=7, frequency_penalty=0.3, logprobs=2)
    alone = Stepper(runner)
    alone.add("r", Sequence(random_prompt(33), params))
    expected = alone.run(num_output_tokens=NUM_OUTPUT_TOKENS)["r"]
    alone.finish("r")
    alone.step({})

    crowded = Stepper(runner, seed=3)
    add_all(crowded)
    crowded.add("random", Sequence(random_prompt(9), SamplingParams(temperature=1.3, seed=8, top_k=5)))
    crowded.add("r", Sequence(random_prompt(33), params))
    outputs = crowded.run(num_output_tokens=NUM_OUTPUT_TOKENS, chunk=10)

    assert outputs["r"] == expected
    assert outputs["r"] != outputs["prompt of 33"]
    for output in crowded.outputs:
        assert set(output.logprobs) <= {"r"}


def test_a_resumed_request_draws_the_tokens_that_it_would_have_drawn(checkpoint: CheckpointOf) -> None:
    runner = make_runner(checkpoint("llama"))
    params = SamplingParams(temperature=1.0, seed=11)
    first = Stepper(runner)
    first.add("r", Sequence(random_prompt(16), params))
    whole = list(first.run(num_output_tokens=NUM_OUTPUT_TOKENS)["r"])
    first.finish("r")
    first.step({})

    resumed = Stepper(runner)
    resumed.add("again", Sequence(random_prompt(16), params, output=whole[:5]))

    assert resumed.run(num_output_tokens=NUM_OUTPUT_TOKENS)["again"] == whole


@pytest.mark.parametrize("family", ["mistral", "gemma2", "opt", "qwen3_moe"])
def test_any_history_of_chunks_preemptions_and_neighbours_gives_the_same_tokens(
    family: str, checkpoint: CheckpointOf
) -> None:
    directory = checkpoint(family)
    expected = expected_outputs(directory)
    for seed in range(3):
        chance = random.Random(seed)
        runner = make_runner(directory, block_size=chance.choice([2, 8, 16]), num_blocks=128, max_num_seqs=5)
        stepper = Stepper(runner, seed=seed)
        add_all(stepper)
        outputs: dict[str, list[int]] = {}
        while stepper.sequences:
            chosen = [req_id for req_id in stepper.sequences if chance.random() < 0.6]
            chance.shuffle(chosen)
            waiting = {req_id: stepper.sequences[req_id] for req_id in chosen}
            stepper.step(
                {
                    req_id: chance.randint(1, min(12, sequence.num_tokens - sequence.num_computed))
                    for req_id, sequence in waiting.items()
                }
            )
            for req_id, sequence in waiting.items():
                if len(sequence.output) >= NUM_OUTPUT_TOKENS:
                    outputs[req_id] = stepper.finish(req_id)
                elif chance.random() < 0.05:
                    stepper.preempt(req_id)
        assert outputs == expected, seed


def test_warm_up_leaves_the_cache_as_it_was(checkpoint: CheckpointOf) -> None:
    runner = make_runner(checkpoint("llama"))

    runner.warm_up()

    assert not runner.kv_cache.any()


def test_finished_requests_are_forgotten_even_in_a_step_without_tokens(checkpoint: CheckpointOf) -> None:
    stepper = Stepper(make_runner(checkpoint("llama"), max_num_seqs=1))
    for _ in range(3):
        stepper.add("r", Sequence(random_prompt(7)))
        stepper.run(num_output_tokens=2)
        stepper.finish("r")
        assert stepper.step({}).req_ids == []
