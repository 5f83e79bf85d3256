"""The life of a request, for every door: Serving.generate() is all of it, embed() and its like that of a vector's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from cluster.api.protos.side_by_side import side_by_side
from cluster.errors import EngineFailed, FieldViolation, InvalidRequest, ModelVersionLeft
from cluster.images.budget import ImageBudget
from cluster.observability.metrics import ServingMetrics
from cluster.observability.status import RequestView
from cluster.observability.stopwatch import Stopwatch
from cluster.parameters.generation import GenerateChunk, GenerateEnd, GenerateRequest, GenerateTimings, Usage
from cluster.requests.migration import MigrationPlanner
from cluster.requests.model_versions import EnginesOfVersion, ModelVersion, ModelVersions
from cluster.requests.overload_control import AdmittedRequest, OverloadControl
from cluster.requests.recovery import Recovery
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.requests.samples import Answers, GenerateManyRequest, Sample, SampleChunk, SharedPrompt, split
from cluster.requests.vector_computing import Vectors, compute_vectors, scores_of
from cluster.routing.engine_connection import EnginePool, EngineRole
from cluster.text.output_processor import OutputProcessor, ProcessedOutput
from cluster.vectors.vector_engines import VectorEngines
from cluster.vectors.vector_processing import process_vectors
from cluster.vectors.vector_requests import (
    ClassifyRequest,
    ClassifyResult,
    EmbedRequest,
    EmbedResult,
    ScoreRequest,
    ScoreResult,
    VectorRequest,
)

_VectorRequestT = TypeVar("_VectorRequestT", EmbedRequest, ClassifyRequest, ScoreRequest)
_RequestT = TypeVar("_RequestT", bound=GenerateRequest | VectorRequest)


class Serving:
    """Owns every request from its arrival to its end: it alone submits and aborts.

    Invariant: when generate(), embed(), classify() or score() is left, for whatever reason, no engine works on the
    request any more, or has been told not to.
    """

    def __init__(
        self,
        versions: ModelVersions,
        engines: EnginePool,
        *,
        max_requests_in_flight: int = 1024,
        max_waiting_tokens: int = 4_000_000,
        max_image_bytes_in_flight: int = 1 << 30,
        retry_delay_s: float = 1.0,
        recovery_policy: RecoveryPolicy | None = None,
        migration_planner: MigrationPlanner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """versions: of the model; at least one

        max_waiting_tokens: of the prompts of requests that have no token yet, together
        retry_delay_s: what a client is told that comes when there are too many, before any has ended
        migration_planner: without it preempted requests stay where they are
        """
        self._versions = versions
        self._engines = engines
        self._vector_engines = VectorEngines(engines)
        self._overload_control = OverloadControl(
            max_requests_in_flight, max_waiting_tokens, unknown_delay_s=retry_delay_s
        )
        self._image_budget = ImageBudget(max_image_bytes_in_flight, retry_delay_s)
        self._clock = clock
        self.metrics = ServingMetrics()
        self._recovery_policy = recovery_policy or RecoveryPolicy()
        self._migration_planner = migration_planner
        self._num_moves_of_ended = 0
        # By tenant and id: no tenant can take, or find out, the ids of others.
        self._in_flight: dict[tuple[str, str], _InFlight] = {}

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Stream a request's output; the last chunk has an end. Closing the generator aborts the request.

        Raises InvalidRequest, ModelNotFound, PermissionDenied, Overloaded, NoEngineAvailable, EngineFailed,
        DeadlineExceeded.
        """
        return self._answer(request, self._admitted(request))

    async def generate_many(self, request: GenerateManyRequest) -> AsyncGenerator[SampleChunk, None]:
        """Stream the samples of several prompts side by side, each as generate() would with its seed.

        Each prompt is prefilled, and handed over, once. All samples are admitted, or none is. One that fails ends the
        others; closing the generator aborts them.
        Raises what generate() raises.
        """
        samples = split(request, self.newest_model().input_processor.limits)
        answers = Answers(request)
        with ExitStack() as admitted:
            streams = [
                self._sample(sample, admitted.enter_context(self._admitted(sample.request))) for sample in samples
            ]
            async with aclosing(side_by_side(streams)) as chunks:
                async for index, chunk in chunks:
                    for answer in answers.take(samples[index], chunk):
                        yield answer

    async def _sample(self, sample: Sample, in_flight: _InFlight) -> AsyncGenerator[GenerateChunk, None]:
        async with sample.prompt.turn():
            await sample.prompt.turns.next()
            answer = self._answer(sample.request, nullcontext(in_flight), sample.prompt)
            async with aclosing(answer) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _answer(
        self,
        request: GenerateRequest,
        admitted: AbstractContextManager[_InFlight],
        prompt: SharedPrompt | None = None,
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Stream a request's output. prompt: if others have the same."""
        with admitted as in_flight:
            while True:
                preferred = None if prompt is None else prompt.model_version
                engines = in_flight.engines = self._choose_version(request, self._engines, preferred)
                try:
                    async with aclosing(self._generate_on(engines, request, in_flight, prompt)) as chunks:
                        first = await anext(chunks)
                        engines.is_bound = True
                        # A request is only resumed with the seed, the model version and the adapter that it began with.
                        yield replace(
                            first,
                            seed=in_flight.seed,
                            model_version=engines.model.version,
                            lora_digest=in_flight.lora_digest,
                            prompt_token_ids=in_flight.prompt_token_ids,
                        )
                        async for chunk in chunks:
                            yield chunk
                    return
                except ModelVersionLeft as left:
                    if engines.is_bound:
                        raise _over(request, left, in_flight.stopwatch.num_tokens) from left
                    request = _begin_again(request, in_flight.deadline_s)

    async def _generate_on(
        self,
        engines: EnginesOfVersion,
        request: GenerateRequest,
        in_flight: _InFlight,
        prompt: SharedPrompt | None,
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Stream a request's output, of one model version. Raises ModelVersionLeft, and what generate() raises."""
        model, router, stopwatch = engines.model, engines.model.router, in_flight.stopwatch
        if prompt is None:
            engine_request = await model.input_processor.process(request, is_alone=len(self._in_flight) == 1)
        else:
            engine_request = await prompt.process(model, request)
            router = prompt.router(router)
        in_flight.num_image_bytes = self._image_budget.exchange(in_flight.num_image_bytes, engine_request)
        allowance = request.caller.allowance
        is_computed = prompt is not None and prompt.is_computed
        num_tokens = 1 if is_computed else len(engine_request.prompt_token_ids) + len(engine_request.output_token_ids)
        if in_flight.recovery is None and not is_computed:
            allowance.charge(len(engine_request.prompt_token_ids))
        in_flight.place.queue(num_tokens, in_flight.time_left_s())
        tokenizer = model.input_processor.tokenizer
        output_processor = OutputProcessor(tokenizer.backend, engine_request, request.sampling)
        turns = None if prompt is None else prompt.turns
        recovery = Recovery(
            router, engines, engine_request, in_flight.deadline_s, self._recovery_policy, self._migration_planner, turns
        )
        in_flight.recovery = recovery
        in_flight.seed = engine_request.sampling_params.seed
        in_flight.prompt_token_ids = engine_request.prompt_token_ids
        in_flight.lora_digest = None if engine_request.lora is None else engine_request.lora.digest
        async with aclosing(recovery.outputs()) as outputs:
            async for output in outputs:
                if prompt is not None:
                    prompt.on_output(recovery.attempt)
                processed = output_processor.process(output)
                stopwatch.count(len(processed.token_ids))
                allowance.charge(len(processed.token_ids))
                if in_flight.place.is_waiting and processed.token_ids:
                    in_flight.place.begin()
                if processed.finish_reason is not None:
                    break
                yield _chunk(processed)
        # The engines are free of the request before its client has read the end.
        end = _end(processed, output_processor.num_output_tokens, recovery, stopwatch)
        stopwatch.end(end)
        yield _chunk(processed, end)

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Give each input's embedding. Cancelling it aborts them all.

        Raises InvalidRequest, ModelNotFound, PermissionDenied, Overloaded, NoEngineAvailable (no engine computes
        prompts), EngineFailed, DeadlineExceeded.
        """
        vectors = await self._compute_vectors(request)
        return EmbedResult(vectors.values, vectors.usage, vectors.model.version)

    async def classify(self, request: ClassifyRequest) -> ClassifyResult:
        """Give what the model's classification head says of each input; otherwise as embed()."""
        vectors = await self._compute_vectors(request)
        facts = vectors.model.input_processor.model.pooling
        labels = () if facts is None else facts.labels
        return ClassifyResult(vectors.values, labels, vectors.usage, vectors.model.version)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Give how well each document answers the query; otherwise as embed()."""
        vectors = await self._compute_vectors(request)
        scores = scores_of(vectors.values, len(request.documents))
        return ScoreResult(scores, vectors.usage, vectors.model.version)

    async def _compute_vectors(self, request: _VectorRequestT) -> Vectors:
        with self._admitted(request) as in_flight:
            while True:
                engines = in_flight.engines = self._choose_version(request, self._vector_engines)
                try:
                    prompts = await process_vectors(engines.model.input_processor, request)
                    num_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts)
                    if not in_flight.place.is_waiting:  # else it begins anew
                        request.caller.allowance.charge(num_tokens)
                    in_flight.place.queue(num_tokens, in_flight.time_left_s())
                    vectors = await compute_vectors(engines, prompts, in_flight.deadline_s, self._recovery_policy)
                except ModelVersionLeft as left:
                    if engines.is_bound:
                        raise _over(request, left, 0) from left
                    request = _begin_again(request, in_flight.deadline_s)
                else:
                    in_flight.place.begin()
                    return vectors

    def _choose_version(
        self, request: _RequestT, engines: EnginePool, preferred: int | None = None
    ) -> EnginesOfVersion:
        """preferred: goes before others if it has engines."""
        if request.model_version:
            return self._engines_of(engines, request.model_version, request.request_id)
        snapshot = engines.snapshot()
        is_there = preferred is not None and preferred in {engine.descriptor.model_version for engine in snapshot}
        model = self._versions.get(preferred) if preferred is not None and is_there else None
        if model is None:
            in_flight = (one.engines.model.version for one in self._in_flight.values() if one.engines is not None)
            model = self._versions.choose(snapshot, in_flight)
        has_begun = isinstance(request, GenerateRequest) and bool(request.output_token_ids)
        return EnginesOfVersion(engines, self._versions, model, is_bound=has_begun)

    def _engines_of(self, engines: EnginePool, version: int, request_id: str) -> EnginesOfVersion:
        """For a request that belongs to this model version already. Raises EngineFailed if it is not served."""
        model = self._versions.get(version)
        if model is not None:
            return EnginesOfVersion(engines, self._versions, model, is_bound=True)
        is_yet_to_come = version > self._versions.newest(()).version
        reason = f"model version {version} is yet to come here" if is_yet_to_come else str(ModelVersionLeft(version))
        raise EngineFailed(request_id, reason, num_new_tokens=0, can_resume=is_yet_to_come)

    def newest_model(self) -> ModelVersion:
        """The newest version of the model that has engines; the newest one if none has."""
        return self._versions.newest(self._engines.snapshot())

    def served_versions(self) -> list[int]:
        """The versions of the model that engines serve now, by number."""
        served = {engine.descriptor.model_version for engine in self._engines.snapshot()}
        return sorted(version for version in served if version in self._versions)

    def served_roles(self) -> frozenset[EngineRole]:
        """What engines do that serve now. One that does both does each."""
        roles = {engine.descriptor.role for engine in self._engines.snapshot()}
        return frozenset(EngineRole) if EngineRole.BOTH in roles else frozenset(roles)

    def next_change_of_engines(self) -> asyncio.Event:
        """An event that is set when engines have come or gone since this call."""
        return self._engines.next_change()

    def model(self, version: int) -> ModelVersion | None:
        """A version of the model, as a chunk names it; None if it has left."""
        return self._versions.get(version)

    @property
    def num_requests_in_flight(self) -> int:
        """Requests that it is working on."""
        return len(self._in_flight)

    @property
    def num_moves(self) -> int:
        """How often another decode engine has taken over a preempted request."""
        return self._num_moves_of_ended + sum(in_flight.num_moves for in_flight in self._in_flight.values())

    def requests_in_flight(self) -> tuple[RequestView, ...]:
        """What it is working on, oldest first, for people to see."""
        return tuple(in_flight.view() for in_flight in self._in_flight.values())

    @contextmanager
    def _admitted(self, request: GenerateRequest | VectorRequest) -> Iterator[_InFlight]:
        deadline_s = None if request.timeout_s is None else asyncio.get_running_loop().time() + request.timeout_s
        request_id, stopwatch = request.request_id, Stopwatch(self._clock, self.metrics)
        key = request.caller.tenant, request_id
        with stopwatch.counting_the_end(), self._overload_control.enter() as place, request.caller.allowance.used():
            if key in self._in_flight:
                allowed = "one that no request in flight has"
                raise InvalidRequest(FieldViolation("request_id", repr(request_id), allowed))
            in_flight = _InFlight(request_id, key[0], time.time(), stopwatch, place, deadline_s)
            self._in_flight[key] = in_flight
            try:
                yield in_flight
            finally:
                self._num_moves_of_ended += in_flight.num_moves
                self._image_budget.release(in_flight.num_image_bytes)
                del self._in_flight[key]


@dataclass(slots=True)
class _InFlight:
    """deadline_s: on the event loop's clock. seed, lora_digest, prompt_token_ids, recovery: once that is processed."""

    request_id: str
    tenant: str
    arrived_at_s: float
    stopwatch: Stopwatch
    place: AdmittedRequest
    deadline_s: float | None
    engines: EnginesOfVersion | None = None
    seed: int | None = None
    lora_digest: str | None = None
    prompt_token_ids: list[int] | None = None
    recovery: Recovery | None = None
    num_image_bytes: int = 0

    @property
    def num_moves(self) -> int:
        return 0 if self.recovery is None else self.recovery.num_moves

    def time_left_s(self) -> float | None:
        return None if self.deadline_s is None else self.deadline_s - asyncio.get_running_loop().time()

    def view(self) -> RequestView:
        model_version = 0 if self.engines is None else self.engines.model.version
        attempt = None if self.recovery is None else self.recovery.attempt
        if self.recovery is None or attempt is None:
            # One that wants vectors has no recovery of its own: each of its prompts has.
            phase = "prefill" if self.place.is_waiting else "admitted"
            return RequestView(
                self.request_id, self.arrived_at_s, phase, tenant=self.tenant, model_version=model_version
            )
        prefill, decode = attempt.prefill_report, attempt.decode_report
        return RequestView(
            request_id=self.request_id,
            tenant=self.tenant,
            arrived_at_s=self.arrived_at_s,
            phase="decode" if attempt.num_new_tokens else "prefill",
            prefill_engine="" if prefill is None else prefill.engine_id,
            decode_engine=decode.engine_id,
            num_prompt_tokens=self.recovery.num_prompt_tokens,
            num_output_tokens=len(attempt.token_ids),
            attempt=self.recovery.num_attempts,
            num_moves=self.recovery.num_moves,
            model_version=model_version,
        )


def _over(request: GenerateRequest | VectorRequest, left: ModelVersionLeft, num_new_tokens: int) -> EngineFailed:
    return EngineFailed(request.request_id, str(left), num_new_tokens=num_new_tokens, can_resume=False)


def _begin_again(request: _RequestT, deadline_s: float | None) -> _RequestT:
    """A request of which its client knows nothing yet, once more: what has passed of its time stays passed."""
    if deadline_s is None:
        return request
    return replace(request, timeout_s=max(0.0, deadline_s - asyncio.get_running_loop().time()))


def _chunk(processed: ProcessedOutput, end: GenerateEnd | None = None) -> GenerateChunk:
    return GenerateChunk(
        text=processed.text,
        token_ids=processed.token_ids,
        first_position=processed.first_position,
        logprobs=processed.logprobs,
        prompt_logprobs=processed.prompt_logprobs,
        end=end,
    )


def _end(processed: ProcessedOutput, num_output_tokens: int, recovery: Recovery, stopwatch: Stopwatch) -> GenerateEnd:
    assert processed.finish_reason is not None
    attempt = recovery.attempt
    assert attempt is not None, "somebody has ended it"
    return GenerateEnd(
        finish_reason=processed.finish_reason,
        stop_reason=processed.stop_reason,
        usage=Usage(recovery.num_prompt_tokens, num_output_tokens, recovery.num_cached_tokens),
        timings=GenerateTimings(stopwatch.ttft_s, stopwatch.tpot_s, attempt.prefill_report, attempt.decode_report),
    )
