"""Serving.generate() is all of a request, from its arrival to its end, for gRPC and HTTP; embed() and its like, too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

from cluster.api.protos.side_by_side import side_by_side
from cluster.errors import EngineFailed, FieldViolation, InvalidRequest, ModelVersionLeft
from cluster.images.image_budget import ImageBudget
from cluster.observability.metrics import ServingMetrics
from cluster.observability.status import RequestView
from cluster.observability.stopwatch import Stopwatch
from cluster.parameters.generation import GenerateChunk, GenerateRequest
from cluster.requests.in_flight import InFlight
from cluster.requests.ledger import open_ledger
from cluster.requests.migration import MigrationPlanner
from cluster.requests.model_versions import EnginesOfVersion, ModelVersion, ModelVersions
from cluster.requests.overload_control import OverloadControl
from cluster.requests.prepared_request import PreparedRequest
from cluster.requests.recovery import Recovery
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.requests.samples import Answers, GenerateManyRequest, Sample, SampleChunk, SharedPrompt, split
from cluster.requests.vector_computing import Vectors, compute_vectors, scores_of
from cluster.routing.engine_connection import EnginePool, EngineRole
from cluster.settings.ingress import IngressConfig
from cluster.text.output_processor import OutputProcessor
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
        settings: IngressConfig,
        *,
        retry_delay_s: float = 1.0,
        migration_planner: MigrationPlanner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """versions: of the model; at least one

        settings: the limits of requests, and of their recovery
        retry_delay_s: what a client is told that comes when there are too many, before any has ended
        migration_planner: without it preempted requests stay where they are
        """
        self._versions = versions
        self._engines = engines
        self._vector_engines = VectorEngines(engines)
        self._overload_control = OverloadControl(
            settings.max_requests_in_flight, settings.max_waiting_tokens, unknown_delay_s=retry_delay_s
        )
        self._image_budget = ImageBudget(settings.images.max_input_in_flight_mib << 20, retry_delay_s)
        self._clock = clock
        self.metrics = ServingMetrics()
        self._recovery_policy = RecoveryPolicy(settings.max_attempts, settings.recovery_timeout_s)
        self._migration_planner = migration_planner
        self._num_moves_of_ended = 0
        # By tenant and id: no tenant can take, or find out, the ids of others.
        self._in_flight: dict[tuple[str, str], InFlight] = {}

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Stream a request's output; the last chunk has an end. Closing the generator aborts the request.

        Raises InvalidRequest, ModelNotFound, PermissionDenied, Overloaded, NoEngineAvailable, EngineFailed,
        DeadlineExceeded.
        """
        return self._generate(request, self._admitted(request))

    async def _generate(
        self,
        request: GenerateRequest,
        admitted: AbstractContextManager[InFlight],
        prompt: SharedPrompt | None = None,
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Stream a request's output. prompt: if other samples have the same"""
        with admitted as in_flight:
            while True:
                prepared = await self._prepare(request, in_flight, prompt)
                try:
                    async with aclosing(prepared.recovery.outputs()) as outputs:
                        async for output in outputs:
                            processed = prepared.take(output)
                            if processed.finish_reason is not None:
                                break
                            yield prepared.chunk(processed)
                except ModelVersionLeft as left:
                    request = _begin_again(request, in_flight, left)
                else:
                    # The engines are free of the request before its client has read the end.
                    yield prepared.chunk(processed, prepared.end(processed))
                    return

    async def _prepare(
        self, request: GenerateRequest, in_flight: InFlight, prompt: SharedPrompt | None
    ) -> PreparedRequest:
        """Choose the model version, tokenize, and charge what the request takes."""
        preferred = None if prompt is None else prompt.model_version
        engines = in_flight.engines = self._choose_version(request, self._engines, preferred)
        router, turns = engines.model.router, None
        if prompt is None:
            processor = engines.model.input_processor
            engine_request = await processor.process(request, is_alone=len(self._in_flight) == 1)
        else:
            engine_request = await prompt.process(engines.model, request)
            router, turns = prompt.router(router), prompt.turns
        in_flight.ledger.take_images(engine_request)
        num_prompt_tokens = len(engine_request.prompt_token_ids)
        if prompt is not None and prompt.is_computed:
            in_flight.ledger.take_prompt(1, num_charged_tokens=0)
        else:
            num_tokens = num_prompt_tokens + len(engine_request.output_token_ids)
            in_flight.ledger.take_prompt(num_tokens, num_prompt_tokens)
        in_flight.recovery = Recovery(
            router,
            engines,
            engine_request,
            in_flight.ledger.deadline_s,
            self._recovery_policy,
            self._migration_planner,
            turns,
        )
        tokenizer = engines.model.input_processor.tokenizer
        output_processor = OutputProcessor(tokenizer.backend, engine_request, request.sampling)
        return PreparedRequest(engines, engine_request, in_flight.recovery, output_processor, in_flight, prompt)

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

    async def _sample(self, sample: Sample, in_flight: InFlight) -> AsyncGenerator[GenerateChunk, None]:
        async with sample.prompt.turn():
            await sample.prompt.turns.next()
            answer = self._generate(sample.request, nullcontext(in_flight), sample.prompt)
            async with aclosing(answer) as chunks:
                async for chunk in chunks:
                    yield chunk

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
            ledger = in_flight.ledger
            while True:
                engines = in_flight.engines = self._choose_version(request, self._vector_engines)
                prompts = await process_vectors(engines.model.input_processor, request)
                num_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts)
                ledger.take_prompt(num_tokens, num_tokens)
                try:
                    vectors = await compute_vectors(engines, prompts, ledger.deadline_s, self._recovery_policy)
                except ModelVersionLeft as left:
                    request = _begin_again(request, in_flight, left)
                else:
                    ledger.end_wait()
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
        """The roles of the engines that serve now. One that does both has each."""
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
        """The requests that it works on, oldest first, for people to see."""
        return tuple(in_flight.view() for in_flight in self._in_flight.values())

    @contextmanager
    def _admitted(self, request: GenerateRequest | VectorRequest) -> Iterator[InFlight]:
        caller, request_id, stopwatch = request.caller, request.request_id, Stopwatch(self._clock, self.metrics)
        key = caller.tenant, request_id
        with (
            stopwatch.counting_the_end(),
            open_ledger(self._overload_control, self._image_budget, caller.allowance, request.timeout_s) as ledger,
        ):
            if key in self._in_flight:
                allowed = "one that no request in flight has"
                raise InvalidRequest(FieldViolation("request_id", repr(request_id), allowed))
            in_flight = self._in_flight[key] = InFlight(request_id, caller.tenant, time.time(), stopwatch, ledger)
            try:
                yield in_flight
            finally:
                self._num_moves_of_ended += in_flight.num_moves
                del self._in_flight[key]


def _begin_again(request: _RequestT, in_flight: InFlight, left: ModelVersionLeft) -> _RequestT:
    """Return the request for another model version: what has passed of its time stays passed.

    Raises EngineFailed if its client has been told something of this version.
    """
    if in_flight.engines is not None and in_flight.engines.is_bound:
        num_new_tokens = in_flight.stopwatch.num_tokens
        raise EngineFailed(request.request_id, str(left), num_new_tokens=num_new_tokens, can_resume=False) from left
    time_left_s = in_flight.ledger.time_left_s()
    return request if time_left_s is None else replace(request, timeout_s=max(0.0, time_left_s))
