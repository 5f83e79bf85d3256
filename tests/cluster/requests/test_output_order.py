from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import FinishReason
from cluster.requests.output_order import Diverged, OutputOrder


def _output(first_position: int, token_ids: list[int], finish_reason: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id="r",
        attempt=0,
        new_token_ids=token_ids,
        first_position=first_position,
        finish_reason=finish_reason,
        logprobs=[TokenLogprobs([token_id], [-float(token_id)], 1) for token_id in token_ids],
    )


def test_outputs_in_order_pass_as_they_come() -> None:
    order = OutputOrder([])
    outputs = [_output(0, [5]), _output(1, [6, 7]), _output(3, [8], FinishReason.LENGTH)]

    assert [order.push(output) for output in outputs] == [[output] for output in outputs]
    assert list(order.token_ids) == [5, 6, 7, 8]


def test_a_token_that_comes_twice_passes_once() -> None:
    order = OutputOrder([])
    order.push(_output(0, [5]))

    assert order.push(_output(0, [5, 6])) == [_output(1, [6])]
    assert order.push(_output(0, [5])) == [_output(2, [])]


def test_prompt_logprobs_pass_with_the_first_token_and_never_again() -> None:
    order = OutputOrder([])
    first = replace(_output(0, [5]), prompt_logprobs=[TokenLogprobs([4], [-1.0], 1)])

    assert order.push(first) == [first]
    assert order.push(replace(_output(0, [5, 6]), prompt_logprobs=first.prompt_logprobs)) == [_output(1, [6])]


def test_a_token_that_comes_again_late_does_not_turn_positions_back() -> None:
    order = OutputOrder([])
    order.push(_output(0, [5, 6, 7]))

    assert order.push(_output(0, [5])) == [_output(3, [])]


def test_an_early_output_waits_for_the_gap_before_it() -> None:
    order = OutputOrder([])

    assert order.push(_output(1, [6])) == []
    assert order.push(_output(2, [7], FinishReason.LENGTH)) == []
    assert order.has_gap
    assert order.push(_output(0, [5])) == [_output(0, [5]), _output(1, [6]), _output(2, [7], FinishReason.LENGTH)]
    assert not order.has_gap


def test_a_resumed_request_goes_on_after_its_tokens() -> None:
    order = OutputOrder([5, 6])

    assert order.push(_output(2, [7])) == [_output(2, [7])]


def test_another_token_at_the_same_position_is_an_error() -> None:
    order = OutputOrder([5])

    with pytest.raises(Diverged, match="position 0 was token 5 and then token 9"):
        order.push(_output(0, [9, 6]))


@given(num_early=st.integers(1, 4), data=st.data())
def test_any_interleaving_of_two_engines_gives_the_same_output(num_early: int, data: st.DataObject) -> None:
    tokens = list(range(100, 108))
    first = [_output(position, tokens[position : position + 2]) for position in range(num_early)]
    second = [_output(position, tokens[position : position + 1]) for position in range(1, len(tokens))]
    order = OutputOrder([])

    passed: list[EngineCoreOutput] = []
    while first or second:
        sources = [source for source in (first, second) if source]
        passed += order.push(data.draw(st.sampled_from(sources)).pop(0))

    assert [token_id for output in passed for token_id in output.new_token_ids] == tokens
    assert [output.first_position for output in passed if output.new_token_ids] == sorted(
        {output.first_position for output in passed if output.new_token_ids}
    )
    assert not order.has_gap
