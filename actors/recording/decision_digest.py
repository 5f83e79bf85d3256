"""Digests of decisions: equal ones for equal decisions, in every process, and one for each part that can differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import numpy as np
import xxhash

from actors.core.outputs.engine_core_outputs import EngineCoreOutput, EngineCoreOutputs
from actors.core.outputs.scheduler_output import SchedulerOutput

STEP_PARTS: Final = (
    "the batch",
    "new requests",
    "resumed requests",
    "preempted requests",
    "ended requests",
    "copies of blocks",
    "drafts",
    "what links are asked for",
)
OUTPUT_PARTS: Final = ("tokens", "ends and other outputs", "ended requests")


def step_digest(output: SchedulerOutput) -> tuple[int, ...]:
    """Return a number for each of STEP_PARTS."""
    batch = output.batch
    arrays = (batch.rows, batch.epochs, batch.num_new_tokens, batch.num_computed_tokens, batch.num_output_tokens)
    new = [
        (one.req_id, one.row, len(one.prompt_token_ids), one.output_token_ids, one.block_ids, one.num_computed_tokens)
        for one in output.scheduled_new_reqs
    ]
    drafts = output.scheduled_spec_decode_tokens, output.num_drafts_wanted
    return _numbers(
        (
            (batch.req_ids, batch.num_plain, arrays, batch.grown, output.step_index, output.num_common_prefix_blocks),
            new,
            output.scheduled_resumed_reqs,
            output.preempted_req_ids,
            output.finished_req_ids,
            output.block_copies,
            drafts,
            output.kv_connector_metadata,
        )
    )


def outputs_digest(outputs: Mapping[int, EngineCoreOutputs]) -> tuple[int, ...]:
    """Return a number for each of OUTPUT_PARTS. Log-probabilities and vectors are left out."""
    clients = sorted(outputs.items())
    decoded = [(client, found.decoded) for client, found in clients if found.decoded is not None]
    others = [(client, [_plain_output(one) for one in found.others]) for client, found in clients if found.others]
    ended = [(client, found.finished_req_ids) for client, found in clients if found.finished_req_ids]
    return _numbers((decoded, others, ended))


def _plain_output(output: EngineCoreOutput) -> tuple[object, ...]:
    return (
        output.request_id,
        output.attempt,
        output.new_token_ids,
        output.first_position,
        output.finish_reason,
        output.stop_token_id,
        output.stop_reason,
        output.error,
        output.end_cause,
        output.preemption,
        output.timings,
    )


def value_digest(value: object) -> int:
    """Return a number for a value that msgspec can encode, or that has arrays in it."""
    return xxhash.xxh3_64_intdigest(_ENCODER.encode(value))


def _numbers(parts: Iterable[object]) -> tuple[int, ...]:
    return tuple(map(value_digest, parts))


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} cannot be in a digest")
    return value.dtype.str, value.shape, value.tobytes()


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_plain, order="deterministic")
