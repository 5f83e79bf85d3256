"""Tells in words what is known of a request in flight whose engines have not reported on it: how long their queues are.

An engine reports on a request at the end of its part. Until then there is what it says of itself, twice a second.
"""

from __future__ import annotations

from cluster.routing.request_record import AttemptRecord, EngineQueue, RequestRecord


def waits_for_blocks(record: RequestRecord) -> EngineQueue | None:
    """Return the decode engine whose blocks a request in flight waits for; None if that is not certain.

    It is certain if all that its prefill engine has wait for the blocks of decode engines.
    """
    attempt = record.attempts[-1]
    producer, consumer = _queue(record, attempt.prefill_engine_id), _queue(record, attempt.decode_engine_ids[-1])
    if producer is None or consumer is None or not consumer.num_waiting_for_blocks:
        return None
    num_others = producer.num_running + producer.num_waiting - producer.num_waiting_for_reservation
    return consumer if producer.num_waiting_for_reservation and not num_others else None


def blocks_in_words(queue: EngineQueue, waited: str) -> str:
    """Return the cause of a request that waits for blocks. queue: of the decode engine; waited: how long, in words"""
    requests = "1 request does" if queue.num_waiting_for_blocks == 1 else f"{queue.num_waiting_for_blocks} requests do"
    return f"has waited {waited} for KV blocks at {queue.engine_id}: {requests}, and {_cache(queue)}"


def queues_in_words(record: RequestRecord) -> str:
    """Return the queues of the engines that have told nothing of a request yet; "" if they are not known."""
    attempt: AttemptRecord = record.attempts[-1]
    return "; ".join(_in_words(one, is_producer=one.engine_id == attempt.prefill_engine_id) for one in record.queues)


def _in_words(queue: EngineQueue, *, is_producer: bool) -> str:
    text = f"{queue.engine_id} has {queue.num_running} running and {queue.num_waiting} waiting"
    if is_producer and queue.num_waiting_for_reservation:
        text += f", {queue.num_waiting_for_reservation} of them for KV blocks of decode engines"
    if queue.num_waiting_for_blocks:
        text += f", {queue.num_waiting_for_blocks} of them for KV blocks, and {_cache(queue)}"
    if queue.num_waiting_for_batch:
        text += f", {queue.num_waiting_for_batch} of them with their KV, for the batch"
    return text + (f"; the KV of {queue.num_waiting_for_kv} is on its way" if queue.num_waiting_for_kv else "")


def _cache(queue: EngineQueue) -> str:
    return f"its KV cache is {queue.kv_cache_usage:.0%} full"


def _queue(record: RequestRecord, engine_id: str | None) -> EngineQueue | None:
    return next((one for one in record.queues if one.engine_id == engine_id), None)
