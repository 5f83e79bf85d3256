"""Tells in words what is known of a request in flight whose engines have not reported on it: how long their queues are.

An engine reports on a request at the end of its part. Until then there is what it says of itself, twice a second.
"""

from __future__ import annotations

from cluster.routing.request_record import EngineQueue, RequestRecord


def waits_for_reservation(record: RequestRecord) -> EngineQueue | None:
    """Return the queue of the decode engine that has yet to reserve blocks for a request in flight.

    Returns None if that is not certain. It is certain if all requests of its prefill engine wait for their decode
    engines.
    """
    attempt = record.attempts[-1]
    producer, consumer = _queue(record, attempt.prefill_engine_id), _queue(record, attempt.decode_engine_ids[-1])
    if producer is None or consumer is None or not producer.num_waiting_for_reservation:
        return None
    return consumer if producer.num_running + producer.num_waiting == producer.num_waiting_for_reservation else None


def reservation_in_words(queue: EngineQueue, waited: str) -> str:
    """Return the cause of a request that waits for a reservation.

    queue:  of the decode engine
    waited: how long, in words
    """
    return f"has waited {waited} until {queue.engine_id} reserves blocks: {_in_words(queue)}"


def queues_in_words(record: RequestRecord) -> str:
    """Return the queues of the engines that have told nothing of a request yet; "" if they are not known."""
    return "; ".join(map(_in_words, record.queues))


def _in_words(queue: EngineQueue) -> str:
    text = f"{queue.engine_id} has {queue.num_running} running and {queue.num_waiting} waiting"
    if queue.num_waiting_for_reservation:
        text += f", {queue.num_waiting_for_reservation} of them for blocks of decode engines"
    if queue.num_waiting_for_batch:
        text += f", {queue.num_waiting_for_batch} of them with their KV, for the batch"
    if queue.num_waiting_for_kv:
        text += f", the KV of {queue.num_waiting_for_kv} is on its way"
    return f"{text}, and {queue.kv_cache_usage:.0%} of its KV cache in use"


def _queue(record: RequestRecord, engine_id: str | None) -> EngineQueue | None:
    return next((one for one in record.queues if one.engine_id == engine_id), None)
