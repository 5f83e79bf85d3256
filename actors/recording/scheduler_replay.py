"""Gives a new scheduler the calls that an engine recorded, and compares every decision.

The scheduler, the scheduler's side of handoffs and the prefix sources are those that serve; only the worker is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import ValidationError

from actors.config import CacheConfig, SchedulerConfig
from actors.core.loads.transfer_parts import TransferParts
from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.abilities import Ability
from actors.core.requests.block_hash import BlockHasher, BlockHashKey
from actors.core.requests.request import Request
from actors.core.scheduler import Scheduler
from actors.errors import DuplicateRequest, EngineError, InvalidRecording
from actors.recording.decision_digest import OUTPUT_PARTS, STEP_PARTS, outputs_digest, step_digest
from actors.recording.engine_events import (
    CODEC,
    VERSION,
    Added,
    Aimed,
    Ended,
    EngineHeader,
    Reset,
    Scheduled,
    StepResults,
    TakenIn,
)
from actors.recording.read_clock import ReplayedClock
from actors.recording.replay import DecisionDiffers, Recording, Replay
from kv_transfer.config import KVTransferConfig
from kv_transfer.prefix.prefix_fetch import PrefixFetches
from kv_transfer.prefix.prefix_sources import PrefixSources
from kv_transfer.sides.scheduler_side import SchedulerSide

_MAX_PENDING: Final = 64


def replay_scheduler(path: Path) -> Replay:
    """Replay an engine's recording up to its end, or to the first difference. Raises InvalidRecording."""
    recording = Recording[EngineHeader](path, CODEC, "an engine")
    header = recording.read_header(EngineHeader, VERSION)
    try:
        replayed = _ReplayedScheduler(header)
    except (ValidationError, ValueError) as error:
        raise InvalidRecording(path, f"its settings are not those of an engine: {error}") from error
    return recording.replay(f"{header.engine_id} ({header.incarnation})", replayed)


class _ReplayedScheduler:
    """A scheduler that gets the calls that the records have. Implements Replayed."""

    def __init__(self, header: EngineHeader) -> None:
        self._clock = ReplayedClock()
        # Nobody reads events of the cache here, so that they would pile up.
        cache = CacheConfig.model_validate({**header.cache, "enable_kv_events": False})
        transfer = KVTransferConfig.model_validate(header.kv_transfer)
        fetches = PrefixFetches(header.fetch_name, cache.block_size, max_fetches=header.max_fetches, clock=self._clock)
        self._scheduler = Scheduler(
            SchedulerConfig.model_validate(header.scheduler),
            cache,
            header.num_blocks,
            header.max_model_len,
            worker_abilities=[Ability(name) for name in header.abilities],
            transfers=TransferParts(
                connector=SchedulerSide(transfer, cache.block_size),
                prefix_sources=PrefixSources(None, fetches),
                config=transfer,
                kv_bytes_per_token=header.kv_bytes_per_token,
            ),
            vocab_size=header.vocab_size,
            num_state_blocks=header.num_state_blocks,
            clock=self._clock,
        )
        self._hasher = BlockHasher(cache.block_size, BlockHashKey(header.hash_key))
        self._steps: dict[int, SchedulerOutput] = {}
        self._num_steps = 0

    def take(self, event: object) -> bool:
        """Make the call that a record is of. Returns whether a decision was compared. Raises DecisionDiffers."""
        match event:
            case Aimed():
                budget = self._scheduler.chunk_budget
                budget.set_aims(event.itl_s, event.ttft_s)
                budget.set_role(event.role)
                if event.model is not None:
                    budget.use_model(event.model)
            case Added():
                self._clock.load(event.clock_s)
                self._add(event)
            case Ended():
                self._clock.load(event.clock_s)
                self._scheduler.finish_requests(event.request_ids, event.finished_status, event.error)
            case Scheduled():
                self._clock.load(event.clock_s)
                self._schedule(event)
            case TakenIn():
                self._clock.load(event.clock_s)
                self._take_in(event)
            case Reset():
                self._clock.load(event.clock_s)
                if self._scheduler.reset_prefix_cache(event.reset_running_requests) is not event.is_done:
                    raise DecisionDiffers(f"before step {self._num_steps}: the reset of the prefix cache")
            case _:
                raise ValueError("a second header")
        if not isinstance(event, Aimed) and not self._clock.is_used_up:
            raise DecisionDiffers(f"before step {self._num_steps}: how often the clock was read in a call")
        return isinstance(event, Scheduled | TakenIn)

    def _add(self, event: Added) -> None:
        request = Request.from_engine_core_request(
            event.request, event.client_index, self._hasher, now_s=event.arrived_s
        )
        is_duplicate = False
        try:
            self._scheduler.add_request(request)
        except DuplicateRequest:
            is_duplicate = True
        if is_duplicate is not event.is_duplicate:
            raise DecisionDiffers(f"before step {self._num_steps}: whether {request.request_id} is still there")

    def _schedule(self, event: Scheduled) -> None:
        step, output = self._num_steps, self._scheduler.schedule()
        self._steps[step] = output
        self._steps.pop(step - _MAX_PENDING, None)
        self._num_steps += 1
        differing = _differing(STEP_PARTS, event.digest, step_digest(output))
        if differing:
            raise DecisionDiffers(
                f"step {step}: {differing}; the recorded step computes {event.num_tokens} tokens of "
                f"{event.num_requests} requests, this one {output.total_num_scheduled_tokens} of {len(output.batch)}"
            )

    def _take_in(self, event: TakenIn) -> None:
        for old in [number for number in self._steps if number < event.step]:
            del self._steps[old]  # Its results were never taken in.
        output, error = self._steps.pop(event.step), None
        try:
            outputs = self._scheduler.update_from_output(output, _model_output(event.results))
        except EngineError as raised:
            error = str(raised)
        if error != event.error:
            raise DecisionDiffers(f"the results of step {event.step}: the error is {error}, and was {event.error}")
        differing = None if error is not None else _differing(OUTPUT_PARTS, event.digest, outputs_digest(outputs))
        if differing:
            raise DecisionDiffers(f"the results of step {event.step}: {differing}")


def _model_output(results: StepResults) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        results.req_ids,
        results.token_ids,
        num_nans_in_logits=results.num_nans_in_logits,
        pooler_output={req_id: [] for req_id in results.pooled_req_ids},
        draft_token_ids=results.draft_token_ids,
        kv_connector_output=results.transfers,
    )


def _differing(names: tuple[str, ...], recorded: tuple[int, ...], found: tuple[int, ...]) -> str:
    """Return the names of the parts that differ, as one text; empty if none does."""
    pairs = zip(names, recorded, found, strict=True)
    return " and ".join(name for name, one, other in pairs if one != other)
