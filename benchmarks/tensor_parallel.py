"""Measure what splitting a model over ranks costs, and what it gains.

Times a forward of the whole model in one process, of our shards on two ranks, and of transformers' own tensor
parallelism (weights as DTensors) on two ranks, which needs the package accelerate; then the way of a step's decision
from rank 0 to a further rank and back. Every rank is a process with one thread; DTensors travel over gloo.

    python -m benchmarks.tensor_parallel
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroupGloo
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from actors.config import ModelConfig
from actors.core.outputs.scheduler_output import SchedulerOutput, StepBatch
from actors.model.loader import load_model
from actors.model.tensor_parallel.group import Rendezvous, join_group
from actors.model.tensor_parallel.rank_calls import RankTrust
from actors.ranks.rank_hub import RankHub
from actors.ranks.rank_messages import CODEC, RankConnection, RankStep, RankStop
from cluster.config import DEMO_MODEL
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member, Trust, TrustMaterial

_Addresses = Any  # a queue of multiprocessing's, which is generic in its stubs only

_HOST = "127.0.0.1"
_HUB = Party("engine", 1)
_TIMEOUT_S = 120.0
_MATERIAL = TrustMaterial(1, (bytes(range(32)),), block_hash_key=bytes(32))
"""The same in every process, which are started anew. It protects nothing: there is nothing here to protect."""
_BATCHES = {"decode, 1 token": 1, "decode, 16 tokens": 16, "prefill, 256 tokens": 256}


def run(
    model: Annotated[Path, typer.Option()] = DEMO_MODEL,
    repeats: Annotated[int, typer.Option()] = 40,
) -> None:
    """Print both tables."""
    ways: dict[str, tuple[Callable[..., None], int]] = {
        "whole, 1 rank": (_time_ours, 1),
        "ours, 2 ranks": (_time_ours, 2),
    }
    if find_spec("accelerate") is not None:
        ways["DTensor, 2 ranks"] = (_time_dtensor, 2)
    table = Table("forward", *_BATCHES, title=f"{model.name}, float32, median of {repeats} in ms")
    for name, (work, size) in ways.items():
        times = _on_ranks(work, size, model, repeats)
        table.add_row(name, *(f"{1e3 * times[batch]:.2f}" for batch in _BATCHES))
    console = Console()
    console.print(table)
    console.print(_time_steps(repeats * 10))


def time_forwards_on_two_ranks(material: TrustMaterial, repeats: int = 40) -> dict[str, float]:
    """Seconds of the demo model's forward on two ranks, the median, by batch. material: the ranks', with TLS or not."""
    return _on_ranks(partial(_time_ours, material=material), 2, DEMO_MODEL, repeats)


def _on_ranks(work: Callable[..., None], size: int, model: Path, repeats: int) -> dict[str, float]:
    """Run the work on all ranks; returns what rank 0 measures."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    addresses = context.SimpleQueue()
    ranks = [
        context.Process(target=work, args=(rank, size, addresses, str(model), repeats, sender)) for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    if not receiver.poll(_TIMEOUT_S):
        raise TimeoutError(f"{work} on {size} ranks gave no result")
    times: dict[str, float] = receiver.recv()
    for rank in ranks:
        rank.join()
    return times


def _time_ours(
    rank: int,
    size: int,
    addresses: _Addresses,
    model: str,
    repeats: int,
    sender: Connection,
    material: TrustMaterial = _MATERIAL,
) -> None:
    torch.set_num_threads(1)
    secrets = Trust(material)
    config = ModelConfig(model=model, dtype="float32", device="cpu")
    group, cpu = None, torch.device("cpu")
    if size > 1:
        rendezvous = addresses.get() if rank else Rendezvous(_HOST, cpu, _TIMEOUT_S)
        if isinstance(rendezvous, Rendezvous):
            addresses.put(rendezvous.address)
        group = join_group(
            rendezvous,
            rank,
            size,
            device=cpu,
            host=_HOST,
            timeout_s=_TIMEOUT_S,
            trust=RankTrust(secrets, _HUB, secrets.tls),
        )
    _time_forwards(load_model(config, group).forward.model, rank, repeats, sender)


def _time_dtensor(rank: int, size: int, addresses: _Addresses, model: str, repeats: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    if rank == 0:
        addresses.put((_HOST, _free_port()))
    host, port = address = addresses.get()
    addresses.put(address)
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"LOCAL_RANK": str(rank)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    whole = AutoConfig.from_pretrained(model)
    shard = AutoModelForCausalLM.from_pretrained(
        model, config=whole, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=size)
    )
    _time_forwards(shard, rank, repeats, sender)
    torch.distributed.destroy_process_group()


@torch.inference_mode()
def _time_forwards(model: Any, rank: int, repeats: int, sender: Connection) -> None:  # a class of transformers
    """The stock forward with sdpa: the same attention in every way."""
    model.set_attn_implementation("sdpa")
    model.train(False)
    times = {}
    for name, num_tokens in _BATCHES.items():
        tokens = torch.arange(num_tokens)[None]
        times[name] = _median_s(lambda tokens=tokens: model(tokens, use_cache=False), repeats)  # type: ignore[misc]  # bound now
    if rank == 0:
        sender.send(times)


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as server:
        return int(server.getsockname()[1])


def _median_s(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[repeats // 4 :])


def _time_steps(repeats: int) -> Table:
    """A decode step of 64 requests: out to one further rank, which answers with 64 tokens."""
    table = Table("a step's way to a further rank and back", "median us", title="64 decoding requests")
    step = _step_of(64)
    recode = lambda: CODEC.decode(CODEC.encode(step))  # noqa: E731
    table.add_row("encode and decode alone", f"{1e6 * _median_s(recode, repeats):.0f}")
    table.add_row("hub (TCP, one connection a rank)", f"{1e6 * hub_round_trip_s(_MATERIAL, repeats):.0f}")
    table.add_row("gloo: length, bytes, answer", f"{1e6 * _gloo_round_trip_s(step, repeats):.0f}")
    return table


def _step_of(num_requests: int) -> SchedulerOutput:
    rows = torch.arange(num_requests).numpy()
    req_ids = [f"request-{index:08d}" for index in range(num_requests)]
    batch = replace(
        StepBatch.empty(),
        req_ids=req_ids,
        rows=rows,
        epochs=rows,
        num_plain=num_requests,
        num_new_tokens=rows,
        num_computed_tokens=rows,
        num_output_tokens=rows,
    )
    return SchedulerOutput(batch, [], set(), total_num_scheduled_tokens=num_requests, step_index=1)


def _answer(step: SchedulerOutput) -> RankStep:
    return RankStep(step.batch.rows[:, None], None)


def hub_round_trip_s(material: TrustMaterial, repeats: int) -> float:
    """Seconds of a decode step's way to a further rank and back, the median, for 64 requests."""
    step, context = _step_of(64), multiprocessing.get_context("spawn")
    hub = RankHub(_HOST, 1, _TIMEOUT_S, lambda: None, Member(_HUB, Trust(material)))
    rank = context.Process(target=_answer_hub, args=(hub.address, material))
    rank.start()
    hub.accept_all(_TIMEOUT_S, lambda: None)

    def round_trip() -> None:
        hub.broadcast(step)
        hub.collect_steps()

    median_s = _median_s(round_trip, repeats)
    hub.close()
    rank.join()
    return median_s


def _answer_hub(address: tuple[str, int], trust: TrustMaterial) -> None:
    connection = RankConnection(socket.create_connection(address), _TIMEOUT_S)
    connection.introduce(Member(Party(f"{_HUB.name}/1", 1), Trust(trust)), _HUB, _TIMEOUT_S)
    while not isinstance(step := connection.receive(), RankStop):
        assert isinstance(step, SchedulerOutput)
        connection.send(_answer(step))


def _gloo_round_trip_s(step: SchedulerOutput, repeats: int) -> float:
    context = multiprocessing.get_context("spawn")
    store = TCPStore(_HOST, 0, 2, is_master=True, timeout=timedelta(seconds=_TIMEOUT_S), wait_for_workers=False)
    rank = context.Process(target=_answer_gloo, args=(store.port, repeats))
    rank.start()
    group = _join(store.port, 0)

    def round_trip() -> None:
        group.broadcast([_length_of(message := pickle.dumps(step, pickle.HIGHEST_PROTOCOL))]).wait()
        group.broadcast([torch.frombuffer(bytearray(message), dtype=torch.uint8)]).wait()
        group.recv([torch.empty(64, 1, dtype=torch.int64)], 1, 0).wait()

    median_s = _median_s(round_trip, repeats)
    rank.join()
    return median_s


def _answer_gloo(port: int, repeats: int) -> None:
    group = _join(port, 1)
    for _ in range(repeats):
        length = torch.empty(1, dtype=torch.int64)
        group.broadcast([length]).wait()
        message = torch.empty(int(length), dtype=torch.uint8)
        group.broadcast([message]).wait()
        step = pickle.loads(message.numpy().tobytes())
        group.send([torch.from_numpy(_answer(step).token_ids)], 0, 0).wait()


def _join(port: int, rank: int) -> Any:  # torch's process groups are untyped
    timeout = timedelta(seconds=_TIMEOUT_S)
    store = TCPStore(_HOST, port, None, is_master=False, timeout=timeout, wait_for_workers=False)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    options._devices = [ProcessGroupGloo.create_device(hostname=_HOST)]
    return ProcessGroupGloo(store, rank, 2, options)


def _length_of(message: bytes) -> Tensor:
    return torch.tensor([len(message)])


if __name__ == "__main__":
    typer.run(run)
