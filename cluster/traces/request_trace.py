"""raypd's own form of a trace, which ingresses write: JSON lines, the first of which describes the others.

Each further line is one request that has ended. So lines are in the order of the requests' ends, not of their arrivals.
Arrivals are seconds by the ingress's monotonic clock since the trace began; the time of day at which it began is in the
first line. A trace is split into parts, files with the same first line but for the part's number. Block ids are hashes;
tokens and texts are in no line.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from cluster.traces.trace_request import BLOCK_TOKENS, MAX_TRACE_TOKENS, BlockId, OutputTokens, check_blocks

REQUEST_TRACE_VERSION: Final = 1
"""The version of the form; it grows when a field changes its meaning."""
MAX_BLOCK_HASH: Final = 2**52 - 1
"""Hashes are cut to what every reader of JSON keeps exactly."""
_MAX_SECONDS: Final = 1e10

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=_MAX_SECONDS)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Name = Annotated[str, msgspec.Meta(max_length=4096)]


class BlockHashes(StrEnum):
    """The hashes of prompts' blocks in a request trace."""

    NONE = "none"
    """There are none, so nothing shows which requests have a prefix in common."""
    PER_FILE = "per_file"
    """Each file has a key of its own, which nobody keeps: hashes of two files cannot be compared."""
    CLUSTER = "cluster"
    """All files of the cluster's ingresses have a key that is derived from the cluster's key of block hashes."""


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file.

    raypd_request_trace: the version of the form
    began_at_s:   Unix time at which the trace began, and arrival_s was 0
    ingress:      the name of the ingress that wrote the trace
    part:         the file's number in the trace, from 1 on
    block_tokens: tokens of the prompt for which there is one of a line's block_hashes
    """

    raypd_request_trace: int = REQUEST_TRACE_VERSION
    began_at_s: Annotated[float, msgspec.Meta(ge=0, le=1e11)]
    ingress: _Name
    part: Annotated[int, msgspec.Meta(ge=1)]
    block_tokens: int = BLOCK_TOKENS
    block_hashes: BlockHashes = BlockHashes.NONE


class TraceLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request that has ended. Fields with their defaults are left out of the line. Durations are in seconds.

    number:              the request's number in the trace, from 1 on, in the order of the requests' ends. Numbers that
                         are missing are of lines that could not be written
    request_id:          as the client gave it, so another request may have had it before
    arrival_s:           from the beginning of the trace
    num_prompt_tokens:   None if the request was refused before its prompt was tokenized
    num_output_tokens:   tokens that the client got
    block_hashes:        one for each BLOCK_TOKENS tokens of the prompt, the last one possibly for fewer; equal hashes
                         stand for prompts that are equal up to the end of the block
    ttft_aim_s, itl_aim_s: the request's own aims
    outcome:             the finish reason, or how the request failed, as in the metric raypd_requests
    way:                 the way of the last attempt; "" if no engine got the request, or if no costs were predicted and
                         one engine did all of it
    prefill_engine:      the engine that computed the prompt and handed it over, in the last attempt
    decode_engines:      the engines that decoded in the last attempt, in order; more than one if the request migrated
    queue_s, prefill_s:  the phases at the engine that computed the prompt, in the last attempt
    transfer_s:          from the first chunk of the handoff to the last block
    exposed_transfer_s:  the part of transfer_s after the end of prefill
    decode_s:            from the first token to the end
    ttft_s, duration_s:  from the arrival to the first token, and to the end
    num_attempts:        how often the request was submitted to engines
    num_moves:           how often it migrated to another decode engine in the last attempt
    """

    number: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    request_id: _Name
    arrival_s: _Seconds
    outcome: _Name
    tenant: _Name = ""
    num_prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TRACE_TOKENS)] | None = None
    num_output_tokens: OutputTokens = 0
    num_cached_tokens: OutputTokens = 0
    block_hashes: tuple[BlockId, ...] = ()
    ttft_aim_s: _Seconds | None = None
    itl_aim_s: _Seconds | None = None
    model_version: _Count = 0
    way: _Name = ""
    prefill_engine: _Name | None = None
    decode_engines: tuple[_Name, ...] = ()
    queue_s: _Seconds | None = None
    prefill_s: _Seconds | None = None
    transfer_s: _Seconds | None = None
    exposed_transfer_s: _Seconds | None = None
    decode_s: _Seconds | None = None
    ttft_s: _Seconds | None = None
    itl_p50_s: _Seconds | None = None
    itl_max_s: _Seconds | None = None
    duration_s: _Seconds = 0.0
    num_attempts: _Count = 0
    num_moves: _Count = 0
    num_preemptions: _Count = 0


def is_header(text: str) -> bool:
    """Whether a line is the first line of a request trace, of any version."""
    try:
        return _VERSION.decode(text).raypd_request_trace is not None
    except msgspec.DecodeError:
        return False


def parse_header(text: str) -> TraceHeader:
    """Parse the first line of a file. Raises ValueError."""
    version = _VERSION.decode(text).raypd_request_trace
    if version != REQUEST_TRACE_VERSION:
        problem = f"it is of version {version!r} of the form, and this raypd reads {REQUEST_TRACE_VERSION}"
        raise ValueError(f"{problem}: read it with the version of raypd that wrote it")
    header = _HEADER.decode(text)
    if header.block_tokens != BLOCK_TOKENS:
        raise ValueError(f"its blocks have {header.block_tokens} tokens; allowed: {BLOCK_TOKENS}")
    return header


def parse_line(text: str) -> TraceLine:
    """Parse a line below the first one. Raises ValueError."""
    try:
        line = _LINE.decode(text)
    except msgspec.DecodeError:
        if is_header(text):
            raise ValueError("it is the first line of another file: read each file alone") from None
        raise
    if line.block_hashes:
        check_blocks(line.block_hashes, line.num_prompt_tokens or 0, "block_hashes")
    return line


def encode_line(line: TraceHeader | TraceLine) -> bytes:
    """Return a line of the file, with its line feed."""
    return _ENCODER.encode(line) + b"\n"


class _Version(msgspec.Struct):
    raypd_request_trace: object = None


_ENCODER: Final = msgspec.json.Encoder()
_VERSION: Final = msgspec.json.Decoder(_Version)
_HEADER: Final = msgspec.json.Decoder(TraceHeader)
_LINE: Final = msgspec.json.Decoder(TraceLine)
