"""Tests of actors/core/requests/request_status.py."""

from __future__ import annotations

import itertools

import pytest

from actors.core.requests.request import EngineCoreRequest, Request, RequestStatus
from actors.core.requests.request_status import TRANSITIONS
from actors.core.requests.sampling_params import SamplingParams
from actors.core.vllm_view import num_tokens_with_spec, trace_headers
from actors.errors import IllegalTransition
from kv_transfer.params import TransferRole
from tests.actors.core.builders import EOS, make_request


def test_a_request_counts_its_prompt_and_the_tokens_that_it_came_with() -> None:
    request = make_request("a", [1, 2, 3], output_token_ids=[4, 5])
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (5, 3, 2)
    assert request.all_token_ids == [1, 2, 3, 4, 5]


def test_appended_tokens_get_their_block_hashes_when_these_are_needed() -> None:
    request = make_request("a", range(7))
    assert len(request.block_hashes) == 1
    request.append_output_token_ids(7)
    request.append_output_token_ids([8, 9, 10, 11, 12])
    request.extend_block_hashes()
    assert request.block_hashes == make_request("b", range(13)).block_hashes


def test_a_request_does_not_change_the_lists_that_it_was_made_from() -> None:
    prompt, output = [1, 2], [3]
    request = make_request("a", prompt, output_token_ids=output)
    request.append_output_token_ids(4)
    assert (prompt, output) == ([1, 2], [3])
    assert request.prompt_token_ids == [1, 2]


def test_drafted_tokens_are_counted_apart() -> None:
    request = make_request("a", [1, 2, 3])
    request.spec_token_ids = [4, 5]
    assert (request.num_tokens, num_tokens_with_spec(request)) == (3, 5)


def test_a_trace_context_is_handed_on_as_vllm_names_it() -> None:
    header = f"00-{'1' * 32}-{'2' * 16}-01"
    core_request = EngineCoreRequest(
        request_id="a", prompt_token_ids=[1], sampling_params=SamplingParams(), traceparent=header
    )
    assert trace_headers(Request.from_engine_core_request(core_request)) == {"traceparent": header}
    assert trace_headers(make_request("a")) is None


def test_ignored_eos_does_not_stop_but_a_stop_token_does() -> None:
    assert make_request("a", stop_token_ids=(9,)).stop_token_ids == {9, EOS}
    assert make_request("a", stop_token_ids=(9,), ignore_eos=True).stop_token_ids == {9}


def test_a_ticket_says_which_end_of_the_handoff_a_request_is() -> None:
    assert make_request("a").transfer_role is None
    assert make_request("a", role=TransferRole.CONSUMER).transfer_role is TransferRole.CONSUMER


@pytest.mark.parametrize(("source", "target"), list(itertools.product(RequestStatus, RequestStatus)))
def test_a_status_changes_only_along_a_drawn_arrow(source: RequestStatus, target: RequestStatus) -> None:
    request = make_request("a")
    request.status = source
    if target in TRANSITIONS.get(source, {}):
        request.set_status(target, 1001.0)
        assert request.status is target
        assert request.status_changes[-1].status is target
    else:
        with pytest.raises(IllegalTransition, match=f"a: {source.name} -> {target.name}"):
            request.set_status(target, 1001.0)


def test_nothing_follows_a_final_status() -> None:
    assert not [status for status in RequestStatus if status.is_finished and TRANSITIONS.get(status)]
    assert {status for status in RequestStatus if not status.is_finished} == set(TRANSITIONS)
