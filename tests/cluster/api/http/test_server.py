"""The steps that every call goes through: errors, clients that leave, bounds, credentials, the end.

Tests of cluster/api/http/app.py, cluster/api/http/errors.py, cluster/api/http/handlers.py,
cluster/api/shared/version.py.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import yaml

from actors.checkpoint.generation_defaults import GenerationDefaults
from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import FinishReason
from cluster.access.access_control import AccessControl
from cluster.access.tokens import Tokens, hash_token
from cluster.api.http import server
from cluster.api.http.server import HttpServer
from cluster.api.shared.version import server_version
from cluster.errors import AddressUnavailable
from cluster.settings.http import HttpConfig
from tests.cluster.api.http.http_setup import Setup, http_server, http_setup, view_of
from tests.cluster.serving_setup import assert_nothing_is_left, make_pair, make_serving

HEAD = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
JSON_BODY = {"content-type": "application/json"}


async def _both_aborted(setup: Setup) -> None:
    await asyncio.wait_for(setup.pair.prefill.has_aborted.wait(), timeout=60)
    await asyncio.wait_for(setup.pair.decode.has_aborted.wait(), timeout=60)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_aborts_its_request_on_both_engines(is_stream: bool) -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.completions.create(model="tiny", prompt="hello", extra_body={"stream": is_stream})
        )
        await setup.pair.next_requests()
        asking.cancel()
        await _both_aborted(setup)
        assert_nothing_is_left(setup.pair)


async def test_a_client_that_leaves_a_stream_aborts_its_request_on_both_engines() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(setup.client.completions.create(model="tiny", prompt="hello", stream=True))
        producer, _ = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, "a")
        async with await asking as stream:
            await anext(aiter(stream))
        await _both_aborted(setup)
        assert_nothing_is_left(setup.pair)


async def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    async with http_setup(slow_reader_timeout_s=0.3) as setup:
        body = b'{"prompt": "hello", "stream": true, "max_tokens": 50}'
        request = HEAD % len(body)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.connect(("127.0.0.1", setup.port))
            client.sendall(request + body)
            producer, consumer = await setup.pair.next_requests()
            setup.pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
            position = 1
            async with asyncio.timeout(60):
                while not setup.pair.decode.has_aborted.is_set():
                    setup.pair.decode.send(consumer, position, "b" * 60_000)
                    position += 60_000
                    await asyncio.sleep(0)
        assert_nothing_is_left(setup.pair)


async def test_an_error_after_the_first_token_is_the_streams_last_event() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(setup.client.completions.create(model="tiny", prompt="hello", stream=True))
        producer, consumer = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
        stream = aiter(await asking)
        assert (await anext(stream)).choices[0].text == "a"
        setup.pair.decode.send(consumer, 1, [], finish_reason=FinishReason.ERROR, error="it broke")
        with pytest.raises(openai.APIError, match="it broke"):
            await anext(stream)


async def test_errors_have_openais_types() -> None:
    async with http_setup() as setup:
        with pytest.raises(openai.NotFoundError) as missing:
            await setup.client.completions.create(model="gpt-4", prompt="hello")
        assert missing.value.code == "model_not_found"
        asking = asyncio.create_task(setup.client.completions.create(model="tiny", prompt="hello"))
        producer, consumer = await setup.pair.next_requests()
        for engine, request in ((setup.pair.prefill, producer), (setup.pair.decode, consumer)):
            engine.send(request, 0, [], finish_reason=FinishReason.ERROR, error="it broke")
        with pytest.raises(openai.InternalServerError, match="it broke"):
            await asking


async def test_too_many_requests_are_told_when_to_come_back() -> None:
    pair = make_pair()
    serving = make_serving(pair.prefill, pair.decode, max_requests_in_flight=0)
    async with http_server(serving) as (_, port):
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0, timeout=60)
        async with client:
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(model="tiny", prompt="hello")
    assert (caught.value.response.headers["retry-after"], caught.value.response.headers["retry-after-ms"]) == (
        "2",
        "1500",
    )


async def test_without_an_engine_it_lives_and_is_not_ready() -> None:
    async with http_server(make_serving()) as (_, port):
        url = f"http://127.0.0.1:{port}"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=60) as client:
            assert await client.get("/health", cast_to=object) == {"status": "ok"}
            with pytest.raises(openai.InternalServerError) as caught:
                await client.get("/ready", cast_to=object)
    assert caught.value.status_code == 503


async def test_it_is_ready_with_engines() -> None:
    async with http_setup() as setup:
        assert (await setup.http.get("/ready")).json() == {"status": "ready"}


async def test_the_model_is_listed() -> None:
    async with http_setup() as setup:
        [model] = (await setup.client.models.list()).data
        assert (model.id, model.owned_by, model.model_extra) == ("tiny", "raypd", {"max_model_len": 64})
        assert await setup.client.models.retrieve("tiny") == model
        with pytest.raises(openai.NotFoundError):
            await setup.client.models.retrieve("gpt-4")


async def test_text_becomes_tokens_and_tokens_text() -> None:
    async with http_setup() as setup:
        tokenized = await setup.http.post("/tokenize", json={"prompt": "héi", "return_token_strs": True})
        assert tokenized.json() == {
            "tokens": list("héi".encode()),
            "count": 4,
            "max_model_len": 64,
            "token_strs": ["h", "Ã", "©", "i"],
        }
        chat = {"messages": [{"role": "user", "content": "x" * 100}]}
        assert (await setup.http.post("/tokenize", json=chat)).json()["count"] == len("<user>") + 100
        assert (await setup.http.post("/detokenize", json={"tokens": list(b"hi")})).json() == {"prompt": "hi"}
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "add_special_tokens": 1}),
            ("/tokenize", {"prompt": "a", "messages": []}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": [2**70]}),
        ):
            assert (await setup.http.post(path, json=body)).status_code == 400, (path, body)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"prompt": "\xff"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "a", "top_p": Infinity}', 400),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        (b'{"prompt": "' + b"a" * 300_000 + b'"}', 413),
    ],
)
async def test_what_is_no_request_is_refused_in_openais_shape(body: bytes, status: int) -> None:
    async with http_setup(HttpConfig(max_body_bytes=300_000)) as setup:
        answer = await setup.http.post("/v1/completions", content=body, headers=JSON_BODY)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
        assert_nothing_is_left(setup.pair)


async def test_other_paths_and_methods_are_refused_in_openais_shape() -> None:
    async with http_setup() as setup:
        for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
            answer = await setup.http.request(method, path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")


async def test_a_body_or_headers_that_do_not_come_are_not_waited_for() -> None:
    async with http_setup(HttpConfig(receive_timeout_s=0.2)) as setup:
        for sent, expected in (
            (HEAD % 9, b"408"),
            (b"POST /", b""),
        ):
            async with asyncio.timeout(60):
                # On a busy machine the headers may be late as well, and have no answer.
                while expected not in (answer := await _first_line(setup.port, sent)):
                    assert answer == b""
                assert expected or not answer


async def _first_line(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        return await reader.readline()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_a_client_that_resets_its_connection_leaves_nothing() -> None:
    async with http_setup() as setup:
        body = b'{"prompt": "hello"}'
        client = socket.create_connection(("127.0.0.1", setup.port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(HEAD % len(body) + body)
        await setup.pair.next_requests()
        client.close()
        await _both_aborted(setup)
        assert_nothing_is_left(setup.pair)


async def test_the_callers_token_is_asked_for_and_its_limits_hold(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    entry = {"name": "ann", "sha256": hash_token("secret"), "tenant": "acme", "concurrent": 1}
    file.write_text(yaml.safe_dump({"tokens": [entry]}))
    async with http_setup(access=AccessControl(Tokens(file))) as setup:
        answer = await setup.http.post("/v1/completions", json={"prompt": "hello"})
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert (await setup.http.get("/v1/models")).status_code == 401
        assert (await setup.http.get("/health")).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            await setup.client.with_options(api_key="wrong").models.list()

        asking = asyncio.create_task(setup.client.completions.create(model="tiny", prompt="hello"))
        producer, consumer = await setup.pair.next_requests()
        assert (consumer.tenant, consumer.cache_salt) == ("acme", "acme/")
        with pytest.raises(openai.RateLimitError) as caught:
            await setup.client.completions.create(model="tiny", prompt="hello")
        assert caught.value.code == "rate_limit_exceeded"
        setup.pair.prefill.send(producer, 0, "a", finish_reason=FinishReason.STOP)
        assert (await asking).choices[0].text == "a"
        assert consumer.request_id in setup.pair.decode.aborted


async def test_a_drain_lets_running_answers_end_and_refuses_new_ones() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(setup.client.completions.create(model="tiny", prompt="hello", stream=True))
        producer, consumer = await setup.pair.next_requests()
        setup.pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
        stream = aiter(await asking)
        await anext(stream)
        draining = asyncio.create_task(setup.server.drain(600))
        await asyncio.sleep(0)
        with pytest.raises(openai.InternalServerError) as refused:
            await setup.client.completions.create(model="tiny", prompt="hello")
        assert refused.value.status_code == 503
        setup.pair.decode.send(consumer, 1, "b", finish_reason=FinishReason.LENGTH)
        assert [chunk.choices[0].text async for chunk in stream] == ["b"]
        async with asyncio.timeout(60):
            await draining


async def test_a_drain_that_gets_no_time_cuts_off_what_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_ENDING_S", -server._LAST_WORDS_S)
    async with http_setup() as setup:
        reader, writer = await asyncio.open_connection("127.0.0.1", setup.port)
        await setup.server.drain(0)
        assert await asyncio.wait_for(reader.read(), timeout=60) == b""
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", setup.port)
    assert "did not close in time" in caplog.text


async def test_a_drain_aborts_what_does_not_end_in_time() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(setup.client.completions.create(model="tiny", prompt="hello"))
        await setup.pair.next_requests()
        async with asyncio.timeout(60):
            await setup.server.drain(0)
        await _both_aborted(setup)
        with pytest.raises(openai.APIError):
            await asking
        assert_nothing_is_left(setup.pair)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_what_a_drain_aborts_is_no_error_in_the_log(is_stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(
            setup.client.completions.create(model="tiny", prompt="hello", stream=is_stream, max_tokens=9)
        )
        producer, _ = await setup.pair.next_requests()
        if is_stream:
            setup.pair.prefill.send(producer, 0, "a", end_cause=EndCause.HANDED_OVER)
            await asking
        async with asyncio.timeout(60):
            await setup.server.drain(0)
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(setup.pair.decode.has_aborted.wait(), timeout=60)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    assert not any("ASGI" in record.getMessage() for record in caplog.records)


async def test_metrics_tell_how_requests_ended() -> None:
    async with http_setup() as setup:
        asking = asyncio.create_task(setup.client.completions.create(model="tiny", prompt="hello", max_tokens=9))
        await setup.answer("Hi")
        await asking
        leaving = asyncio.create_task(setup.client.completions.create(model="tiny", prompt="hello"))
        await setup.pair.next_requests()
        leaving.cancel()
        await _both_aborted(setup)
        await setup.http.post("/v1/completions", json={"prompt": ""})
        await setup.http.get("/v1/nothing")
        answer = await setup.http.get("/metrics")
    lines = answer.text.splitlines()
    assert answer.headers["content-type"].startswith("text/plain; version=")
    for line in (
        'raypd_requests_total{model="tiny",outcome="stop"} 1.0',
        'raypd_requests_total{model="tiny",outcome="cancelled"} 1.0',
        'raypd_requests_total{model="tiny",outcome="invalid"} 1.0',
        'raypd_http_responses_total{path="/v1/completions",status="200"} 1.0',
        'raypd_http_responses_total{path="/v1/completions",status="400"} 1.0',
        'raypd_prompt_tokens_total{model="tiny"} 5.0',
        'raypd_output_tokens_total{model="tiny"} 3.0',
        'raypd_time_to_first_token_seconds_count{model="tiny"} 1.0',
        'raypd_inter_token_latency_seconds_count{model="tiny"} 2.0',
        'raypd_request_duration_seconds_count{model="tiny"} 3.0',
        'raypd_request_output_tokens_sum{model="tiny"} 3.0',
        'raypd_attempts_total{outcome="completed",phase="decode"} 1.0',
        'raypd_attempts_total{outcome="cancelled",phase="prefill"} 1.0',
        'raypd_requests_in_flight{phase="prefill"} 0.0',
        "raypd_controller_up 0.0",
    ):
        assert line in lines, answer.text


def test_what_is_accepted_sends_at_once() -> None:
    with server._listen("127.0.0.1", 0, 60.0) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "an answer's body waits for 40 ms"


async def test_a_port_that_is_taken_is_named() -> None:
    async with http_setup() as setup:
        config = HttpConfig(port=setup.port)
        other = HttpServer(
            setup.pair.serving, view_of(setup.pair.serving), config, slow_reader_timeout_s=60.0, host="127.0.0.1"
        )
        with pytest.raises(AddressUnavailable, match=str(setup.port)):
            await other.start()


async def test_pings_and_the_version_are_answered() -> None:
    async with http_setup() as setup:
        for answer in (await setup.http.get("/ping"), await setup.http.post("/ping")):
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert (await setup.http.get("/version")).json() == {"version": server_version()}
        assert (await setup.http.put("/ping")).status_code == 405


async def test_the_models_own_sampling_defaults_are_shown_and_count_for_requests() -> None:
    async with http_setup() as setup:
        processor = setup.pair.serving.newest_model().input_processor
        assert "sampling_defaults" not in (await setup.http.get("/v1/models")).json()["data"][0]
        processor.model = replace(processor.model, defaults=GenerationDefaults(temperature=0.6, top_k=5))
        shown = (await setup.http.get("/v1/models")).json()["data"][0]
        assert shown["sampling_defaults"] == {"temperature": 0.6, "top_k": 5}
        for body, expected in (({}, (0.6, 5)), ({"temperature": 1.0}, (1.0, 5)), ({"temperature": None}, (0.6, 5))):
            asked = {"prompt": "hello", "max_tokens": 4} | body
            asking = asyncio.create_task(setup.http.post("/v1/completions", json=asked))
            params = (await setup.answer("ab")).sampling_params
            assert (params.temperature, params.top_k) == expected
            assert (await asking).status_code == 200
