from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from actors.core.outputs.scheduler_output import NewRequestData, ResumedRequestData, SchedulerOutput, StepBatch
from actors.core.requests.sampling_params import SamplingParams
from actors.model.input_batch import InputBatch


def new_request(
    req_id: str, row: int, prompt: list[int], blocks: list[int], *, output: list[int] | None = None
) -> NewRequestData:
    return NewRequestData(
        req_id=req_id,
        row=row,
        prompt_token_ids=prompt,
        output_token_ids=output or [],
        sampling_params=SamplingParams(seed=len(prompt)),
        eos_token_ids=(0,),
        block_ids=(blocks,),
        num_computed_tokens=0,
    )


def step_of(
    entries: Mapping[int, tuple[int, int, int]] | None = None, grown: Sequence[tuple[int, int, int]] = ()
) -> StepBatch:
    """entries: row -> (new tokens, computed tokens, output tokens); grown: (row, position, block)."""
    columns = np.array(list((entries or {}).values()), dtype=np.int64).reshape(-1, 3).T
    blocks = np.array(grown, dtype=np.int64).reshape(-1, 3).T
    rows = np.array(list(entries or {}), dtype=np.int64)
    req_ids = [f"in row {row}" for row in rows]
    return StepBatch(req_ids, rows, rows + 1, 0, columns[0], columns[1], columns[2], blocks)


def differences(
    *,
    new: tuple[NewRequestData, ...] = (),
    resumed: tuple[ResumedRequestData, ...] = (),
    grown: Sequence[tuple[int, int, int]] = (),
    finished: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
) -> SchedulerOutput:
    return SchedulerOutput(
        batch=step_of(grown=grown),
        scheduled_new_reqs=list(new),
        scheduled_resumed_reqs=list(resumed),
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
    )


def batch_of(*new: NewRequestData, max_num_seqs: int = 3) -> InputBatch:
    batch = InputBatch(max_num_seqs=max_num_seqs, max_model_len=12, block_size=4)
    batch.update(differences(new=new))
    return batch


def append(batch: InputBatch, row: int, token_id: int) -> None:
    batch.append(np.array([row]), np.array([token_id]))


def test_a_step_is_flattened_in_the_order_of_its_requests() -> None:
    batch = batch_of(new_request("a", 2, [10, 11, 12, 13, 14], [7, 3]), new_request("b", 0, [20, 21], [5]))

    inputs = batch.prepare(step_of({0: (2, 0, 0), 2: (1, 3, 0)}))

    assert inputs.token_ids.tolist() == [20, 21, 13]
    assert inputs.positions.tolist() == [0, 1, 3]
    assert inputs.shape.query_starts.tolist() == [0, 2, 3]
    assert inputs.shape.num_computed.tolist() == [0, 3]
    assert inputs.shape.seq_lens.tolist() == [2, 4]
    assert inputs.shape.block_tables.tolist() == [[5], [7]]
    assert inputs.sampled.tolist() == [0]
    assert inputs.sampled_rows.tolist() == [0]
    assert inputs.logits_indices.tolist() == [1]


def test_a_step_of_single_tokens_is_flattened_alike() -> None:
    batch = batch_of(new_request("a", 0, [10, 11, 12, 13, 14], [7, 3]), new_request("b", 1, [20, 21], [5]))

    inputs = batch.prepare(step_of({1: (1, 1, 0), 0: (1, 4, 0)}))

    assert (inputs.token_ids.tolist(), inputs.positions.tolist()) == ([21, 14], [1, 4])
    assert inputs.shape.block_tables[1].tolist() == [7, 3]
    assert (inputs.sampled.tolist(), inputs.logits_indices.tolist()) == ([0, 1], [0, 1])


def test_the_sampler_sees_prompt_and_output_apart() -> None:
    batch = batch_of(new_request("a", 1, [10, 11, 12], [7], output=[50]))
    append(batch, 1, 51)

    row = batch.sampling_batch(np.array([1])).row_of(0)

    assert row.prompt_token_ids.tolist() == [10, 11, 12]
    assert row.output_token_ids.tolist() == [50, 51]
    assert row.params.seed == 3
    assert row.eos_token_ids == (0,)
    seeds, positions = batch.sampling_batch(np.array([1])).seeds_and_positions()
    assert (seeds.tolist(), positions.tolist()) == ([3], [2])


