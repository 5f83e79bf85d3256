from __future__ import annotations

import numpy as np
import pytest

from actors.core.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from actors.core.sampling_params import SamplingParams
from actors.model.input_batch import InputBatch


def new_request(
    req_id: str, prompt: list[int], blocks: list[int], *, output: list[int] | None = None
) -> NewRequestData:
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=prompt,
        output_token_ids=output or [],
        sampling_params=SamplingParams(seed=len(prompt)),
        eos_token_ids=(0,),
        block_ids=(blocks,),
        num_computed_tokens=0,
    )


def differences(
    *,
    new: tuple[NewRequestData, ...] = (),
    cached: CachedRequestData | None = None,
    finished: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
) -> SchedulerOutput:
    return SchedulerOutput(list(new), cached or CachedRequestData(), {}, 0, set(finished), set(preempted))


def cached_request(
    req_id: str, blocks: list[int], *, computed: int, outputs: int, resumed: bool = False
) -> CachedRequestData:
    return CachedRequestData([req_id], [resumed], [[]], [(blocks,)], [computed], [outputs])


def batch_of(*new: NewRequestData, max_num_seqs: int = 3) -> InputBatch:
    batch = InputBatch(max_num_seqs=max_num_seqs, max_model_len=12, block_size=4)
    batch.update(differences(new=new))
    return batch


def test_a_step_is_flattened_in_the_order_of_its_requests() -> None:
    batch = batch_of(new_request("a", [10, 11, 12, 13, 14], [7, 3]), new_request("b", [20, 21], [5]))
    batch.update(differences(cached=cached_request("a", [], computed=3, outputs=0)))

    inputs = batch.prepare({"b": 2, "a": 1})

    assert inputs.req_ids == ["b", "a"]
    assert inputs.token_ids.tolist() == [20, 21, 13]
    assert inputs.positions.tolist() == [0, 1, 3]
    assert inputs.shape.query_starts.tolist() == [0, 2, 3]
    assert inputs.shape.num_computed.tolist() == [0, 3]
    assert inputs.shape.seq_lens.tolist() == [2, 4]
    assert inputs.shape.block_tables[0, 0] == 5
    assert inputs.shape.block_tables[1].tolist() == [7, 3]
    assert inputs.sampled.tolist() == [0]
    assert inputs.logits_indices.tolist() == [1]


def test_the_sampler_sees_prompt_and_output_apart() -> None:
    batch = batch_of(new_request("a", [10, 11, 12], [7], output=[50]))
    batch.append("a", 51)

    row = batch.sampling_row("a")

    assert row.prompt_token_ids.tolist() == [10, 11, 12]
    assert row.output_token_ids.tolist() == [50, 51]
    assert row.params.seed == 3
    assert row.eos_token_ids == (0,)


def test_new_blocks_are_appended_and_those_of_a_resumed_request_replace_the_old() -> None:
    batch = batch_of(new_request("a", list(range(10, 19)), [7, 3]))

    batch.update(differences(cached=cached_request("a", [6], computed=8, outputs=0)))
    assert batch.prepare({"a": 1}).shape.block_tables.tolist() == [[7, 3, 6]]

    batch.update(differences(cached=cached_request("a", [1, 2], computed=0, outputs=0, resumed=True)))
    assert batch.prepare({"a": 4}).shape.block_tables.tolist() == [[1, 2]]


def test_a_preempted_request_keeps_its_tokens_without_a_row() -> None:
    batch = batch_of(new_request("a", [10, 11, 12], [7]), max_num_seqs=1)
    batch.append("a", 50)

    batch.update(differences(preempted=("a",), new=(new_request("b", [20], [7]),)))
    assert batch.prepare({"b": 1}).token_ids.tolist() == [20]
    batch.update(differences(finished=("b",), cached=cached_request("a", [4], computed=0, outputs=1, resumed=True)))
    inputs = batch.prepare({"a": 4})

    assert inputs.token_ids.tolist() == [10, 11, 12, 50]
    assert inputs.shape.block_tables.tolist() == [[4]]
    assert len(batch) == 1


def test_a_request_that_comes_again_starts_anew() -> None:
    batch = batch_of(new_request("a", [10, 11, 12], [7]), max_num_seqs=1)

    batch.update(differences(new=(new_request("a", [30, 31], [2]),)))

    assert batch.prepare({"a": 2}).token_ids.tolist() == [30, 31]


def test_unknown_finished_and_preempted_requests_are_ignored() -> None:
    batch = batch_of(new_request("a", [10], [7]))

    batch.update(differences(finished=("x",), preempted=("y",)))

    assert len(batch) == 1


def test_the_token_past_the_longest_sequence_is_not_stored() -> None:
    batch = batch_of(new_request("a", list(range(12)), [1, 2, 3]))

    batch.append("a", 99)

    assert len(batch.sampling_row("a").output_token_ids) == 0


def test_disagreement_with_the_scheduler_is_a_broken_invariant() -> None:
    batch = batch_of(new_request("a", [10, 11], [7]))

    with pytest.raises(AssertionError, match="output tokens"):
        batch.update(differences(cached=cached_request("a", [], computed=2, outputs=1)))
    with pytest.raises(AssertionError, match="more tokens were scheduled"):
        batch.prepare({"a": 3})


def test_rows_are_reused_and_never_shared() -> None:
    generator = np.random.default_rng(0)
    batch = InputBatch(max_num_seqs=3, max_model_len=12, block_size=4)
    prompts: dict[str, list[int]] = {}
    for number in range(60):
        finished = [req_id for req_id in prompts if generator.random() < 0.5 or len(prompts) == 3]
        for req_id in finished:
            del prompts[req_id]
        prompts[str(number)] = [number] * int(generator.integers(1, 12))
        new = new_request(str(number), prompts[str(number)], [number])
        batch.update(differences(finished=tuple(finished), new=(new,)))

        inputs = batch.prepare({req_id: len(prompt) for req_id, prompt in prompts.items()})

        assert inputs.token_ids.tolist() == [token for prompt in prompts.values() for token in prompt]
        assert inputs.shape.block_tables[:, 0].tolist() == [int(req_id) for req_id in prompts]
