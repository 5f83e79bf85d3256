"""The benchmarks' client over gRPC against an ingress whose answers are known."""

from __future__ import annotations

import itertools

from benchmarks.grpc_sender import GrpcSender
from cluster.bench.arrivals import PlannedRequest
from cluster.bench.prompts import PromptSource, Vocabulary
from cluster.bench.record import RequestRecord
from cluster.client import GenerateClient
from tests.cluster.client.scripted_ingress import ScriptedIngress

_PROMPTS = PromptSource(Vocabulary(range(3, 100)), seed=1)
_REQUEST = PlannedRequest(0, 0.0, num_input_tokens=4, num_output_tokens=5)


async def _answered(ingress: ScriptedIngress) -> tuple[RequestRecord, GrpcSender]:
    seconds = itertools.count(10.0)
    async with GenerateClient(ingress.address, overload_timeout_s=0) as client:
        sender = GrpcSender(client, _PROMPTS, clock=lambda: next(seconds))
        record = RequestRecord(_REQUEST, arrival_s=0.0)
        await sender.prepare(_REQUEST)(record)
    return record, sender


async def test_each_response_with_a_token_is_an_event_and_the_prompt_is_the_plans() -> None:
    with ScriptedIngress(lambda _: "hello").serving() as ingress:
        record, sender = await _answered(ingress)
    assert (record.error, record.sent_s, record.num_events, record.num_tokens) == (None, 10.0, 5, 5)
    assert (record.ttft_s, record.e2e_s, list(record.gaps_s or ())) == (1.0, 5.0, [1.0] * 4)
    assert len(sender.timings) == 1
    [request] = ingress.requests
    assert list(request.token_ids.ids) == _PROMPTS.token_ids(_REQUEST)
    assert (request.sampling_params.max_tokens, request.sampling_params.ignore_eos) == (5, True)


async def test_a_refused_request_has_failed_and_is_not_sent_again() -> None:
    ingress = ScriptedIngress()
    ingress.num_refusals = 1
    with ingress.serving():
        record, sender = await _answered(ingress)
    assert (record.error, record.is_complete, sender.timings) == ("RESOURCE_EXHAUSTED", False, [])
    assert len(ingress.requests) == 1
