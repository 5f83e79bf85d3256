"""Reads the inputs of `raypd plan`: the speed of an engine, and the requests of a trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from actors.config import SchedulerConfig
from actors.costs.cost_file import CostFileRefused, CostIdentity, load_cost_model
from actors.costs.step_cost_model import StepCostModel
from cluster.commands.plan.model_kv import read_even_size, read_model_kv
from cluster.errors import InvalidConfig
from cluster.planning.engine_work import EngineSpeed, speed_of_model
from cluster.planning.offered_load import OfferedRequest
from cluster.settings.kubernetes import GPU_PRODUCTS
from cluster.simulation.engines.fitted_costs import fit_step_costs
from cluster.simulation.timing.gpu_data_sheets import find_data_sheet, gpu_in
from cluster.simulation.timing.model_shape import read_model_shape
from cluster.simulation.timing.op_tables import read_op_tables
from cluster.simulation.timing.rank_exchange import RankLayout
from cluster.simulation.timing.roofline import WARNING, RooflineStepTimes
from cluster.traces.trace_request import BLOCK_TOKENS, TraceRequest

_BITS: Final = 8
_ANY_GPU: Final = "any"
_OF_PROCESSORS: Final = " threads"
"""The end of the device in the cost models of engines on CPUs (device_name())."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """How much an engine keeps: tokens in its KV cache (None: unknown), bytes of a token, and bytes of a request."""

    num_kv_tokens: int | None = None
    kv_bytes_per_token: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SpeedSource:
    """The options that say how fast an engine is.

    model:      the checkpoint's directory
    gpu:        the name of a GPU with a data sheet
    cost_model: a file that an engine has saved
    op_tables, shape: a directory of tables of operators, and the file with the model's shape
    num_ranks:  tensor-parallel ranks of an engine
    num_kv_tokens: tokens that an engine's KV cache holds; None: by the GPU's memory, or by the model's shape
    link_gbit_per_s: bandwidth between two engines
    """

    model: Path | None
    gpu: str | None
    cost_model: Path | None
    op_tables: Path | None
    shape: Path | None
    num_ranks: int
    num_kv_tokens: int | None
    link_gbit_per_s: float


def read_speed(source: SpeedSource, scheduler: SchedulerConfig) -> tuple[EngineSpeed, str]:
    """Return an engine's speed, and a warning if nothing was measured, else "". Raises InvalidConfig."""
    if source.cost_model is not None and source.op_tables is not None:
        raise InvalidConfig("plan", ["give either --cost-model or --op-tables, not both"])
    if source.cost_model is not None:
        return _speed(read_cost_model(source.cost_model), source, scheduler, _kept(source)), ""
    if source.op_tables is not None:
        if source.shape is None:
            raise InvalidConfig("--op-tables", ["needs --shape, a file with the model's shape"])
        shape = read_model_shape(source.shape)
        tables = read_op_tables(source.op_tables, shape, RankLayout(tensor_parallel_size=source.num_ranks))
        model = fit_step_costs(tables, scheduler)
        return _speed(model, source, scheduler, _Kept(shape.num_kv_tokens, shape.kv_bytes_per_token())), ""
    guess = _guess(source)
    if guess is None:
        raise InvalidConfig("plan", ["give --cost-model, or --op-tables, or --model together with --gpu"])
    model = fit_step_costs(guess, scheduler)
    return _speed(model, source, scheduler, _Kept(guess.num_kv_tokens, guess.size.kv_bytes_per_token)), WARNING


def read_cost_model(path: Path) -> StepCostModel:
    """Read a cost model that an engine has saved, whatever the model and the device. Raises InvalidConfig."""
    try:
        return load_cost_model(path, _identity(path))
    except CostFileRefused as error:
        raise InvalidConfig("--cost-model", [str(error)]) from error


def gpu_of_engines(source: SpeedSource) -> str | None:
    """Return the GPU of the engines whose speed was read, as `raypd manifests` takes it; None: they run on CPUs.

    Manifests ask for a GPU by its name if they know that kind, else for any GPU.
    """
    device = source.gpu
    if device is None and source.cost_model is not None:
        device = _identity(source.cost_model).device
    if device is None:
        return _ANY_GPU
    if device.endswith(_OF_PROCESSORS):
        return None
    name = gpu_in(device)
    return name if name in GPU_PRODUCTS else _ANY_GPU


def _identity(path: Path) -> CostIdentity:
    """Return the identity in a saved cost model. Raises InvalidConfig."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        return msgspec.json.decode(found.get("identity", msgspec.Raw(b"null")), type=CostIdentity)
    except OSError as error:
        raise InvalidConfig(f"--cost-model {path}", [f"it cannot be read: {error.strerror}"]) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"--cost-model {path}", [f"it is no saved cost model: {error}"]) from error


def offered_requests(
    trace: Iterable[TraceRequest], num_cached_blocks: int, rate_scale: float = 1.0
) -> list[OfferedRequest]:
    """Return the requests of a trace with what an engine would have cached of each.

    Of a request without ids of blocks it is taken to be what was cached when the request was recorded.

    rate_scale:        the requests come this many times as fast as they were recorded
    num_cached_blocks: blocks of BLOCK_TOKENS tokens that an engine's cache holds; the least recently used go first
    """
    cache: OrderedDict[int, None] = OrderedDict()
    found = []
    for request in trace:
        num_hits = 0
        for block in request.blocks:
            if block not in cache:
                break
            num_hits += 1
        for block in request.blocks:
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > max(num_cached_blocks, 1):
            cache.popitem(last=False)
        num_cached = num_hits * BLOCK_TOKENS if request.blocks else request.num_cached_tokens
        num_cached = min(num_cached, request.num_input_tokens - 1)
        found.append(
            OfferedRequest(
                request.arrival_s / rate_scale, request.num_input_tokens, num_cached, request.num_output_tokens
            )
        )
    return found


def _guess(source: SpeedSource) -> RooflineStepTimes | None:
    if source.model is None or source.gpu is None:
        return None
    # The report says loudly that this is a guess, so the log need not.
    return RooflineStepTimes(read_even_size(source.model), find_data_sheet(source.gpu), source.num_ranks)


def _kept(source: SpeedSource) -> _Kept:
    """Return what is known of the model. A GPU is looked at only if nobody says how many tokens it has room for."""
    if source.model is None:
        return _Kept()
    figures, guess = read_model_kv(source.model), None if source.num_kv_tokens else _guess(source)
    held = None if guess is None else guess.num_kv_tokens
    return _Kept(held, figures.bytes_per_token, figures.state_bytes)


def _speed(model: StepCostModel, source: SpeedSource, scheduler: SchedulerConfig, kept: _Kept) -> EngineSpeed:
    held = source.num_kv_tokens or kept.num_kv_tokens
    if held is None:
        raise InvalidConfig("plan", ["give --kv-tokens, or --model and --gpu, for the size of the KV cache"])
    speed = speed_of_model(model, scheduler.max_num_batched_tokens, scheduler.max_num_seqs, held)
    return msgspec.structs.replace(
        speed,
        kv_bytes_per_token=kept.kv_bytes_per_token,
        num_state_tokens=-(-kept.state_bytes // max(kept.kv_bytes_per_token, 1)),
        link_bytes_per_s=source.link_gbit_per_s * 1e9 / _BITS,
    )
