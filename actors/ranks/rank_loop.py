"""Runs a further rank: it joins its engine, then computes the steps that rank 0 sends until rank 0 ends."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import ExitStack

from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.model.errors import RankLost
from actors.model.loader import choose_device
from actors.model.tensor_parallel.group import join_group
from actors.model.tensor_parallel.rank_calls import RankTrust, wait_to_call_again
from actors.ranks.rank_control import RankControl
from actors.ranks.rank_group import JOIN_TIMEOUT_S
from actors.ranks.rank_messages import (
    RankConnection,
    RankFailed,
    RankReady,
    RankRefusals,
    RankSecrets,
    RankStep,
    RankStop,
    RankTask,
    RankTrusts,
    RankWoke,
)
from actors.ranks.rank_refusals import RefusalReports
from actors.worker import Worker
from actors.worker_builder import build_worker
from kv_transfer.device_kind import device_module, is_accelerator
from kv_transfer.errors import HungUp
from kv_transfer.params import EngineAddress
from kv_transfer.trust.callers import PROOF_TIMEOUT_S
from kv_transfer.trust.membership import Member, Trust
from kv_transfer.trust.refusals import Refusals

logger = logging.getLogger(__name__)


def run_rank(task: RankTask, host: str) -> None:
    """Run one rank until rank 0 stops it, until rank 0 is gone, or until the rank fails, which it reports to rank 0.

    host: the address of this machine, at which other ranks and engines reach this rank
    """
    timeout_s = task.config.parallel.rank_timeout_s
    trust = Trust(task.trust)
    connection = _call(task, trust, timeout_s)
    reports = RefusalReports(lambda total: _tell(connection, RankRefusals(total)))
    with ExitStack() as opened:
        opened.callback(connection.close)
        opened.callback(reports.close)
        try:
            worker = _build(task, host, connection, opened, Member(task.own_party, trust), reports)
            worker.take_other_pages()
            _serve(connection, worker, trust)
        except RankLost as error:
            logger.warning("rank %d ends, since its engine is gone", task.tp_rank, extra={"reason": str(error)})
            _say_why(connection, error)
        except Exception as error:
            # A broken invariant in one rank ends the whole engine: rank 0 ends too, and the pool replaces the engine.
            logger.exception("rank %d failed", task.tp_rank)
            _say_why(connection, error)


def _call(task: RankTask, trust: Trust, timeout_s: float) -> RankConnection:
    """Connect to the hub. Raises RankLost.

    The hub closes the connection of a caller that authenticates too slowly; then this function connects again.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = max(0.001, deadline_s - time.monotonic())
        connection = RankConnection(socket.create_connection(task.hub, left_s), timeout_s)
        try:
            connection.introduce(Member(task.own_party, trust), task.hub_party, min(left_s, PROOF_TIMEOUT_S))
        except RankLost as error:
            if not isinstance(error.__cause__, HungUp) or not wait_to_call_again(deadline_s):
                raise
        else:
            return connection


def _build(
    task: RankTask, host: str, connection: RankConnection, opened: ExitStack, own: Member, reports: RefusalReports
) -> Worker:
    refusals = Refusals(on_refused=reports.note)
    parallel = task.config.parallel
    device = choose_device(task.config.model)
    if is_accelerator(device):
        module = device_module(device)
        module.set_device(task.tp_rank % module.device_count())
    group = join_group(
        task.rendezvous,
        task.tp_rank,
        parallel.tensor_parallel_size,
        device=device,
        host=host,
        timeout_s=JOIN_TIMEOUT_S,
        trust=RankTrust(own.trust, task.hub_party, own.trust.tls, refusals),
    )
    opened.callback(group.close)
    group.set_timeout(parallel.rank_start_timeout_s)
    control = RankControl(host, own, task.config.kv_transfer.link_timeout_s, refusals)
    opened.callback(control.close)
    identity = EngineAddress(task.own_party.name, task.incarnation, control.address)
    worker = build_worker(
        task.config, identity, control.control, on_progress=lambda: _tell(connection, RankWoke()), group=group
    )
    opened.callback(worker.shutdown)
    # This closes the group a second time, before everything else: if this rank fails while the others wait for it in a
    # forward pass, they must not wait until the worker and its links are closed too.
    opened.callback(group.close)
    group.set_timeout(parallel.rank_timeout_s)
    connection.send(RankReady(control.address))
    return worker


def _serve(connection: RankConnection, worker: Worker, trust: Trust) -> None:
    while not isinstance(step := connection.receive(), RankStop):
        if isinstance(step, RankSecrets):
            trust.use(step.material)
            connection.send(RankTrusts(trust.generation))
            continue
        if not isinstance(step, SchedulerOutput):
            raise RankLost(f"rank 0 sent a message that only further ranks may send: {type(step).__name__}")
        output = worker.execute_model(step)
        connection.send(RankStep(output.token_ids, output.kv_connector_output, output.adapter_loads))


def _tell(connection: RankConnection, message: RankWoke | RankRefusals) -> None:
    """Send from a thread other than the rank's main thread, which is the one that handles the loss of rank 0."""
    try:
        connection.send(message)
    except RankLost:
        logger.debug("rank 0 is gone")


def _say_why(connection: RankConnection, error: Exception) -> None:
    try:
        connection.send(RankFailed(f"{type(error).__name__}: {error}"))
    except RankLost:
        logger.debug("rank 0 is gone")
