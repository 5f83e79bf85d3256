"""Options that can be asked for, and those that are refused.

Tests of cluster/client/sampling_keywords.py.
"""

from __future__ import annotations

import pytest

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client.options import Options, Sampling, make_request


def test_every_sampling_parameter_of_the_api_can_be_given() -> None:
    assert set(Sampling.__annotations__) == {field.name for field in generate_pb2.SamplingParams.DESCRIPTOR.fields}


def test_every_field_of_a_request_can_be_given() -> None:
    descriptor = generate_pb2.GenerateRequest.DESCRIPTOR
    prompts = {field.name for field in descriptor.oneofs_by_name["prompt"].fields}
    of_request = {field.name for field in descriptor.fields} - prompts - {"sampling_params"}
    assert set(Options.__annotations__) - set(Sampling.__annotations__) == of_request | {"timeout_s", "resume"}


def test_a_request_has_what_was_given_and_nothing_else() -> None:
    options: Options = {
        "request_id": "mine",
        "priority": -2,
        "temperature": 0.0,
        "choice": ["yes", "no"],
        "slo": {"ttft_ms": 500, "itl_ms": 40.5},
        "timeout_s": 5.0,
        "resume": False,
    }
    assert make_request("hello", options) == generate_pb2.GenerateRequest(
        request_id="mine",
        priority=-2,
        slo=generate_pb2.Slo(ttft_ms=500, itl_ms=40.5),
        text="hello",
        sampling_params=generate_pb2.SamplingParams(temperature=0.0, choice={"choices": ["yes", "no"]}),
    )


def test_a_prompt_is_text_or_tokens_or_a_conversation() -> None:
    assert make_request([1, 2], {}).token_ids.ids == [1, 2]
    assert make_request([("user", "hi")], {}).chat.messages[0].content == "hi"
    embeds = generate_pb2.PromptEmbeds(data=bytes(4), num_tokens=1, hidden_size=1)
    assert make_request(embeds, {}).prompt_embeds == embeds
    assert make_request([], {}).WhichOneof("prompt") == "token_ids"


def test_one_stop_string_needs_no_list() -> None:
    assert make_request("hello", {"stop": "END"}).sampling_params.stop == ["END"]


def test_what_a_field_cannot_hold_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="max_tokens cannot be 'many'"):
        make_request("hello", {"temperature": 0.0, "max_tokens": "many"})  # type: ignore[typeddict-item]  # the mistake
