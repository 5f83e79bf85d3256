"""Checks the scheduler's invariants, for tests and for an engine that is idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.loads.remote_kv import RemoteKV
from actors.core.preparation import Preparation
from actors.core.queue.scheduler_queues import Queues
from actors.core.requests.request import Request, RequestStatus
from actors.errors import IntegrityError
from kv_transfer.params import TransferRole


def check_queues(
    requests: Mapping[str, Request],
    queues: Queues,
    remote: RemoteKV,
    preparation: Preparation,
    kv_cache_manager: KVCacheManager,
) -> None:
    """Raise IntegrityError unless each request is in exactly one queue or map that fits its status and its blocks."""
    _check_statuses(requests, queues, remote, preparation)
    with_blocks = kv_cache_manager.holders()
    may_hold = {
        *queues.running.by_id,
        *remote.loading,
        *remote.held,
        *(r.request_id for r in queues.all_loaded()),
    }
    if not with_blocks <= may_hold:
        raise IntegrityError(f"{sorted(with_blocks - may_hold)} hold blocks, but neither run nor transfer")
    pinned = kv_cache_manager.pins.holders() - remote.prefix_loads.answers - remote.embeddings.holders()
    if pinned:
        raise IntegrityError(f"{sorted(pinned)} hold blocks, but no such transfer is under way")
    for request in (*queues.running, *queues.all_loaded()):
        _check_blocks(request, kv_cache_manager)


def _check_statuses(
    requests: Mapping[str, Request], queues: Queues, remote: RemoteKV, preparation: Preparation
) -> None:
    waiting = {RequestStatus.WAITING, RequestStatus.PREEMPTED}
    found: Counter[str] = Counter()
    for members, statuses in (
        (queues.running, {RequestStatus.RUNNING}),
        (queues.waiting, waiting),
        (queues.loaded, {RequestStatus.WAITING}),
        (queues.waiting_for_lora, waiting),
        (queues.loaded_for_lora, {RequestStatus.WAITING}),
        ([request for request, _ in queues.lora_waits.held_loads.values()], {RequestStatus.WAITING}),
        (preparation.grammars.requests.values(), {RequestStatus.WAITING_FOR_FSM}),
        (preparation.waiting_for_adapter(), {RequestStatus.WAITING}),
        (remote.blocked_producers.values(), {RequestStatus.WAITING}),
        (remote.blocked_consumers, {RequestStatus.WAITING}),
        (remote.loading.values(), {RequestStatus.WAITING_FOR_REMOTE_KVS}),
    ):
        for request in members:
            found[request.request_id] += 1
            if request.status not in statuses:
                raise IntegrityError(f"{request.request_id} is {request.status.name} and in the wrong queue")
    if found != Counter(list(requests)):
        raise IntegrityError(f"requests {sorted(requests)} are found as often as {dict(found)}")
    if any(not request.is_finished() for request in remote.held.values()):
        raise IntegrityError("an unfinished request is held")
    if remote.held.keys() & requests.keys():
        raise IntegrityError("a request is both held and unfinished")


def _check_blocks(request: Request, kv_cache_manager: KVCacheManager) -> None:
    num_blocks = kv_cache_manager.num_blocks_of(request.request_id)
    num_slots = num_blocks * kv_cache_manager.block_size
    if request.num_computed_tokens > num_slots:
        raise IntegrityError(
            f"{request.request_id} has computed {request.num_computed_tokens} tokens in {num_slots} slots"
        )
    needs_all = request.transfer_role is TransferRole.PRODUCER or request.status is RequestStatus.WAITING
    if needs_all and num_slots < request.num_tokens:
        raise IntegrityError(f"{request.request_id} has {num_slots} slots reserved for {request.num_tokens} tokens")
