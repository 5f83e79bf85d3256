"""The controller, the ingress, an engine's node: what dies, and what goes on without it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cluster.client import CallFailed, GenerateClient
from cluster.ingress.protos.raypd.v1 import admin_pb2
from tests.checkpoints import make_checkpoint
from tests.integration.cluster_load import ask_and_check, engines_become, load
from tests.integration.served import ServeProcess
from tests.patience import CLUSTER_S, TEST_S
from tests.reference import greedy_tokens, random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.timeout(TEST_S)]


@pytest.fixture(scope="module")
def served(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServeProcess, str]]:
    config: dict[str, object] = {
        "model": {"model": str(checkpoint("llama")), "dtype": "float32"},
        "cache": {"num_blocks": 256},
        "scheduler": {"max_num_batched_tokens": 48, "max_num_seqs": 32},
        "parallel": {"num_threads": 1},
        "prefill": {"count": 1, "num_cpus": 0.2},
        "decode": {"count": 1, "num_cpus": 0.2},
        "drain_timeout_s": 30,
    }
    process = ServeProcess(config, tmp_path_factory.mktemp("survival"))
    try:
        yield process, process.wait_until_ready()
        assert process.stop() == 0, "\n".join(process.lines)
    finally:
        process.kill_if_alive()


def actor_process(title: str) -> psutil.Process:
    """The process of an actor that this test's cluster has started."""
    [process] = [p for p in psutil.Process().children(recursive=True) if p.cmdline()[:1] == [f"ray::{title}"]]
    return process


async def status_says(client: GenerateClient, decision: str) -> None:
    """Wait until the controller has decided so, or say what it has decided instead."""
    async with asyncio.timeout(CLUSTER_S):
        while True:
            status = await client.status()
            if any(decision in one.text for one in status.decisions):
                return
            await asyncio.sleep(0.2)


async def test_requests_and_engines_go_on_without_the_controller_and_changes_with_its_next_life(
    served: tuple[ServeProcess, str], checkpoint: Callable[[str], Path]
) -> None:
    async with GenerateClient(served[1]) as client, load(client, checkpoint("llama")):
        before = await client.status()
        actor_process("Controller").kill()
        await status_says(client, f"go on with decode-0, incarnation {lives(before)['decode-0']}: it was ready")
        assert await client.scale(decode=2) == ["decode-0", "decode-1", "prefill-0"]
        pair = as_set(before)
        after = await engines_become(client, pair | {("decode-1", 1, "decode")})
        addresses = {engine.engine_id: engine.address for engine in after.engines}
        assert all(addresses[engine.engine_id] == engine.address for engine in before.engines)
        await client.scale(decode=1)
        await engines_become(client, pair)


async def test_an_engine_whose_process_is_asked_to_end_is_drained_and_replaced(
    served: tuple[ServeProcess, str], checkpoint: Callable[[str], Path]
) -> None:
    async with GenerateClient(served[1]) as client, load(client, checkpoint("llama")):
        before = await client.status()
        [port] = [int(e.address.rpartition(":")[2]) for e in before.engines if e.engine_id == "decode-0"]
        life = lives(before)["decode-0"]
        listening_at(port).send_signal(signal.SIGTERM)
        await engines_become(
            client, {("prefill-0", lives(before)["prefill-0"], "prefill"), ("decode-0", life + 1, "decode")}
        )
        await status_says(client, f"drain decode-0, incarnation {life}: its process was asked to end")


async def read_all(stream: AsyncIterator[object]) -> None:
    """To its end."""
    async for _ in stream:
        pass


async def ask_until_answered(client: GenerateClient, directory: Path, worker: int) -> None:
    """Ask again while there is no ingress."""
    async with asyncio.timeout(CLUSTER_S):
        while True:
            try:
                return await ask_and_check(client, directory, worker)
            except CallFailed:
                await asyncio.sleep(0.2)


def lives(status: admin_pb2.GetStatusResponse) -> dict[str, int]:
    """Each engine's incarnation."""
    return {engine.engine_id: engine.incarnation for engine in status.engines}


def as_set(status: admin_pb2.GetStatusResponse) -> set[tuple[str, int, str]]:
    """As engines_become() wants it."""
    return {(engine.engine_id, engine.incarnation, engine.role) for engine in status.engines}


def listening_at(port: int) -> psutil.Process:
    """The process that listens there."""
    for process in psutil.Process().children(recursive=True):
        if any(connection.laddr.port == port for connection in process.net_connections() if not connection.raddr):
            return process
    raise AssertionError(f"nobody listens at {port}")


async def test_an_ingress_comes_back_where_it_was_and_engines_forget_its_requests(
    served: tuple[ServeProcess, str], checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint("llama")
    async with GenerateClient(served[1]) as client:
        [life] = [ingress.incarnation for ingress in (await client.status()).ingresses]
        stream = client.generate([5, 6, 7], max_tokens=150, temperature=0.0, ignore_eos=True, resume=False)
        await anext(stream)
        actor_process("IngressActor").kill()
        with pytest.raises(CallFailed, match="UNAVAILABLE"):
            await read_all(stream)
        await ask_until_answered(client, directory, 1)
        await status_says(client, f"open ingress 0, incarnation {life + 1}")
        async with asyncio.timeout(CLUSTER_S):
            while True:
                status = await client.status()
                if all(engine.load.free_blocks == engine.load.blocks for engine in status.engines):
                    break
                await asyncio.sleep(0.2)
    assert [ingress.incarnation for ingress in status.ingresses] == [life + 1]


async def test_the_controller_and_the_ingress_may_die_at_once(
    served: tuple[ServeProcess, str], checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint("llama")
    async with GenerateClient(served[1]) as client:
        before = await client.status()
        ingress, controller = actor_process("IngressActor"), actor_process("Controller")
        controller.kill()
        ingress.kill()
        await ask_until_answered(client, directory, 2)
        status = await engines_become(client, as_set(before))
    assert [one.incarnation for one in status.ingresses] == [one.incarnation + 1 for one in before.ingresses]


async def answer(client: GenerateClient, prompt: list[int]) -> list[int]:
    """Its first 30 tokens."""
    token_ids: list[int] = []
    async for response in client.generate(prompt, max_tokens=30, temperature=0.0, ignore_eos=True):
        token_ids.extend(response.token_ids)
    return token_ids


async def test_a_model_is_updated_under_load_and_every_answer_is_one_models(
    served: tuple[ServeProcess, str], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    old, new = checkpoint("llama"), make_checkpoint("llama", tmp_path / "new", seed=99)
    prompt = random_prompt(50, seed=5)
    expected = [greedy_tokens(directory, tuple(prompt), 30) for directory in (old, new)]
    assert expected[0] != expected[1]
    answers: list[list[int]] = []
    async with GenerateClient(served[1]) as client:
        version = await client.update(str(new))
        async with asyncio.timeout(CLUSTER_S):
            while True:
                answers.append(await answer(client, prompt))
                engines = (await client.status()).engines
                if len(engines) == 2 and all(e.state == "ready" and e.model_version == version for e in engines):
                    break
        answers.append(await answer(client, prompt))
    assert all(answer in expected for answer in answers)
    assert answers[0] == expected[0]
    assert answers[-1] == expected[1]
