from __future__ import annotations

import pytest

from actors.core.sampling_params import StructuredOutputParams
from cluster.ingress.conversions import request_from_proto
from cluster.ingress.protos.raypd.v1 import generate_pb2


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (generate_pb2.SamplingParams(), None),
        (generate_pb2.SamplingParams(json_schema="{}"), StructuredOutputParams("json_schema", "{}")),
        (generate_pb2.SamplingParams(json_object=True), StructuredOutputParams("json_object")),
        (generate_pb2.SamplingParams(json_object=False), StructuredOutputParams("json_object", "false")),
        (generate_pb2.SamplingParams(regex="a"), StructuredOutputParams("regex", "a")),
        (
            generate_pb2.SamplingParams(choice=generate_pb2.Choices(choices=["é", 'b"'])),
            StructuredOutputParams("choice", '["é", "b\\""]'),
        ),
        (generate_pb2.SamplingParams(grammar=""), StructuredOutputParams("grammar", "")),
    ],
)
def test_structured_output_is_read(
    params: generate_pb2.SamplingParams, expected: StructuredOutputParams | None
) -> None:
    request = request_from_proto("a", generate_pb2.GenerateRequest(text="x", sampling_params=params), None)
    assert request.sampling.structured_output == expected
