"""A prefill and a decode engine in one process, joined by a real link and stepped by the test's own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from actors.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.core.outputs.engine_core_outputs import EngineCoreOutput, Preemption, RequestTimings
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.adapter import Adapter
from actors.core.requests.request import EngineCoreRequest, RequestStatus
from actors.core.requests.sampling_params import SamplingParams
from actors.engine_builder import build_engine_core
from actors.engine_core import EngineCore
from kv_transfer.config import KVTransferConfig
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.params import EngineAddress, KVTransferParams, PrefixSource, TransferRole
from tests.trusted import TRUST

_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Answer:
    """The output that the client of one request has seen so far, from both engines."""

    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False
    last: dict[str, EngineCoreOutput] = field(default_factory=dict)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    preemptions: list[Preemption] = field(default_factory=list)

    def take(self, engine: str, output: EngineCoreOutput) -> None:
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, f"{engine} brings them a second time"
            assert output.first_position == 0
            self.prompt_logprobs = output.prompt_logprobs
        self.logprobs += (output.logprobs or [])[max(0, len(self.token_ids) - output.first_position) :]
        for position, token_id in enumerate(output.new_token_ids, output.first_position):
            if position < len(self.token_ids):
                assert self.token_ids[position] == token_id, f"{engine} changed position {position}"
                continue
            assert position == len(self.token_ids), f"a gap before position {position}"
            self.token_ids.append(token_id)
        if output.preemption is not None:
            self.preemptions.append(output.preemption)
        if output.finished:
            self.last[engine] = output
        self.is_finished |= output.finish_reason is not None

    def timings(self, engine: str) -> RequestTimings:
        timings = self.last[engine].timings
        assert timings is not None
        return timings


def engine_config(
    checkpoint: Path,
    *,
    block_size: int = 16,
    num_blocks: int = 256,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 256,
    overlap: bool = False,
    transfer: KVTransferConfig | None = None,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(checkpoint), dtype="float32", device="cpu"),
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, overlap=overlap
        ),
        parallel=ParallelConfig(num_threads=1),
        kv_transfer=transfer or KVTransferConfig(transport="loopback"),
    )


class EnginePair:
    """P and D over loopback. Use as a context manager."""

    def __init__(self, prefill: EngineConfig, decode: EngineConfig) -> None:
        self._wake = threading.Event()
        hub = LoopbackHub()
        self.addresses = {
            "prefill": EngineAddress("prefill-0", 1, "prefill-0"),
            "decode": EngineAddress("decode-0", 1, "decode-0"),
        }
        configs = {"prefill": prefill, "decode": decode}
        self.engines: dict[str, EngineCore] = {
            name: build_engine_core(configs[name], address, hub.control(address), self._wake.set, trust=TRUST)
            for name, address in self.addresses.items()
        }
        self.answers: dict[str, Answer] = {}
        self.seen_statuses: set[RequestStatus] = set()

    @classmethod
    def of(
        cls, engines: dict[str, EngineCore], addresses: dict[str, EngineAddress], wake: threading.Event
    ) -> EnginePair:
        """Engines that were built elsewhere, with this event for their on_progress; whoever built them ends them."""
        pair = cls.__new__(cls)
        pair._wake, pair.addresses, pair.engines = wake, addresses, engines
        pair.answers, pair.seen_statuses = {}, set()
        return pair

    def __enter__(self) -> EnginePair:
        return self

    def __exit__(self, *exc: object) -> None:
        for engine in self.engines.values():
            engine.shutdown()

    def hand_over(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        lora: Adapter | None = None,
        *,
        producer_prompt: Sequence[int] | None = None,
    ) -> None:
        """Submit a request to both engines, the consumer first. producer_prompt: by mistake, it gets another one."""
        prompts = {"decode": prompt, "prefill": prompt if producer_prompt is None else producer_prompt}
        self.answers[request_id] = Answer()
        for name, role, peer in (
            ("decode", TransferRole.CONSUMER, "prefill"),
            ("prefill", TransferRole.PRODUCER, "decode"),
        ):
            ticket = KVTransferParams(f"transfer-{request_id}", 0, role, self.addresses[peer])
            self.engines[name].submit(_request(request_id, prompts[name], sampling_params, ticket, lora))
        self._wake.set()

    def submit(
        self,
        engine: str,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        source: PrefixSource | None = None,
        lora: Adapter | None = None,
        *,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """Submit a request to one engine alone. output_token_ids: what another engine generated before"""
        self.answers[request_id] = Answer(list(output_token_ids))
        request = _request(request_id, prompt, params, None, lora)
        request = replace(request, prefix_source=source, output_token_ids=list(output_token_ids))
        self.engines[engine].submit(request)
        self._wake.set()

    def run(self, is_done: Callable[[], bool] | None = None, *, on_step: Callable[[], None] = lambda: None) -> None:
        """Step both engines until every answer is finished (or is_done), then until both are empty."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not (is_done or self._is_over)():
            assert time.monotonic() < deadline_s, f"no end after {_TIMEOUT_S} s: {self.answers}"
            self.step(deadline_s)
            on_step()

    def step(self, deadline_s: float) -> None:
        self._wake.clear()
        results = {name: engine.step() for name, engine in self.engines.items()}
        for name, result in results.items():
            for batch in result.outputs.values():
                for output in batch.outputs:
                    self.answers[output.request_id].take(name, output)
        for engine in self.engines.values():
            engine.scheduler.check_integrity()
            self.seen_statuses |= {request.status for request in engine.scheduler.requests.values()}
        if all(result.is_idle for result in results.values()):
            waits = [engine.seconds_to_next_deadline() for engine in self.engines.values()]
            limits = [wait for wait in (*waits, deadline_s - time.monotonic()) if wait is not None]
            self._wake.wait(max(0.0, min(limits)))

    def abort(self, request_id: str) -> None:
        for engine in self.engines.values():
            engine.abort(request_id)
        self.answers[request_id].is_finished = True
        self._wake.set()

    def num_free_blocks(self) -> dict[str, tuple[int, int]]:
        """By engine: free (or only cached) blocks, all blocks."""
        stats = {name: engine.make_stats() for name, engine in self.engines.items()}
        return {name: (stat.num_free_blocks, stat.num_blocks) for name, stat in stats.items()}

    def assert_whole(self) -> None:
        """Nothing is left of any request in either engine."""
        for name, engine in self.engines.items():
            engine.scheduler.check_integrity()
            free, total = self.num_free_blocks()[name]
            assert free == total, f"{name}: {total - free} blocks are gone"
            assert not engine.scheduler.requests

    def _is_over(self) -> bool:
        is_empty = not any(engine.scheduler.has_requests() for engine in self.engines.values())
        return is_empty and all(answer.is_finished for answer in self.answers.values())


def _request(
    request_id: str,
    prompt: Iterable[int],
    sampling_params: SamplingParams,
    ticket: KVTransferParams | None,
    lora: Adapter | None = None,
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=sampling_params,
        eos_token_ids=(0,),
        arrival_time_s=time.monotonic(),
        lora=lora,
        kv_transfer_params=ticket,
    )