def test_new_blocks_are_appended_and_those_of_a_resumed_request_replace_the_old() -> None:
    batch = batch_of(new_request("a", 0, list(range(10, 19)), [7, 3]))

    batch.update(differences(grown=[(0, 2, 6)]))
    assert batch.prepare(step_of({0: (1, 8, 0)})).shape.block_tables.tolist() == [[7, 3, 6]]

    batch.update(differences(preempted=("a",), resumed=(ResumedRequestData("a", 2, 9, ([1, 2],)),)))
    assert batch.prepare(step_of({2: (5, 0, 0)})).shape.block_tables.tolist() == [[1, 2]]


def test_a_preempted_request_keeps_its_tokens_without_a_row() -> None:
    batch = batch_of(new_request("a", 0, [10, 11, 12], [7]), max_num_seqs=1)
    append(batch, 0, 50)

    batch.update(differences(preempted=("a",), new=(new_request("b", 0, [20], [7]),)))
    assert batch.prepare(step_of({0: (1, 0, 0)})).token_ids.tolist() == [20]
    batch.update(differences(finished=("b",), resumed=(ResumedRequestData("a", 0, 4, ([4],)),)))
    inputs = batch.prepare(step_of({0: (4, 0, 1)}))

    assert inputs.token_ids.tolist() == [10, 11, 12, 50]
    assert inputs.shape.block_tables.tolist() == [[4]]
    assert len(batch) == 1


def test_a_token_that_was_sampled_while_its_request_was_preempted_is_void() -> None:
    batch = batch_of(new_request("a", 0, [10, 11, 12], [7]))
    append(batch, 0, 50)
    append(batch, 0, 51)

    batch.update(differences(preempted=("a",)))
    batch.update(differences(resumed=(ResumedRequestData("a", 1, 4, ([4],)),)))

    assert batch.prepare(step_of({1: (4, 0, 1)})).token_ids.tolist() == [10, 11, 12, 50]
    assert batch.sampling_batch(np.array([1])).row_of(0).output_token_ids.tolist() == [50]


def test_a_request_that_comes_again_starts_anew() -> None:
    batch = batch_of(new_request("a", 0, [10, 11, 12], [7]), max_num_seqs=1)

    batch.update(differences(new=(new_request("a", 0, [30, 31], [2]),)))

    assert batch.prepare(step_of({0: (2, 0, 0)})).token_ids.tolist() == [30, 31]


def test_unknown_finished_and_preempted_requests_are_ignored() -> None:
    batch = batch_of(new_request("a", 0, [10], [7]))

    batch.update(differences(finished=("x",), preempted=("y",)))

    assert len(batch) == 1


def test_the_token_past_the_longest_sequence_is_not_stored() -> None:
    batch = batch_of(new_request("a", 0, list(range(12)), [1, 2, 3]))

    append(batch, 0, 99)

    assert len(batch.sampling_batch(np.array([0])).row_of(0).output_token_ids) == 0


def test_disagreement_with_the_scheduler_is_a_broken_invariant() -> None:
    batch = batch_of(new_request("a", 0, [10, 11], [7]))

    with pytest.raises(AssertionError, match="output tokens"):
        batch.prepare(step_of({0: (1, 2, 1)}))
    with pytest.raises(AssertionError, match="more tokens were scheduled"):
        batch.prepare(step_of({0: (3, 0, 0)}))
    with pytest.raises(AssertionError, match="still belongs to another request"):
        batch.update(differences(new=(new_request("b", 0, [1], [2]),)))


def test_rows_are_reused_and_never_shared() -> None:
    generator = np.random.default_rng(0)
    batch = InputBatch(max_num_seqs=3, max_model_len=12, block_size=4)
    rows: dict[str, int] = {}
    prompts: dict[str, list[int]] = {}
    for number in range(60):
        finished = [req_id for req_id in prompts if generator.random() < 0.5 or len(prompts) == 3]
        for req_id in finished:
            del prompts[req_id], rows[req_id]
        prompts[str(number)] = [number] * int(generator.integers(1, 12))
        rows[str(number)] = min({0, 1, 2} - set(rows.values()))
        new = new_request(str(number), rows[str(number)], prompts[str(number)], [number])
        batch.update(differences(finished=tuple(finished), new=(new,)))

        inputs = batch.prepare(step_of({rows[req_id]: (len(prompt), 0, 0) for req_id, prompt in prompts.items()}))

        assert inputs.token_ids.tolist() == [token for prompt in prompts.values() for token in prompt]
        assert inputs.shape.block_tables[:, 0].tolist() == [int(req_id) for req_id in prompts]
