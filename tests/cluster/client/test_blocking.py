"""The client for programs without an event loop: waits that end, whoever ends them.

Tests of cluster/client/loop_thread.py, cluster/client/whole_answers.py.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cluster.client import BlockingClient, CallFailed, Credentials, GenerateClient, generate_blocking
from cluster.errors import InvalidConfig
from tests.cluster.client.scripted_ingress import ScriptedIngress

_TIMEOUT_S = 60.0


@pytest.fixture
def ingress() -> Iterator[ScriptedIngress]:
    with ScriptedIngress(lambda request: f"{request.text}!").serving() as ingress:
        yield ingress


@pytest.fixture
def client(ingress: ScriptedIngress) -> Iterator[BlockingClient]:
    with BlockingClient(ingress.address) as client:
        yield client


def test_an_answer_is_streamed(client: BlockingClient) -> None:
    assert [response.text for response in client.generate("ab", max_tokens=3)] == ["a", "b", "!"]


def test_a_whole_answer_has_everything_of_its_responses(client: BlockingClient) -> None:
    answer = client.complete("ab", request_id="mine")
    assert (answer.text, answer.token_ids, answer.seed, answer.request_id) == ("ab!", tuple(b"ab!"), 3, "mine")
    assert answer.usage.output_tokens == 3


def test_several_answers_come_in_the_order_of_their_prompts(client: BlockingClient) -> None:
    answers = client.complete_many([f"question {number}" for number in range(20)], max_concurrent=4)
    assert [answer.text for answer in answers] == [f"question {number}!" for number in range(20)]


def test_of_several_answers_the_first_failure_is_raised_and_the_others_are_aborted(
    client: BlockingClient, ingress: ScriptedIngress
) -> None:
    ingress.hold_after = 1
    prompts = ["ab", [("user",)]]
    with pytest.raises(ValueError, match="not enough values"):
        client.complete_many(prompts)  # type: ignore[arg-type]  # a turn without content is the mistake
    with pytest.raises(TypeError, match="several prompts"):
        client.complete_many("ab")


def test_several_threads_share_a_client(client: BlockingClient) -> None:
    def ask(number: int) -> str:
        return "".join(response.text for response in client.generate(f"thread {number}"))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(16))) == [f"thread {number}!" for number in range(16)]


def test_closing_a_stream_aborts_the_request(client: BlockingClient, ingress: ScriptedIngress) -> None:
    ingress.hold_after = 1
    responses = client.generate("ab")
    assert next(responses).text == "a"
    responses.close()
    assert ingress.has_aborted.wait(_TIMEOUT_S)


def test_a_stream_that_is_forgotten_aborts_the_request(client: BlockingClient, ingress: ScriptedIngress) -> None:
    ingress.hold_after = 1
    for response in client.generate("ab"):
        assert response.text == "a"
        break
    gc.collect()
    assert ingress.has_aborted.wait(_TIMEOUT_S)


def test_a_stream_may_be_collected_by_the_clients_own_thread(client: BlockingClient, ingress: ScriptedIngress) -> None:
    ingress.hold_after = 1
    streams = [client.generate("ab")]
    next(streams[0])

    async def forget() -> None:
        streams.pop().close()

    client._thread.run(forget())
    assert ingress.has_aborted.wait(_TIMEOUT_S)


def test_ctrl_c_aborts_the_request_and_the_client_goes_on(client: BlockingClient, ingress: ScriptedIngress) -> None:
    ingress.hold_after = 1
    interrupter = threading.Thread(target=lambda: _interrupt_when(ingress.is_held))
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        list(client.generate("ab"))
    interrupter.join()
    assert ingress.has_aborted.wait(_TIMEOUT_S)
    ingress.hold_after = None
    assert client.complete("again").text == "again!"


def _interrupt_when(event: threading.Event) -> None:
    assert event.wait(_TIMEOUT_S)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_closing_the_client_ends_what_other_threads_wait_for(client: BlockingClient, ingress: ScriptedIngress) -> None:
    ingress.hold_after = 1
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(lambda: list(client.generate("ab")))
        assert ingress.is_held.wait(_TIMEOUT_S)
        client.close()
        failure = reading.exception(_TIMEOUT_S)
    assert isinstance(failure, CallFailed)
    assert failure.code is grpc.StatusCode.CANCELLED
    assert ingress.has_aborted.wait(_TIMEOUT_S)


def test_a_closed_client_says_so(client: BlockingClient) -> None:
    responses = client.generate("ab")
    next(responses)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.status()
    with pytest.raises(CallFailed, match="the client was closed"):
        next(responses)


def test_a_client_that_is_forgotten_ends_its_thread(ingress: ScriptedIngress) -> None:
    client = BlockingClient(ingress.address)
    thread = client._thread._thread
    assert client.complete("ab").text == "ab!"
    del client
    gc.collect()
    thread.join(_TIMEOUT_S)
    assert not thread.is_alive()


def test_a_client_that_cannot_open_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        BlockingClient("127.0.0.1:1", credentials=Credentials(ca=tmp_path / "none.pem"))
    gc.collect()
    assert "raypd-client" not in {thread.name for thread in threading.enumerate()}


def test_a_client_cannot_wait_for_itself(client: BlockingClient) -> None:
    async def ask() -> None:
        client.status()

    with pytest.raises(RuntimeError, match="it runs on the client's own event loop"):
        client._thread.run(ask())


def test_it_may_be_used_where_an_event_loop_runs(client: BlockingClient) -> None:
    async def ask() -> str:
        return client.complete("ab").text

    assert asyncio.run(ask()) == "ab!"


def test_a_program_that_asks_once_needs_no_client(ingress: ScriptedIngress) -> None:
    assert [response.text for response in generate_blocking(ingress.address, "ab")] == ["a", "b", "!"]


def test_both_clients_have_the_same_methods_with_the_same_parameters() -> None:
    def methods(kind: type) -> dict[str, list[tuple[str, object]]]:
        public = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: [(parameter.name, parameter.default) for parameter in inspect.signature(method).parameters.values()]
            for name, method in public
            if name == "__init__" or not name.startswith("_")
        }

    expected = methods(GenerateClient)
    del expected["open"]
    assert methods(BlockingClient) == expected
