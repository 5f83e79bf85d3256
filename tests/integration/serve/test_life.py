"""The life of a cluster: engines come, go and change, processes die, a model is replaced.

Each test begins with what the one before it has left.

Tests of cluster/pool/controller/controller.py, cluster/pool/controller/first_start.py,
cluster/pool/controller/operations.py, cluster/pool/ray_objects/leftovers.py, actors/engine_actor.py,
actors/process/sigterm_event.py.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.client import CallFailed, GenerateClient
from tests.checkpoints import make_checkpoint
from tests.integration.cluster_load import ask_and_check, engines_become, load
from tests.integration.serve.cluster import DECODE_CPUS
from tests.integration.served import ServeProcess, actor_process, process_listening_at
from tests.patience import CLUSTER_S, TEST_S
from tests.reference import greedy_tokens, random_prompt

NUM_STREAMS = 8
"""More tokens than an ingress can have passed on by the time that it is killed, on however slow a machine."""

pytestmark = [pytest.mark.ray, pytest.mark.timeout(TEST_S)]


async def scaled(client: GenerateClient, num_decode: int) -> dict[str, int]:
    """Have so many decode engines beside the prefill engine; returns each engine's incarnation."""
    await client.scale(decode=num_decode)
    async with asyncio.timeout(CLUSTER_S):
        while True:
            engines = (await client.status()).engines
            if len(engines) == 1 + num_decode and all(engine.state == "ready" for engine in engines):
                return {engine.engine_id: engine.incarnation for engine in engines}
            await asyncio.sleep(0.2)


def serving(incarnations: dict[str, int]) -> set[tuple[str, int, str]]:
    """Return the arguments of engines_become() for these incarnations."""
    return {(engine_id, incarnation, engine_id.partition("-")[0]) for engine_id, incarnation in incarnations.items()}


async def status_says(client: GenerateClient, decision: str) -> None:
    """Wait until the controller has decided so."""
    async with asyncio.timeout(CLUSTER_S):
        while True:
            if any(decision in one.text for one in (await client.status()).decisions):
                return
            await asyncio.sleep(0.2)


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


async def ingresses_become(client: GenerateClient, expected: dict[str, int]) -> None:
    """Wait until exactly these are open: incarnations, by address."""
    async with asyncio.timeout(CLUSTER_S):
        while True:
            ingresses = (await client.status()).ingresses
            if {one.address: one.incarnation for one in ingresses if one.state == "ready"} == expected:
                return
            await asyncio.sleep(0.2)


def ingress_incarnations(status: admin_pb2.GetStatusResponse) -> dict[str, int]:
    """Each ingress's incarnation, by its address."""
    return {ingress.address: ingress.incarnation for ingress in status.ingresses}


def port_of(address: str) -> int:
    """Return the port of host:port."""
    return int(address.rpartition(":")[2])


async def test_requests_and_engines_go_on_without_the_controller_and_changes_with_its_next_incarnation(
    served: str, checkpoint: Callable[[str], Path]
) -> None:
    async with GenerateClient(served) as client, load(client, checkpoint("llama")):
        incarnations = await scaled(client, 1)
        before = await client.status()
        actor_process("Controller").kill()
        await status_says(client, f"go on with decode-0, incarnation {incarnations['decode-0']}: it was ready")
        assert await client.scale(decode=2) == ["decode-0", "decode-1", "prefill-0"]
        after = await engines_become(client, serving(incarnations | {"decode-1": 1}))
    addresses = {engine.engine_id: engine.address for engine in after.engines}
    assert all(addresses[engine.engine_id] == engine.address for engine in before.engines)
    assert any("scale to 2 decode" in decision.text for decision in after.decisions)


async def test_what_cannot_be_placed_is_shown_with_what_is_missing(
    served: str, checkpoint: Callable[[str], Path]
) -> None:
    async with GenerateClient(served) as client, load(client, checkpoint("llama")):
        incarnations = await scaled(client, 2)
        await client.scale(decode=3)
        async with asyncio.timeout(CLUSTER_S):
            while True:
                pending = [engine for engine in (await client.status()).engines if engine.state == "pending"]
                if len(pending) == 1 and "it needs" in pending[0].last_error:
                    break
                await asyncio.sleep(0.2)
        assert f"it needs {{'CPU': {DECODE_CPUS}}} on one node; the cluster has" in pending[0].last_error
        assert await scaled(client, 2) == incarnations


@pytest.mark.more
async def test_a_rolling_restart_under_load_loses_nothing(served: str, checkpoint: Callable[[str], Path]) -> None:
    async with GenerateClient(served) as client, load(client, checkpoint("llama")):
        incarnations = await scaled(client, 2)
        for engine_id in ("decode-0", "prefill-0"):
            await client.drain(engine_id)
            incarnations[engine_id] += 1
            await engines_become(client, serving(incarnations))
        await client.drain("decode-1", for_good=True)
        del incarnations["decode-1"]
        await engines_become(client, serving(incarnations))


async def test_an_engine_changes_its_role_under_load(served: str, checkpoint: Callable[[str], Path]) -> None:
    async with GenerateClient(served) as client, load(client, checkpoint("llama")):
        incarnations = await scaled(client, 1)
        await client.set_role("prefill-0", "both")
        await engines_become(
            client, {("prefill-0", incarnations["prefill-0"], "both"), ("decode-0", incarnations["decode-0"], "decode")}
        )
        await client.set_role("prefill-0", "prefill")
        await engines_become(client, serving(incarnations))


