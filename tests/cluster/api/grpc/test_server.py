"""Tests of cluster/api/grpc/conversions/statuses.py, cluster/api/grpc/generate_service.py,
cluster/api/protos/shared_errors.py.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import FinishReason
from cluster.api.protos.raypd.v1 import generate_pb2, model_pb2, model_pb2_grpc
from cluster.client import CallFailed, GenerateClient
from cluster.errors import AddressUnavailable
from cluster.requests.serving import Serving
from tests.cluster.serving_setup import (
    Pair,
    decode_timings,
    make_ingress_server,
    make_pair,
    make_serving,
    prefill_timings,
)
from tests.fakes import VOCAB_SIZE


@asynccontextmanager
async def _serving_at(serving: Serving) -> AsyncIterator[str]:
    server = make_ingress_server(serving)
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.drain(grace_s=0)


@asynccontextmanager
async def _client(serving: Serving) -> AsyncIterator[GenerateClient]:
    async with _serving_at(serving) as address, GenerateClient(address) as client:
        yield client


async def _both_aborted(pair: Pair) -> None:
    await asyncio.wait_for(pair.prefill.has_aborted.wait(), timeout=60)
    await asyncio.wait_for(pair.decode.has_aborted.wait(), timeout=60)


async def test_tokens_stream_as_they_come_and_the_last_response_tells_everything() -> None:
    pair = make_pair()
    async with _client(pair.serving) as client:
        responses = client.generate("hello", request_id="mine", seed=3)
        first = asyncio.ensure_future(anext(responses))
        producer, consumer = await pair.next_requests()

        logprobs = [TokenLogprobs([97, 98, 99], [-0.5, -0.25, -2.0], 2)]
        pair.prefill.send(
            producer, 0, "a", end_cause=EndCause.HANDED_OVER, timings=prefill_timings(), logprobs=logprobs
        )
        assert await first == generate_pb2.GenerateResponse(
            request_id="mine",
            text="a",
            token_ids=[97],
            first_position=0,
            seed=3,
            model_version=1,
            logprobs=[
                generate_pb2.TokenLogprobs(
                    token_id=97,
                    logprob=-0.5,
                    rank=2,
                    top=[
                        generate_pb2.TopLogprob(token_id=98, logprob=-0.25),
                        generate_pb2.TopLogprob(token_id=99, logprob=-2.0),
                    ],
                )
            ],
        )
        pair.decode.send(consumer, 1, "b!", finish_reason=FinishReason.STOP, stop_token_id=33, timings=decode_timings())
        last = await anext(responses)
        with pytest.raises(StopAsyncIteration):
            await anext(responses)

    assert last == generate_pb2.GenerateResponse(
        request_id="mine",
        text="b",
        token_ids=b"b!",
        first_position=1,
        finish_reason=generate_pb2.FINISH_REASON_STOP,
        stop_token_id=33,
        usage=generate_pb2.Usage(prompt_tokens=5, output_tokens=3, cached_tokens=2),
        timings=generate_pb2.Timings(
            ttft_s=1.0,
            tpot_s=0.5,
            queued_s=0.25,
            prefill_s=0.5,
            transfer=generate_pb2.Transfer(kv_bytes=4096, transfer_s=0.75, exposed_s=0.0625),
            prefill_engine=generate_pb2.EngineTimings(
                engine_id="p0",
                queued_s=0.25,
                prefill_s=0.5,
                computed_prompt_tokens=3,
                cached_tokens=2,
                status_changes=[
                    generate_pb2.StatusChange(status=generate_pb2.REQUEST_STATUS_WAITING, at_s=1.0),
                    generate_pb2.StatusChange(status=generate_pb2.REQUEST_STATUS_RUNNING, at_s=1.25),
                ],
                fetched_images=2,
            ),
            decode_engine=generate_pb2.EngineTimings(
                engine_id="d0",
                queued_s=0.125,
                cached_tokens=1,
                preemptions=1,
                status_changes=[
                    generate_pb2.StatusChange(status=generate_pb2.REQUEST_STATUS_WAITING_FOR_REMOTE_KVS, at_s=1.125)
                ],
            ),
        ),
    )


async def test_a_stop_string_across_tokens_ends_the_stream() -> None:
    pair = make_pair()
    async with _client(pair.serving) as client:
        responses = client.generate("hello", stop=["END"])
        first = asyncio.ensure_future(anext(responses))
        producer, consumer = await pair.next_requests()
        pair.prefill.send(producer, 0, "E", end_cause=EndCause.HANDED_OVER)
        assert (await first).text == ""
        pair.decode.send(consumer, 1, "x E")
        pair.decode.send(consumer, 4, "N")
        pair.decode.send(consumer, 5, "DED")

        rest = [response async for response in responses]

    assert "".join(response.text for response in rest) == "Ex "
    assert (rest[-1].stop_string, bytes(rest[-1].token_ids)) == ("END", b"D")
    assert pair.decode.aborted == [consumer.request_id]


async def test_a_cancelled_call_aborts_both_engines() -> None:
    pair = make_pair()
    async with _client(pair.serving) as client:
        async with aclosing(client.generate("hello")) as responses:
            first = asyncio.ensure_future(anext(responses))
            producer, consumer = await pair.next_requests()
            pair.prefill.send(producer, 0, "a")
            await first

        await _both_aborted(pair)
    assert (pair.prefill.aborted, pair.decode.aborted) == ([producer.request_id], [consumer.request_id])
    assert (pair.num_unfinished_requests, pair.serving.num_requests_in_flight) == (0, 0)


async def test_a_client_that_vanishes_aborts_both_engines() -> None:
    pair = make_pair()
    async with _serving_at(pair.serving) as address:
        client = GenerateClient(address)
        await client.__aenter__()
        first = asyncio.ensure_future(anext(client.generate("hello")))
        await pair.next_requests()
        await client.__aexit__(None, None, None)
        await asyncio.gather(first, return_exceptions=True)

        await _both_aborted(pair)
    assert (pair.num_unfinished_requests, pair.serving.num_requests_in_flight) == (0, 0)


async def test_a_deadline_aborts_both_engines() -> None:
    pair = make_pair()
    async with _client(pair.serving) as client:
        await client.get_model()  # the connection is there, so that the request's time is the request's
        for timeout_s in (0.5, 5.0, 50.0):
            with pytest.raises(CallFailed) as raised:
                await anext(client.generate("hello", timeout_s=timeout_s))
            assert raised.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
            if pair.decode.submitted:
                break  # A busy machine may need more than the first time for as much.
        await _both_aborted(pair)

    assert pair.prefill.submitted[0].deadline_s == pytest.approx(1000 + timeout_s, abs=timeout_s)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (generate_pb2.GenerateRequest(), "prompt"),
        (generate_pb2.GenerateRequest(text=""), "text"),
        (generate_pb2.GenerateRequest(text="x" * 64), "text"),
        (generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds()), "token_ids"),
        (generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=[VOCAB_SIZE])), "token_ids"),
        (generate_pb2.GenerateRequest(chat=generate_pb2.ChatMessages()), "chat"),
        (
            generate_pb2.GenerateRequest(
                chat=generate_pb2.ChatMessages(messages=[generate_pb2.ChatMessage(role="user", content="hi")])
            ),
            "chat",
        ),
        (generate_pb2.GenerateRequest(text="x", request_id="\n"), "request_id"),
        (generate_pb2.GenerateRequest(text="x", cache_salt="x" * 257), "cache_salt"),
        (generate_pb2.GenerateRequest(text="x", output_token_ids=[VOCAB_SIZE]), "output_token_ids"),
    ],
)
async def test_a_bad_request_is_an_invalid_argument(message: generate_pb2.GenerateRequest, field: str) -> None:
    pair = make_pair()
    async with _client(pair.serving) as client:
        with pytest.raises(CallFailed) as raised:
            await anext(client.send(message))

    assert raised.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert list(raised.value.violations) == [field]
    assert pair.prefill.submitted == pair.decode.submitted == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("min_p", 2.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 64),
        ("min_tokens", -1),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [VOCAB_SIZE]),
        ("logprobs", 21),
        ("logit_bias", {VOCAB_SIZE: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("allowed_token_ids", [VOCAB_SIZE]),
        ("bad_words", [" "]),
        ("json_schema", '{"type": "object", "not": {}}'),
        ("json_object", False),
        ("regex", ""),
        ("choice", {"choices": ["yes", ""]}),
        ("grammar", "x" * 65_537),
    ],
)
async def test_a_bad_sampling_parameter_is_an_invalid_argument_with_its_name(name: str, value: Any) -> None:
    async with _client(make_pair().serving) as client:
        with pytest.raises(CallFailed) as raised:
            await anext(client.generate("x", **{name: value}))

    assert raised.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert list(raised.value.violations) == [f"sampling_params.{name}"]


async def test_an_unknown_model_is_not_found() -> None:
    async with _client(make_pair().serving) as client:
        with pytest.raises(CallFailed, match="NOT_FOUND: model 'gpt' is not served here"):
            await anext(client.send(generate_pb2.GenerateRequest(text="x", model="gpt")))


async def test_no_engine_is_unavailable() -> None:
    async with _client(make_serving()) as client:
        with pytest.raises(CallFailed, match="UNAVAILABLE: no engine serves"):
            await anext(client.generate("x"))


async def test_a_full_house_is_resource_exhausted_with_a_delay() -> None:
    pair = make_pair(max_requests_in_flight=0)
    async with _client(pair.serving) as client:
        with pytest.raises(CallFailed, match="RESOURCE_EXHAUSTED") as raised:
            await anext(client.generate("x", resume=False))

    assert raised.value.retry_delay_s == 1.5


@pytest.mark.parametrize(("num_tokens", "code"), [(0, "UNAVAILABLE"), (1, "ABORTED")])
async def test_a_lost_decode_engine_can_be_retried_or_resumed(num_tokens: int, code: str) -> None:
    pair = make_pair()
    async with _client(pair.serving) as client:
        responses = client.generate("x", resume=False)
        reading = asyncio.ensure_future(anext(responses))
        producer, _ = await pair.next_requests()
        if num_tokens:
            pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
            await reading
            reading = asyncio.ensure_future(anext(responses))
        pair.decode.lose()

        with pytest.raises(CallFailed, match=f"{code}: .*engine d0 is lost"):
            await reading


async def test_an_engines_error_is_internal_with_the_requests_id() -> None:
    pair = make_pair()
    async with _client(pair.serving) as client:
        reading = asyncio.ensure_future(anext(client.generate("x", request_id="mine")))
        _, consumer = await pair.next_requests()
        pair.decode.send(consumer, 0, "", finish_reason=FinishReason.ERROR, error="NaN in its logits")

        with pytest.raises(CallFailed, match=r"INTERNAL: mine.*: engine d0 gave the request up: NaN in its logits"):
            await reading


async def test_a_bug_of_ours_is_internal_with_the_requests_id_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = make_pair()
    pair.prefill.submit = None  # type: ignore[method-assign, assignment]  # a bug
    async with _client(pair.serving) as client:
        with pytest.raises(CallFailed, match="INTERNAL: mine: internal error; the server's log has it by this id"):
            await anext(client.generate("x", request_id="mine"))

    assert [record.__dict__["request_id"] for record in caplog.records] == ["mine"]
    assert pair.num_unfinished_requests == 0


def _health_methods(
    channel: grpc.aio.Channel,
) -> tuple[
    grpc.aio.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    grpc.aio.UnaryStreamMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
]:
    """Check and Watch; the generated stub has no types."""
    write, read = health_pb2.HealthCheckRequest.SerializeToString, health_pb2.HealthCheckResponse.FromString
    return (
        channel.unary_unary("/grpc.health.v1.Health/Check", request_serializer=write, response_deserializer=read),
        channel.unary_stream("/grpc.health.v1.Health/Watch", request_serializer=write, response_deserializer=read),
    )


async def test_health_is_serving_for_every_service_until_the_server_drains() -> None:
    server = make_ingress_server(make_pair().serving)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check, watch = _health_methods(channel)
        for service in ("", "raypd.v1.GenerateService", "raypd.v1.ModelService"):
            answer = await check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watching = watch(health_pb2.HealthCheckRequest(service="raypd.v1.GenerateService"))
        statuses = [(await anext(aiter(watching))).status]

        await asyncio.wait_for(server.drain(grace_s=600), timeout=60)
        statuses += [answer.status async for answer in watching]

    assert statuses[0] == health_pb2.HealthCheckResponse.SERVING
    assert set(statuses[1:]) == {health_pb2.HealthCheckResponse.NOT_SERVING}


async def test_reflection_names_every_service() -> None:
    async with _serving_at(make_pair().serving) as address, grpc.aio.insecure_channel(address) as channel:
        reflect = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="raypd.v1.GenerateRequest"),
        ]
        services, file = [answer async for answer in reflect(iter(requests))]

    assert {service.name for service in services.list_services_response.service} == {
        "raypd.v1.AdminService",
        "raypd.v1.EmbedService",
        "raypd.v1.GenerateService",
        "raypd.v1.ModelService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert b"raypd/v1/generate.proto" in file.file_descriptor_response.file_descriptor_proto[0]


async def test_draining_lets_running_requests_end_and_refuses_new_ones() -> None:
    pair = make_pair()
    server = make_ingress_server(pair.serving)
    port = await server.start()
    async with GenerateClient(f"127.0.0.1:{port}") as client:
        responses = client.generate("hello")
        first = asyncio.ensure_future(anext(responses))
        producer, consumer = await pair.next_requests()
        pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
        await first
        draining = asyncio.create_task(server.drain(grace_s=600))
        await asyncio.sleep(0)  # It begins.
        for _ in range(20):
            with pytest.raises(CallFailed, match="UNAVAILABLE: this ingress is draining"):
                await anext(client.generate("too late"))

        pair.decode.send(consumer, 1, "b", finish_reason=FinishReason.LENGTH)

        assert [response.text async for response in responses] == ["b"]
        await asyncio.wait_for(draining, timeout=60)


async def test_requests_that_outlast_the_grace_are_aborted() -> None:
    pair = make_pair()
    server = make_ingress_server(pair.serving)
    port = await server.start()
    async with GenerateClient(f"127.0.0.1:{port}") as client:
        first = asyncio.ensure_future(anext(client.generate("hello", resume=False)))
        await pair.next_requests()

        await server.drain(grace_s=0)

        await _both_aborted(pair)
        with pytest.raises(CallFailed):
            await first


async def test_a_port_that_is_taken_is_an_error() -> None:
    async with _serving_at(make_pair().serving) as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(AddressUnavailable, match=f"cannot listen at 127.0.0.1:{port}"):
            await make_ingress_server(make_pair().serving, port=port).start()


async def test_the_served_model_is_described() -> None:
    async with _client(make_pair().serving) as client:
        model = await client.get_model(timeout_s=10)

    assert (model.model, model.max_model_len, model.vocab_size, model.has_chat_template) == ("tiny", 64, 257, False)


async def test_calls_that_come_all_at_once_are_all_answered() -> None:
    async with _serving_at(make_pair().serving) as address, grpc.aio.insecure_channel(address) as channel:
        get_model = model_pb2_grpc.ModelServiceStub(channel).GetModel
        calls = [get_model(model_pb2.GetModelRequest()) for _ in range(1500)]
        models = await asyncio.gather(*calls)
    assert len(models) == 1500
