"""Peers that do not fit, or are not who they were, are refused with both values; requests end as the policy says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import EngineFailed
from cluster.routing.engine_connection import EngineRole
from kv_transfer.handoff.control_messages import PROTOCOL_VERSION
from kv_transfer.params import TransferRole
from tests.checkpoints import make_checkpoint
from tests.faults.engine_child import EngineSpec
from tests.faults.engine_process import EngineProcess
from tests.faults.fault_points import Action, Fault, Point
from tests.faults.live_engines import IMPATIENT, TRANSFER, LiveEngines, small_engine


@dataclass(frozen=True, slots=True)
class Misfit:
    """A consumer that differs in something. pattern: of the refusal's message"""

    name: str
    pattern: str
    settings: dict[str, Any] = field(default_factory=dict)
    has_other_model: bool = False
    dtype: str = "float32"
    protocol_version: int | None = None


MISFITS = [
    Misfit("model", r"model: '\w+' at the consumer, '\w+' at the producer", has_other_model=True),
    Misfit("dtype", "dtype: 'bfloat16' at the consumer, 'float32' at the producer", dtype="bfloat16"),
    Misfit(
        "block size",
        "block_size, not a multiple: 12 at the consumer, 8 at the producer",
        settings={"block_size": 12, "num_blocks": 64},
    ),
    Misfit(
        "protocol version",
        f"protocol version: 99 at the consumer, {PROTOCOL_VERSION} at the producer",
        protocol_version=99,
    ),
]
_Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoints") / "other", seed=1)


async def start_misfit(engines: LiveEngines, misfit: Misfit, other_model: Path, policy: str) -> EngineProcess:
    transfer = TRANSFER.model_copy(update={"load_failure_policy": policy})
    directory = other_model if misfit.has_other_model else engines.directory
    config = small_engine(directory, **(misfit.settings | {"transfer": transfer}))
    model = config.model.model_copy(update={"dtype": misfit.dtype})
    config = config.model_copy(update={"model": model})
    spec = EngineSpec(f"misfit-{policy}", 0, config, protocol_version=misfit.protocol_version)
    return await engines.start_as(spec, EngineRole.DECODE)


@pytest.mark.parametrize("misfit", MISFITS, ids=lambda misfit: misfit.name)
async def test_with_policy_fail_the_client_is_told_both_values(
    tcp_engines: LiveEngines, misfit: Misfit, other_model: Path
) -> None:
    prefill, decode = await tcp_engines.start_pair()
    stranger = await start_misfit(tcp_engines, misfit, other_model, "fail")
    with pytest.raises(EngineFailed, match=f"refused: .*{misfit.pattern}"):
        await tcp_engines.check_pair(tcp_engines.ask(), prefill, stranger)
    await tcp_engines.check_whole(prefill, stranger)
    await tcp_engines.check_handed_over(prefill, decode)


@pytest.mark.parametrize("misfit", MISFITS, ids=lambda misfit: misfit.name)
async def test_with_policy_recompute_the_refused_consumer_does_it_all_itself(
    tcp_engines: LiveEngines, misfit: Misfit, other_model: Path
) -> None:
    prefill = await tcp_engines.start("prefill-0", EngineRole.PREFILL, transfer=IMPATIENT)
    stranger = await start_misfit(tcp_engines, misfit, other_model, "recompute")
    question = tcp_engines.ask()
    if misfit.dtype == "float32":
        directory = other_model if misfit.has_other_model else tcp_engines.directory
        await tcp_engines.check_pair(question.of_model(directory), prefill, stranger)
    else:
        _, consumer = tcp_engines.submit_pair(question, prefill, stranger)
        outputs = [output async for output in consumer]
        assert sum(len(output.new_token_ids) for output in outputs) == len(question.expected)
    await tcp_engines.check_whole(prefill, stranger)
    assert stranger.count("num_prompt_tokens_computed") == len(question.request.prompt_token_ids)
    assert (prefill.count("num_prompt_tokens_computed"), prefill.count("num_sent_bytes")) == (0, 0)


async def test_a_consumer_that_means_an_earlier_incarnation_of_its_producer_is_refused(engines: LiveEngines) -> None:
    prefill, decode = await engines.start_pair(is_fresh=True)
    await engines.check_handed_over(prefill, decode)
    prefill.arm(Fault(Action.KILL, Point.BEFORE_CHUNK, 2))
    await engines.check_pair(engines.ask(), prefill, decode)
    successor = await engines.restart(prefill, same_port=True)
    assert (successor.address, successor.spec.engine_id) == (prefill.address, prefill.spec.engine_id)
    # A ticket from before the restart: its producer can't be found any more, though somebody answers there.
    question = engines.ask()
    stream = engines.submit(question, TransferRole.CONSUMER, decode, prefill.descriptor.kv_address)
    await engines.check_stream(question, stream)
    assert decode.count("num_links_lost") == 2
    await engines.check_whole(successor, decode)
    await engines.check_handed_over(successor, decode)


async def test_a_ready_of_an_earlier_incarnation_of_the_consumer_is_dropped(engines: LiveEngines) -> None:
    prefill, decode = await engines.start_pair(transfer=IMPATIENT)
    question = engines.ask()
    # It waits for no longer than the deadlines: whoever looks has to look before.
    has_come = asyncio.create_task(decode.wait_for(num_waiting_for_remote_kvs=1))
    await asyncio.sleep(0)
    consumer = engines.submit(question, TransferRole.CONSUMER, decode, prefill.descriptor.kv_address)
    await has_come
    later = replace(decode.descriptor.kv_address, incarnation=decode.spec.incarnation + 1)
    producer = engines.submit(question, TransferRole.PRODUCER, prefill, later)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engines.check_stream(question, consumer))
        tasks.create_task(engines.check_stream(question, producer))
    await engines.check_whole(prefill, decode)
    # What the later incarnation would have got, the earlier one did not.
    assert (prefill.count("num_sent_bytes"), decode.count("num_received_bytes")) == (0, 0)
    await engines.check_handed_over(prefill, decode)
