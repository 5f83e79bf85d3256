"""Makes the line of a request trace from the record of a request. No text and no token gets into it."""

from __future__ import annotations

from typing import Final

from actors.core.requests.block_hash import BlockHash, BlockHasher, BlockHashKey, ExtraKeys
from actors.core.requests.request import EngineCoreRequest
from cluster.routing.decision import Way
from cluster.routing.request_record import AttemptRecord, RequestRecord
from cluster.traces.request_trace import MAX_BLOCK_HASH, TraceLine
from cluster.traces.trace_request import BLOCK_TOKENS

_MAX_NAME_CHARS: Final = 1024


def make_line(
    number: int,
    record: RequestRecord,
    arrival_s: float,
    request: EngineCoreRequest | None,
    hash_key: BlockHashKey | None,
) -> TraceLine:
    """Make the line of a request that has ended.

    number:    the request's number in the trace
    arrival_s: from the beginning of the trace
    request:   the tokenized request; None if it was refused before
    hash_key:  the key of the hashes of the prompt's blocks; None: the line has no hashes
    """
    last = record.attempts[-1] if record.attempts else None
    slo = None if request is None else request.slo
    # An arrival just before the beginning of the trace is no mistake of the clock: the trace begins with the ingress.
    line = TraceLine(
        number=number,
        request_id=record.request_id[:_MAX_NAME_CHARS],
        tenant=record.tenant[:_MAX_NAME_CHARS],
        arrival_s=max(0.0, arrival_s),
        outcome=record.outcome or "unknown",
        num_prompt_tokens=(record.num_prompt_tokens or None) if request is None else len(request.prompt_token_ids),
        num_output_tokens=record.num_output_tokens,
        block_hashes=() if request is None or hash_key is None else hash_prompt(request, hash_key),
        ttft_aim_s=None if slo is None else slo.ttft_s,
        itl_aim_s=None if slo is None else slo.itl_s,
        model_version=record.model_version,
        ttft_s=record.ttft_s,
        itl_p50_s=record.itl_p50_s,
        itl_max_s=record.itl_max_s,
        duration_s=record.duration_s or 0.0,
        decode_s=_decode_s(record),
        num_attempts=len(record.attempts) + record.num_attempts_left_out,
    )
    return line if last is None else _with_attempt(line, last, record.left_queues_s)


def hash_prompt(request: EngineCoreRequest, key: BlockHashKey) -> tuple[int, ...]:
    """Hash the prompt's blocks of BLOCK_TOKENS tokens; the last one may have fewer."""
    digest = None if request.prompt_embeds is None else request.prompt_embeds.digest
    keys = ExtraKeys(
        request.cache_salt, None if request.lora is None else request.lora.key, request.mm_features, digest
    )
    hasher, hashes = BlockHasher(BLOCK_TOKENS, key), list[BlockHash]()
    hasher.extend(hashes, request.prompt_token_ids, keys)
    tail = hasher.name_tail(hashes, request.prompt_token_ids, keys)
    named = hashes if tail is None else [*hashes, tail]
    return tuple(int.from_bytes(name[:8], "little") & MAX_BLOCK_HASH for name in named)


def _decode_s(record: RequestRecord) -> float | None:
    if record.ttft_s is None or record.duration_s is None:
        return None
    return max(0.0, record.duration_s - record.ttft_s)


def _with_attempt(line: TraceLine, last: AttemptRecord, left_queues_s: float) -> TraceLine:
    computing, decode = last.computing, last.decode
    chosen = None if last.decision is None else last.decision.chosen
    way = chosen.way if chosen is not None else Way.PREFILL_DECODE if last.prefill_engine_id is not None else None
    if way is not None:
        line.way = way.value
    line.prefill_engine, line.decode_engines = last.prefill_engine_id, last.decode_engine_ids
    line.num_moves = max(0, len(last.decode_engine_ids) - 1)
    if computing is not None:
        line.queue_s, line.prefill_s = left_queues_s + computing.queued_s, computing.prefill_s
        line.num_cached_tokens = computing.num_cached_tokens
    if last.prefill_engine_id is not None and decode is not None:
        line.transfer_s, line.exposed_transfer_s = decode.transfer_s, decode.exposed_transfer_s
    line.num_preemptions = sum(times.num_preemptions for times in (last.prefill, last.decode) if times is not None)
    return line
