"""Reads runs of real engines on GPUs, in the form that LLMServingSim's `bench run` writes: meta.json, requests.jsonl.

The prompts' tokens are not part of a run, only their numbers; outputs have the length that was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster.errors import InvalidConfig
from cluster.simulation.timing.rank_exchange import RankLayout

_MAX_BYTES: Final = 1 << 28
_DEFAULT_BATCHED_TOKENS: Final = 2048
_DEFAULT_SEQS: Final = 256
_DEFAULT_BLOCK_SIZE: Final = 16


class _Row(msgspec.Struct):
    request_id: str
    input_toks: int
    output_toks: int
    arrival_time: float | None = None
    queued_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One request. Times are in seconds from the first request's arrival."""

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    first_token_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class GpuRun:
    """A run, and how its engines were set up; where meta.json is silent, vLLM's defaults hold.

    requests:         in the order of their arrival
    num_without_times: requests of the file that have no times, and are left out
    layout:           the engines' ranks
    num_kv_tokens:    tokens whose KV one engine has room for; None: meta.json does not say
    device_name:      the GPU's name; empty if meta.json does not say
    has_overlap:      whether a step is scheduled while the one before it runs (vLLM: async_scheduling)
    """

    requests: tuple[RunRequest, ...]
    num_without_times: int
    layout: RankLayout
    num_kv_tokens: int | None
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    long_prefill_token_threshold: int
    has_overlap: bool
    has_chunked_prefill: bool
    has_prefix_caching: bool
    device_name: str


def read_gpu_run(directory: Path) -> GpuRun:
    """Read a run's directory. Raises InvalidConfig, which names the file and the line or field."""
    rows = _read_rows(directory / "requests.jsonl")
    meta = _Meta.read(directory / "meta.json")
    timed = [row for row in rows if _has_times(row)]
    if not timed:
        raise InvalidConfig(str(directory / "requests.jsonl"), ["no request has times"])
    layout = RankLayout(
        data_parallel_size=meta.count("data_parallel_size", 1),
        tensor_parallel_size=meta.count("tensor_parallel_size", 1),
        is_expert_parallel=meta.flag("enable_expert_parallel", default=False),
    )
    block_size = meta.count("block_size", _DEFAULT_BLOCK_SIZE)
    num_kv_tokens = meta.find("num_kv_tokens")
    if num_kv_tokens is None and (num_blocks := meta.find("num_gpu_blocks")) is not None:
        num_kv_tokens = num_blocks * block_size
    if num_kv_tokens is not None:
        # vLLM's client sums the blocks of its data-parallel engines.
        num_kv_tokens = meta.checked("num_kv_tokens", num_kv_tokens) // layout.data_parallel_size
    return GpuRun(
        requests=_requests_of(timed),
        num_without_times=len(rows) - len(timed),
        layout=layout,
        num_kv_tokens=num_kv_tokens,
        block_size=block_size,
        max_num_seqs=meta.count("max_num_seqs", _DEFAULT_SEQS),
        max_num_batched_tokens=meta.count("max_num_batched_tokens", _DEFAULT_BATCHED_TOKENS),
        max_model_len=None if meta.find("max_model_len") is None else meta.count("max_model_len", 1),
        long_prefill_token_threshold=meta.count("long_prefill_token_threshold", 0, least=0),
        has_overlap=meta.flag("async_scheduling", default=True),
        has_chunked_prefill=meta.flag("enable_chunked_prefill", default=True),
        has_prefix_caching=meta.flag("enable_prefix_caching", default=True),
        device_name=str(meta.find("device_name") or ""),
    )


def _read_rows(path: Path) -> list[_Row]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InvalidConfig(str(path), [f"it is longer than {_MAX_BYTES} bytes"])
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(str(path), [f"it cannot be read: {error}"]) from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_Row)
        except msgspec.DecodeError as error:
            raise InvalidConfig(str(path), [f"line {number}: {error}"]) from error
        if row.input_toks < 1 or row.output_toks < 1:
            raise InvalidConfig(str(path), [f"line {number}: input_toks and output_toks must be at least 1"])
        rows.append(row)
    return rows


def _has_times(row: _Row) -> bool:
    return None not in (row.arrival_time, row.queued_ts, row.first_token_ts, row.last_token_ts)


def _requests_of(rows: list[_Row]) -> tuple[RunRequest, ...]:
    """Bring all times to one clock: arrivals are by the wall clock, and the engine's times by a monotonic one.

    The request that went from its client into the engine fastest is taken to have needed no time for it, as the run's
    authors do. Between steps an engine does not take requests in, so the others waited for the end of a step.
    """
    known = [(row.arrival_time or 0.0, row.queued_ts or 0.0) for row in rows]
    first_s = min(arrival for arrival, _ in known)
    shift_s = min(queued - arrival for arrival, queued in known) + first_s
    return tuple(
        sorted(
            (
                RunRequest(
                    row.request_id,
                    arrival - first_s,
                    row.input_toks,
                    row.output_toks,
                    (row.first_token_ts or 0.0) - shift_s,
                    (row.last_token_ts or 0.0) - shift_s,
                )
                for row, (arrival, _) in zip(rows, known, strict=True)
            ),
            key=lambda request: request.arrival_s,
        )
    )


@dataclass(frozen=True, slots=True)
class _Meta:
    """The fields of meta.json. What the engine made of its arguments goes before the arguments."""

    path: Path
    sections: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, path: Path) -> _Meta:
        try:
            meta = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise InvalidConfig(str(path), [f"it cannot be read: {error}"]) from error
        if not isinstance(meta, dict):
            raise InvalidConfig(str(path), ["it is no JSON object"])
        resolved = meta.get("resolved_config")
        resolved = resolved if isinstance(resolved, dict) else {}
        configs = [resolved.get(f"{name}_config") for name in ("scheduler", "parallel", "cache", "model")]
        found = [meta, meta.get("kv_cache"), meta.get("hardware"), *configs, meta.get("engine_kwargs")]
        return cls(path, tuple(section for section in found if isinstance(section, dict)))

    def find(self, name: str) -> Any:
        """Return a field's value; None if it is not there or null."""
        return next((section[name] for section in self.sections if section.get(name) is not None), None)

    def count(self, name: str, default: int, least: int = 1) -> int:
        value = self.find(name)
        return default if value is None else self.checked(name, value, least)

    def checked(self, name: str, value: Any, least: int = 1) -> int:
        if type(value) is not int or value < least:
            raise InvalidConfig(str(self.path), [f"{name}: {value!r} is no whole number of at least {least}"])
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.find(name)
        if value is not None and type(value) is not bool:
            raise InvalidConfig(str(self.path), [f"{name}: {value!r} is neither true nor false"])
        return default if value is None else value
