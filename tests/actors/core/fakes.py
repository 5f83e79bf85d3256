"""A worker that knows what every slot of the KV cache must hold, and a connector that does as it is told.

The fake model's KV of a token is a digest of the prefix that ends with it, and the token that it samples is a function
of the whole prefix. So a wrong block, a block that was given away too early or a skipped token is seen at once, and a
request's output is the same however it was scheduled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.core.outputs.engine_core_outputs import EngineCoreOutput, EngineCoreOutputs
from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.multimodal import MultiModalFeature
from actors.core.requests.sampling_params import StructuredOutputParams
from actors.core.requests.structured_output import GrammarFailure, GrammarStats
from actors.core.scheduler import Scheduler
from actors.core.vllm_view import scheduled_cached_reqs
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import FinishedReceiving, KVConnectorOutput, LoadOutcome, ReadyToPrefill, ReceivedKV
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerFinish, ProducerProgress, Reservation
from kv_transfer.params import KVTransferParams, TransferRole
from tests.actors.core.builders import BLOCK_SIZE

VOCABULARY_SIZE = 24


def prefix_digests(token_ids: Sequence[int]) -> list[int]:
    """The KV of each token: a digest of the tokens up to it."""
    digests, digest = [], 7
    for token_id in token_ids:
        digest = (digest * 1_000_003 + token_id * 7919 + 1) % 2_147_483_647
        digests.append(digest)
    return digests


def state_after(token_ids: Sequence[int]) -> int:
    """The recurrent state after these tokens: unlike the KV of any of them."""
    return -1_000_000 - prefix_digests(token_ids)[-1]


def next_token(token_ids: Sequence[int]) -> int:
    """The token that the fake model samples after a prefix; 0 is EOS."""
    return prefix_digests(token_ids)[-1] % VOCABULARY_SIZE


@dataclass
class FakeWorker:
    """Executes steps on slots[block_id * block_size + offset], the KV of one token each, or a part of a state."""

    num_blocks: int
    block_size: int
    slots: list[int] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    block_ids: dict[str, list[int]] = field(default_factory=dict)
    num_prompt_tokens: dict[str, int] = field(default_factory=dict)
    features: dict[str, tuple[MultiModalFeature, ...]] = field(default_factory=dict)
    encoded: set[str] = field(default_factory=set)
    num_encoded: int = 0
    num_copied: int = 0
    pooling: set[str] = field(default_factory=set)
    state_ids: dict[str, list[int]] = field(default_factory=dict)
    """The blocks of each request's recurrent state."""

    def __post_init__(self) -> None:
        self.slots = [-1] * (self.num_blocks * self.block_size)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._learn(output)
        req_ids = list(output.num_scheduled_tokens)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = scheduled_cached_reqs(output)
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        assert set(starts) == set(req_ids)
        self._encode(output, starts)
        self._copy(output)
        drafts = output.scheduled_spec_decode_tokens
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            tokens = self.tokens[request_id] + drafts.get(request_id, [])
            self.write(self.block_ids[request_id], tokens, starts[request_id], num_tokens)
            if starts[request_id]:
                self.check_state(self.state_ids[request_id], tokens[: starts[request_id]])
            self.write_state(self.state_ids[request_id], tokens[: starts[request_id] + num_tokens])
        sampled = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            num_computed_tokens = starts[request_id] + num_tokens
            sampled.append(self._sample(request_id, num_computed_tokens, drafts.get(request_id, [])))
        vectors = {
            request_id: [float(starts[request_id] + num_tokens)]
            for request_id, num_tokens in output.num_scheduled_tokens.items()
            if request_id in self.pooling and starts[request_id] + num_tokens == len(self.tokens[request_id])
        }
        return ModelRunnerOutput(req_ids, sampled, pooler_output=vectors)

    def _copy(self, output: SchedulerOutput) -> None:
        sources = {copy.source for copy in output.block_copies}
        destinations = {copy.destination for copy in output.block_copies}
        assert not sources & destinations, "the copies of a step depend on their order"
        assert len(destinations) == len(output.block_copies), "two copies go to one block"
        for copy in output.block_copies:
            begin, size = copy.source * self.block_size, self.block_size
            self.slots[copy.destination * size : (copy.destination + 1) * size] = self.slots[begin : begin + size]
        self.num_copied += len(output.block_copies)

    def _encode(self, output: SchedulerOutput, starts: dict[str, int]) -> None:
        """Encode what the step says; every item that a chunk touches has to be there then."""
        self.encoded -= set(output.free_encoder_mm_hashes)
        for request_id, input_ids in output.scheduled_encoder_inputs.items():
            assert request_id in output.num_scheduled_tokens
            self.encoded |= {self.features[request_id][input_id].encoder_key for input_id in input_ids}
            self.num_encoded += len(input_ids)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            for feature in self.features[request_id]:
                if feature.offset < starts[request_id] + num_tokens and feature.end > starts[request_id]:
                    assert feature.encoder_key in self.encoded, f"{request_id} reads an embedding that is not there"

    def _learn(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self.tokens.pop(request_id, None)
            self.block_ids.pop(request_id, None)
            self.state_ids.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.tokens, "the worker knows it already"
            self.tokens[new.req_id] = new.prompt_token_ids + new.output_token_ids
            self.block_ids[new.req_id] = list(new.block_ids[0])
            self.state_ids[new.req_id] = [block_id for ids in new.block_ids[1:] for block_id in ids]
            self.num_prompt_tokens[new.req_id] = len(new.prompt_token_ids)
            self.features[new.req_id] = new.mm_features
            if new.pooling_params is not None:
                self.pooling.add(new.req_id)
        cached = scheduled_cached_reqs(output)
        for request_id, is_resumed, block_ids, num_output_tokens in zip(
            cached.req_ids,
            cached.resumed_from_preemption,
            cached.new_block_ids,
            cached.num_output_tokens,
            strict=True,
        ):
            num_tokens = self.num_prompt_tokens[request_id] + num_output_tokens
            if is_resumed:
                # What was sampled while the request was being preempted is void.
                del self.tokens[request_id][num_tokens:]
                self.block_ids[request_id] = list(block_ids[0])
                self.state_ids[request_id] = [block_id for ids in block_ids[1:] for block_id in ids]
            else:
                self.block_ids[request_id] += block_ids[0]
            assert len(self.tokens[request_id]) == num_tokens

    def write(self, block_ids: Sequence[int], token_ids: Sequence[int], start: int, num_tokens: int) -> None:
        digests = prefix_digests(token_ids)
        for position in range(start, start + num_tokens):
            self.slots[self._slot(block_ids, position)] = digests[position]

    def check(self, block_ids: Sequence[int], token_ids: Sequence[int], num_tokens: int) -> None:
        """Every slot of the first num_tokens tokens must hold what the model would have computed."""
        digests = prefix_digests(token_ids)
        for position in range(num_tokens):
            assert self.slots[self._slot(block_ids, position)] == digests[position], f"wrong KV at {position}"

    def write_state(self, state_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Replace a request's state by the one after these tokens."""
        for block_id in state_ids:
            self.fill(block_id, state_after(token_ids))

    def fill(self, block_id: int, value: int) -> None:
        """Write one value into all of a block."""
        self.slots[block_id * self.block_size : (block_id + 1) * self.block_size] = [value] * self.block_size

    def check_state(self, state_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """The slot must hold the state after these tokens, all of it."""
        for block_id in state_ids:
            held = self.slots[block_id * self.block_size : (block_id + 1) * self.block_size]
            assert held == [state_after(token_ids)] * self.block_size, f"wrong state in block {block_id}"

    def _slot(self, block_ids: Sequence[int], position: int) -> int:
        return block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _sample(self, request_id: str, num_computed_tokens: int, drafts: Sequence[int]) -> list[int]:
        """The drafts that are right and the token after them; nothing while the prompt is not through."""
        token_ids = self.tokens[request_id]
        num_known = min(num_computed_tokens, len(token_ids))
        self.check(self.block_ids[request_id], token_ids, num_known)
        if num_known < len(token_ids) or request_id in self.pooling:
            return []
        num_earlier = len(token_ids)
        for draft in (*drafts, None):
            token_ids.append(next_token(token_ids))
            if token_ids[-1] != draft:
                break
        return token_ids[num_earlier:]


@dataclass
class FakeConnector:
    """The scheduler side of a connector. Tests say when READY is in and how loads end."""

    max_reserved_requests: int = 64
    roles: dict[str, TransferRole] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    loading: dict[str, Reservation] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    cancelled: list[str] = field(default_factory=list)
    finished: list[tuple[str, ProducerEnd, int | None]] = field(default_factory=list)
    metadata: list[KVConnectorMetadata] = field(default_factory=list)
    _params: dict[str, KVTransferParams] = field(default_factory=dict)
    _reservations: list[Reservation] = field(default_factory=list)
    _finishes: list[ProducerFinish] = field(default_factory=list)

    def on_new_request(self, request_id: str, params: KVTransferParams, num_prompt_tokens: int) -> None:
        self.roles[request_id] = params.role
        self.num_tokens[request_id] = num_prompt_tokens
        self._params[request_id] = params

    def get_num_new_matched_tokens(self, request_id: str, num_local_tokens: int) -> int | None:
        if self.roles[request_id] is TransferRole.PRODUCER:
            return 0 if request_id in self.ready else None
        if len(self.loading) >= self.max_reserved_requests:
            return None
        return self.num_tokens[request_id] - num_local_tokens

    def update_state_after_alloc(self, request_id: str, block_ids: Sequence[int], num_local_tokens: int) -> None:
        reservation = Reservation(
            TransferKey.of_handoff(request_id),
            self._params[request_id],
            block_ids=tuple(block_ids),
            num_local_blocks=num_local_tokens // BLOCK_SIZE,
            num_prompt_tokens=self.num_tokens[request_id],
        )
        self.loading[request_id] = reservation
        self._reservations.append(reservation)

    def build_connector_meta(self, progress: Sequence[ProducerProgress]) -> KVConnectorMetadata:
        self.begun.update(entry.key.name for entry in progress)
        metadata = KVConnectorMetadata(
            reservations=tuple(self._reservations),
            progress=tuple(progress),
            producer_finishes=tuple(self._finishes),
            consumer_cancels=tuple(map(TransferKey.of_handoff, self.cancelled)),
        )
        self._reservations, self._finishes, self.cancelled = [], [], []
        self.metadata.append(metadata)
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for report in output.reports:
            match report:
                case ReadyToPrefill(key):
                    self.ready.add(key.name)
                case FinishedReceiving(key):
                    self.loading.pop(key.name, None)

    def request_finished(self, request_id: str, end: ProducerEnd, first_token_id: int | None = None) -> bool:
        self.finished.append((request_id, end, first_token_id))
        if self.roles[request_id] is TransferRole.PRODUCER:
            self._finishes.append(ProducerFinish(TransferKey.of_handoff(request_id), end, first_token_id))
            return request_id in self.begun
        if request_id in self.loading:
            self.cancelled.append(request_id)
            return True
        return False

    def cancel_load(self, request_id: str) -> None:
        self.cancelled.append(request_id)


@dataclass
class FakeGrammars:
    """Tests say when a grammar is ready, and which token none allows."""

    forbidden: int | None = None
    compiling: dict[str, StructuredOutputParams] = field(default_factory=dict)
    compiled: dict[str, GrammarFailure | None] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)

    def start_compiling(self, request_id: str, params: StructuredOutputParams, output_token_ids: Sequence[int]) -> None:
        self.compiling[request_id] = params
        self.tokens[request_id] = list(output_token_ids)

    def take_compiled(self) -> dict[str, GrammarFailure | None]:
        compiled, self.compiled = self.compiled, {}
        return compiled

    def accept_tokens(self, request_id: str, token_ids: Sequence[int]) -> str | None:
        self.tokens[request_id] += token_ids
        return "the grammar does not allow it" if self.forbidden in token_ids else None

    def count_allowed(self, request_id: str, token_ids: Sequence[int]) -> int:
        assert request_id in self.tokens
        return next((place for place, token_id in enumerate(token_ids) if token_id == self.forbidden), len(token_ids))

    def fill_bitmask(self, request_ids: Iterable[str], drafts: Mapping[str, Sequence[int]] | None = None) -> np.ndarray:
        rows = [
            [len(self.tokens[request_id]) + num_drafts]
            for request_id in request_ids
            for num_drafts in range(len((drafts or {}).get(request_id, ())) + 1)
        ]
        return np.array(rows, dtype=np.int32)

    def release(self, request_id: str) -> None:
        self.released.append(request_id)

    def make_stats(self) -> GrammarStats:
        return GrammarStats(num_compiled=len(self.released))

    def shutdown(self) -> None:
        self.compiling.clear()


def loaded(num_tokens: int, first_token_id: int) -> ReceivedKV:
    return ReceivedKV(LoadOutcome.LOADED, num_valid_tokens=num_tokens, first_token_id=first_token_id)


@dataclass
class Driver:
    """Steps a scheduler with a fake worker."""

    scheduler: Scheduler
    worker: FakeWorker = field(init=False)
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    steps: list[SchedulerOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_blocks = self.scheduler.kv_cache_manager.block_pool.num_blocks
        self.worker = FakeWorker(num_blocks, self.scheduler.block_size)

    def step(self, transfers: KVConnectorOutput | None = None) -> dict[int, EngineCoreOutputs]:
        """Schedule, execute, update; the connector's worker side reports transfers."""
        scheduler_output = self.scheduler.schedule()
        self.steps.append(scheduler_output)
        model_output = self.worker.execute(scheduler_output)
        model_output.kv_connector_output = transfers
        outputs = self.scheduler.update_from_output(scheduler_output, model_output)
        self.outputs += [output for client in outputs.values() for output in client.outputs]
        self.scheduler.check_integrity()
        return outputs

    def run(self, max_steps: int = 500) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"unfinished after {max_steps} steps: {sorted(self.scheduler.requests)}")

    def run_until_finished(self, request_id: str, max_steps: int = 200) -> None:
        """Step until a request has ended."""
        for _ in range(max_steps):
            if request_id not in self.scheduler.requests:
                return
            self.step()
        raise AssertionError(f"{request_id} unfinished after {max_steps} steps")

    def run_until_preempted(self, max_steps: int = 200) -> None:
        """Step until a step has preempted."""
        for _ in range(max_steps):
            self.step()
            if self.steps[-1].preempted_req_ids:
                return
        raise AssertionError(f"nothing was preempted in {max_steps} steps")

    def scheduled(self) -> dict[str, int]:
        """The number of tokens that the last step computed, by request."""
        return self.steps[-1].num_scheduled_tokens

    def tokens_of(self, request_id: str) -> list[int]:
        """All tokens that a request's client got, checked to be without gap."""
        token_ids: list[int] = []
        first = None
        for output in self.outputs:
            if output.request_id == request_id and output.new_token_ids:
                first = output.first_position if first is None else first
                assert output.first_position == first + len(token_ids), "a gap or a token twice"
                token_ids += output.new_token_ids
        return token_ids

    def end_of(self, request_id: str) -> EngineCoreOutput:
        """The one output that ended the request."""
        [end] = [output for output in self.outputs if output.request_id == request_id and output.finished]
        return end


def reference_tokens(prompt: Sequence[int], max_tokens: int, eos: int = 0) -> list[int]:
    """Return what a request's output must be, from the fake model alone."""
    token_ids = list(prompt)
    while len(token_ids) - len(prompt) < max_tokens:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] == eos:
            break
    return token_ids[len(prompt) :]


def describe(scheduler: Scheduler) -> str:
    """Describe what stands still, for a failing test: blocks, look-ahead, each request's status, part and tokens."""
    pool = scheduler.kv_cache_manager.block_pool
    config = scheduler.config
    settings = f"lookahead {config.num_lookahead_tokens}, overlap {config.overlap}, {config.policy}"
    lines = [f"{pool.num_free_blocks} of {pool.num_blocks} blocks free, {settings}"]
    for request in scheduler.requests.values():
        part = "pooling" if request.pooling_params else request.transfer_role
        lines.append(
            f"{request.request_id} {request.status.name} {part}: {request.num_computed_tokens} of {request.num_tokens} "
            f"tokens computed, {request.max_num_tokens} at most, {request.num_preemptions} preemptions"
        )
    return "; ".join(lines)
