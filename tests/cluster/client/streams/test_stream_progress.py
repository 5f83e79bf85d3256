"""How one stream is put together from several calls.

Tests of cluster/client/errors.py.
"""

from __future__ import annotations

import grpc
import pytest

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.api.protos.raypd.v1.generate_pb2 import GenerateRequest, GenerateResponse, SamplingParams
from cluster.client.errors import CallFailed
from cluster.client.streams.stream_progress import StreamProgress


def request(request_id: str = "", output_token_ids: tuple[int, ...] = ()) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        text="hello",
        sampling_params=SamplingParams(max_tokens=8, temperature=0.5),
        output_token_ids=output_token_ids,
        cache_salt="tenant",
    )


def test_the_first_call_is_what_was_asked() -> None:
    assert StreamProgress(request("mine")).next_request() == request("mine")


def test_a_further_call_has_the_output_so_far_and_the_seed_and_version_that_made_it() -> None:
    progress = StreamProgress(request("mine"))
    progress.next_request()
    first = GenerateResponse(request_id="mine", text="a", token_ids=[97], seed=7, model_version=3)
    assert progress.take(first).seed == 7
    progress.take(GenerateResponse(request_id="mine", text="bc", token_ids=[98, 99], first_position=1))
    expected = request("mine+2", output_token_ids=(97, 98, 99))
    expected.sampling_params.seed = 7
    expected.model_version = 3
    assert progress.next_request() == expected


def test_a_request_without_an_id_has_none_of_its_own_until_it_was_told_one() -> None:
    """Others are in the same place: two with an id made of nothing would refuse each other."""
    progress = StreamProgress(request())
    progress.next_request()
    assert progress.next_request().request_id == ""


def test_the_reader_sees_one_id_and_the_seed_once() -> None:
    progress = StreamProgress(request())
    progress.next_request()
    progress.take(GenerateResponse(request_id="drawn", token_ids=[97], seed=7, model_version=3))
    assert progress.next_request().request_id == "drawn+2"
    taken = progress.take(
        GenerateResponse(request_id="drawn+2", text="b", token_ids=[98], first_position=1, seed=7, model_version=3)
    )
    assert taken == GenerateResponse(request_id="drawn", text="b", token_ids=[98], first_position=1)


def test_what_was_asked_for_is_not_changed() -> None:
    asked = request("mine")
    progress = StreamProgress(asked)
    progress.take(GenerateResponse(request_id="mine", token_ids=[97], seed=7))
    assert asked == request("mine")


def test_an_id_that_cannot_get_longer_is_drawn_by_the_ingress() -> None:
    progress = StreamProgress(request("x" * 127))
    progress.next_request()
    assert progress.next_request().request_id == ""
    progress.take(GenerateResponse(request_id="drawn", token_ids=[97]))
    assert progress.take(GenerateResponse(request_id="drawn", token_ids=[97], first_position=1)).request_id == "x" * 127


def test_a_resumed_request_goes_on_from_what_it_came_with() -> None:
    progress = StreamProgress(request(output_token_ids=(97, 98)))
    progress.next_request()
    progress.take(GenerateResponse(request_id="r", token_ids=[99], first_position=2))
    assert list(progress.next_request().output_token_ids) == [97, 98, 99]


@pytest.mark.parametrize("position", [0, 2])
def test_tokens_that_are_not_the_next_ones_are_refused(position: int) -> None:
    progress = StreamProgress(request())
    progress.take(GenerateResponse(request_id="r", token_ids=[97]))
    with pytest.raises(CallFailed, match=f"position 1 of the output is next, but {position} came") as raised:
        progress.take(GenerateResponse(request_id="r", token_ids=[98], first_position=position))
    assert raised.value.code is grpc.StatusCode.DATA_LOSS
    assert not raised.value.is_passing


def test_a_stream_has_ended_with_its_finish_reason() -> None:
    progress = StreamProgress(request())
    progress.take(GenerateResponse(request_id="r", token_ids=[97]))
    assert (progress.has_begun, progress.has_ended) == (True, False)
    progress.take(GenerateResponse(request_id="r", finish_reason=generate_pb2.FINISH_REASON_STOP))
    assert progress.has_ended