async def test_an_engine_that_is_not_there_cannot_be_drained(served: str) -> None:
    async with GenerateClient(served) as client:
        await scaled(client, 1)
        with pytest.raises(CallFailed, match="no engine 'decode-9' serves; these do: decode-0, prefill-0"):
            await client.drain("decode-9")


@pytest.mark.more
async def test_an_engine_whose_process_is_asked_to_end_is_replaced_and_every_ingress_knows(
    served: str, checkpoint: Callable[[str], Path]
) -> None:
    async with GenerateClient(served) as client:
        incarnations = await scaled(client, 1)
        before = await client.status()
    addresses = [ingress.address for ingress in before.ingresses]
    assert served in addresses
    assert len(set(addresses)) == 2
    [engine_address] = [engine.address for engine in before.engines if engine.engine_id == "decode-0"]
    async with (
        GenerateClient(addresses[0]) as first,
        GenerateClient(addresses[1]) as second,
        load(first, checkpoint("llama")),
        load(second, checkpoint("llama")),
    ):
        process_listening_at(port_of(engine_address)).send_signal(signal.SIGTERM)
        expected = serving(incarnations | {"decode-0": incarnations["decode-0"] + 1})
        # Who is there may have changed between the two: what counts is that both come to know the same.
        async with asyncio.timeout(CLUSTER_S):
            while len({(await engines_become(one, expected)).membership_version for one in (first, second)}) > 1:
                pass
        await status_says(
            first, f"drain decode-0, incarnation {incarnations['decode-0']}: its process was asked to end"
        )


async def test_an_ingress_comes_back_where_it_was_and_engines_forget_its_requests(
    served: str, checkpoint: Callable[[str], Path]
) -> None:
    async with GenerateClient(served) as client:
        incarnations = ingress_incarnations(await client.status())
        # Found before there are streams, which would be over by the time that every process has been looked at.
        ingress = process_listening_at(port_of(served))
        streams = [
            client.generate([5, 6, number], max_tokens=480, temperature=0.0, ignore_eos=True, resume=False)
            for number in range(NUM_STREAMS)
        ]
        await asyncio.gather(*(anext(stream) for stream in streams))
        ingress.kill()
        with pytest.raises(CallFailed, match="UNAVAILABLE"):
            await asyncio.gather(*(read_all(stream) for stream in streams))
        await ask_until_answered(client, checkpoint("llama"), 1)
        await ingresses_become(client, incarnations | {served: incarnations[served] + 1})
        async with asyncio.timeout(CLUSTER_S):
            while True:
                engines = (await client.status()).engines
                if all(engine.load.free_blocks == engine.load.blocks for engine in engines):
                    break
                await asyncio.sleep(0.2)


async def test_the_controller_and_an_ingress_may_die_at_once(served: str, checkpoint: Callable[[str], Path]) -> None:
    async with GenerateClient(served) as client:
        engines, incarnations = await scaled(client, 1), ingress_incarnations(await client.status())
        ingress, controller = process_listening_at(port_of(served)), actor_process("Controller")
        controller.kill()
        ingress.kill()
        await ask_until_answered(client, checkpoint("llama"), 2)
        await engines_become(client, serving(engines))
        await ingresses_become(client, incarnations | {served: incarnations[served] + 1})


async def answer(client: GenerateClient, prompt: list[int]) -> list[int]:
    """Its first 30 tokens."""
    token_ids: list[int] = []
    async for response in client.generate(prompt, max_tokens=30, temperature=0.0, ignore_eos=True):
        token_ids.extend(response.token_ids)
    return token_ids


@pytest.mark.more
async def test_a_model_is_updated_under_load_and_every_answer_is_one_models(
    served: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    old, new = checkpoint("llama"), make_checkpoint("llama", tmp_path / "new", seed=99)
    prompt = random_prompt(50, seed=5)
    expected = [greedy_tokens(directory, tuple(prompt), 30) for directory in (old, new)]
    assert expected[0] != expected[1]
    answers: list[list[int]] = []
    async with GenerateClient(served) as client:
        version = await client.update(str(new))
        async with asyncio.timeout(CLUSTER_S):
            while True:
                answers.append(await answer(client, prompt))
                engines = (await client.status()).engines
                if len(engines) == 2 and all(e.state == "ready" and e.model_version == version for e in engines):
                    break
                await asyncio.sleep(0.1)
        answers.append(await answer(client, prompt))
    assert all(answer in expected for answer in answers)
    assert answers[0] == expected[0]
    assert answers[-1] == expected[1]


@pytest.mark.more
async def test_where_every_process_is_told_to_end_what_runs_is_served_first(
    serve_process: ServeProcess, served: str
) -> None:
    """The cluster ends as systemd ends a service. The last test: it ends the cluster."""
    num_tokens, token_ids = 150, list[int]()
    async with GenerateClient(served) as client:
        stream = client.generate([5, 6, 7], max_tokens=num_tokens, temperature=0.0, ignore_eos=True, resume=False)
        token_ids.extend((await anext(stream)).token_ids)
        ending = asyncio.create_task(asyncio.to_thread(serve_process.stop_as_service))
        async for response in stream:
            token_ids.extend(response.token_ids)
    assert len(token_ids) == num_tokens
    assert await ending == 0, "\n".join(serve_process.lines)
