"""Serves requests: generate() takes one from its arrival to its end, for gRPC and HTTP.

embed(), classify() and score() do the same for requests for vectors.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

from cluster.api.protos.side_by_side import side_by_side
from cluster.errors import EngineFailed, FieldViolation, InvalidRequest, ModelVersionLeft
from cluster.images.image_budget import ImageBudget
from cluster.observability.load_counts import RequestLoad
from cluster.observability.metrics import ServingMetrics
from cluster.observability.record_store import RecordStore
from cluster.observability.record_writer import RecordWriter
from cluster.observability.request_records import RecordQuery, RequestRecords
from cluster.observability.status import RequestView
from cluster.observability.stopwatch import Stopwatch
from cluster.observability.trace_writing.request_tracer import RequestTracer
from cluster.observability.tracing.request_tracing import RequestTracing
from cluster.parameters.generation import ChatPrompt, GenerateChunk, GenerateRequest
from cluster.planning.offered_load import OfferedLoad
from cluster.requests.in_flight import InFlight
from cluster.requests.ledger import open_ledger
from cluster.requests.model_versions import EnginesOfVersion, ModelVersion, ModelVersions
from cluster.requests.moves.migration import MigrationPlanner
from cluster.requests.moves.rerouting import Rerouting
from cluster.requests.overload_control import OverloadControl
from cluster.requests.prepared_request import PreparedRequest
from cluster.requests.recovery import Recovery
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.requests.samples import Answers, GenerateManyRequest, Sample, SampleChunk, SharedPrompt, split
from cluster.requests.vector_computing import Vectors, compute_vectors, scores_of
from cluster.routing.engine_connection import EnginePool, EngineRole
from cluster.routing.request_record import RequestRecord
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
    """Owns every request of an ingress from its arrival to its end; nothing else submits or aborts requests.

    Invariant: when generate(), embed(), classify() or score() is left, for whatever reason, every engine has finished
    the request or was told to abort it.
    """

    def __init__(
        self,
        versions: ModelVersions,
        engines: EnginePool,
        settings: IngressConfig,
        *,
        retry_delay_s: float = 1.0,
        migration_planner: MigrationPlanner | None = None,
        rerouting: Rerouting | None = None,
        ingress: str = "",
        offered: OfferedLoad | None = None,
        clock: Callable[[], float] = time.monotonic,
        request_tracer: RequestTracer | None = None,
        tracing: RequestTracing | None = None,
    ) -> None:
        """Take no request yet.

        versions:          the model versions that are loaded; at least one
        engines:           the engines that serve
        settings:          the limits of requests, and of their recovery
        retry_delay_s:     the delay that a refused client is told before any request has ended
        migration_planner: chooses where preempted requests migrate to; None: they stay where they are
        rerouting:         looks at requests whose prompts wait; None: they stay where they are
        ingress:           the name of the ingress, for the records of its requests
        offered:           gets what was offered, for the planner; None if there is no planner
        clock:             monotonic seconds
        request_tracer:    writes the request trace; None: there is none
        tracing:           makes spans for OpenTelemetry; None: nothing does
        """
        self._versions = versions
        self._engines = engines
        self._vector_engines = VectorEngines(engines)
        self._overload_control = OverloadControl(
            settings.max_requests_in_flight, settings.max_waiting_tokens, unknown_delay_s=retry_delay_s
        )
        self._image_budget = ImageBudget(settings.images.max_input_in_flight_mib << 20, retry_delay_s)
        self._clock = clock
        self._tracing = tracing
        self.records = RequestRecords(
            ingress,
            RecordStore(settings.max_request_records, settings.request_records_mib << 20),
            offered=offered,
            tracer=request_tracer,
        )
        self.metrics = ServingMetrics(self.records.summary)
        self.metrics.model_name = versions.newest(()).input_processor.model.name
        self._recovery_policy = RecoveryPolicy(settings.max_attempts, settings.recovery_timeout_s)
        self._migration_planner = migration_planner
        self._rerouting = rerouting
        self._num_migrations_of_ended = 0
        # The key includes the tenant, so that tenants cannot block or discover each other's request ids.
        self._in_flight: dict[tuple[str, str], InFlight] = {}

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Stream a request's output; `end` of the last chunk is set. Closing the generator aborts the request.

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
        """Stream a request's output.

        admitted: admits the request when it is entered
        prompt:   the prompt that the request shares with other samples; None if it shares none
        """
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
                    # The attempt is closed by now, so engines have freed the request when the client reads this chunk.
                    yield prepared.chunk(processed, prepared.end(processed))
                    return

    async def _prepare(
        self, request: GenerateRequest, in_flight: InFlight, prompt: SharedPrompt | None
    ) -> PreparedRequest:
        """Choose the model version, tokenize the prompt, and charge what the request uses.

        Raises InvalidRequest, ModelNotFound, PermissionDenied, Overloaded, DeadlineUnreachable, or EngineFailed if the
        request's model version is not served.
        """
        preferred = None if prompt is None else prompt.model_version
        engines = in_flight.engines = self._choose_version(request, self._engines, preferred)
        router, turns = engines.model.router, None
        if prompt is None:
            processor = engines.model.input_processor
            engine_request = await processor.process(request, is_alone=len(self._in_flight) == 1)
        else:
            engine_request = await prompt.process(engines.model, request)
            router, turns = prompt.router(router), prompt.turns
        if in_flight.record.traceparent is not None:
            engine_request = replace(engine_request, traceparent=in_flight.record.traceparent)
        if engine_request.lora is not None:
            in_flight.stopwatch.need(engine_request.lora.name)
        in_flight.ledger.take_images(engine_request)
        in_flight.record.request, num_prompt_tokens = engine_request, len(engine_request.prompt_token_ids)
        self.records.size(in_flight.record, num_prompt_tokens)
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
            # Samples follow the engine that has their prompt.
            self._rerouting if prompt is None else None,
            record=in_flight.record,
        )
        in_flight.record.model_version, in_flight.record.slo = engines.model.version, engine_request.slo
        model = engines.model.input_processor.model
        in_flight.record.model = model.name if engine_request.lora is None else engine_request.lora.name
        tokenizer = engines.model.input_processor.tokenizer
        output_processor = OutputProcessor(tokenizer.backend, engine_request, request.sampling)
        return PreparedRequest(engines, engine_request, in_flight.recovery, output_processor, in_flight, prompt)

    async def generate_many(self, request: GenerateManyRequest) -> AsyncGenerator[SampleChunk, None]:
        """Stream the samples of several prompts side by side, each as generate() would with the sample's seed.

        Each prompt is prefilled, and handed over, once. Either all samples are admitted or none is. If a sample fails,
        the others are aborted; closing the generator aborts all of them.
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
        """Compute the embedding of each input. Cancelling the call aborts all inputs.

        Raises InvalidRequest, ModelNotFound, PermissionDenied, Overloaded, NoEngineAvailable (no engine computes
        prompts), EngineFailed, DeadlineExceeded.
        """
        vectors = await self._compute_vectors(request)
        return EmbedResult(vectors.values, vectors.usage, vectors.model.version)

    async def classify(self, request: ClassifyRequest) -> ClassifyResult:
        """Compute the scores of the model's classes for each input. Cancellation and errors are those of embed()."""
        vectors = await self._compute_vectors(request)
        facts = vectors.model.input_processor.model.pooling
        labels = () if facts is None else facts.labels
        return ClassifyResult(vectors.values, labels, vectors.usage, vectors.model.version)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Compute how well each document answers the query. Cancellation and errors are those of embed()."""
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
        """Choose the model version of a request.

        preferred: a version that is chosen if engines of it serve
        """
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
        """Return the engines for a request that belongs to a model version. Raises EngineFailed if it is not loaded."""
        model = self._versions.get(version)
        if model is not None:
            return EnginesOfVersion(engines, self._versions, model, is_bound=True)
        is_yet_to_come = version > self._versions.newest(()).version
        reason = f"model version {version} is not loaded yet" if is_yet_to_come else str(ModelVersionLeft(version))
        raise EngineFailed(request_id, reason, num_new_tokens=0, can_resume=is_yet_to_come)

    def newest_model(self) -> ModelVersion:
        """Return the newest version of the model that has engines; the newest loaded version if none has."""
        return self._versions.newest(self._engines.snapshot())

    def served_versions(self) -> list[int]:
        """Return the numbers of the model versions that engines serve now, in ascending order."""
        served = {engine.descriptor.model_version for engine in self._engines.snapshot()}
        return sorted(version for version in served if version in self._versions)

    def served_roles(self) -> frozenset[EngineRole]:
        """Return the roles of the engines that serve now; every role if an engine of role `both` serves."""
        roles = {engine.descriptor.role for engine in self._engines.snapshot()}
        return frozenset(EngineRole) if EngineRole.BOTH in roles else frozenset(roles)

    def next_change_of_engines(self) -> asyncio.Event:
        """Return an event that is set once engines have come or gone after this call."""
        return self._engines.next_change()

    def model(self, version: int) -> ModelVersion | None:
        """Return a version of the model by the number that chunks have; None if it is not loaded."""
        return self._versions.get(version)

    @property
    def num_requests_in_flight(self) -> int:
        """How many requests are admitted and have not ended."""
        return len(self._in_flight)

    @property
    def num_migrations(self) -> int:
        """How often another decode engine has taken over a preempted request."""
        return self._num_migrations_of_ended + sum(in_flight.num_migrations for in_flight in self._in_flight.values())

    def requests_in_flight(self, most: int | None = None) -> tuple[RequestView, ...]:
        """Describe the requests in flight, oldest first. most: how many of them; None: all"""
        return tuple(in_flight.view() for in_flight in itertools.islice(self._in_flight.values(), most))

    def request_load(self) -> RequestLoad:
        """Return the counts of the requests in flight, and the adapters that they need."""
        return self.metrics.in_flight.load()

    def find_records(self, query: RecordQuery) -> list[bytes]:
        """Return the records of a request that is in flight or has ended, as RequestRecord.to_bytes(), oldest first."""
        return self.records.find(query, ((one.record, one.stopwatch) for one in self._in_flight.values()))

    def live_records(self, most: int) -> list[RequestRecord]:
        """Return the records of those of the oldest requests in flight that engines have got, oldest first.

        They are without times of tokens. most: how many requests in flight are looked at
        """
        return self.records.live(one.record for one in itertools.islice(self._in_flight.values(), most))

    def _traced(
        self, request: GenerateRequest | VectorRequest, record: RecordWriter, stopwatch: Stopwatch
    ) -> AbstractContextManager[None]:
        if self._tracing is None:
            return nullcontext()
        return self._tracing.traced(_operation(request), request.trace, record, stopwatch)

    @contextmanager
    def _admitted(self, request: GenerateRequest | VectorRequest) -> Iterator[InFlight]:
        caller, request_id, stopwatch = request.caller, request.request_id, Stopwatch(self._clock, self.metrics)
        key, now_s = (caller.tenant, request_id), asyncio.get_running_loop().time()
        if isinstance(request, GenerateRequest) and request.lora_name:
            stopwatch.count_for(self.metrics.of_unknown())  # Until the adapter is found: names are the client's.
        record = RecordWriter(request_id, caller.tenant, arrived_at_s=time.time(), now_s=now_s)
        with (
            self._traced(request, record, stopwatch),
            self.records.kept(record, stopwatch, is_traced=isinstance(request, GenerateRequest)),
            stopwatch.counting_the_end(),
            open_ledger(self._overload_control, self._image_budget, caller.allowance, request.timeout_s) as ledger,
        ):
            if key in self._in_flight:
                allowed = "one that no request in flight has"
                raise InvalidRequest(FieldViolation("request_id", repr(request_id), allowed))
            in_flight = self._in_flight[key] = InFlight(
                request_id, caller.tenant, record.arrived_at_s, stopwatch, ledger, record
            )
            try:
                with stopwatch.in_flight():
                    yield in_flight
            finally:
                self._num_migrations_of_ended += in_flight.num_migrations
                del self._in_flight[key]


def _operation(request: GenerateRequest | VectorRequest) -> str:
    """Return the request's operation as OpenTelemetry's conventions name it (gen_ai.operation.name)."""
    if isinstance(request, GenerateRequest):
        return "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"
    return "embeddings" if isinstance(request, EmbedRequest) else "classify"


def _begin_again(request: _RequestT, in_flight: InFlight, left: ModelVersionLeft) -> _RequestT:
    """Return the request for another model version, with the time that its client still waits as its timeout.

    Raises EngineFailed if the client has received output of the version that left.
    """
    if in_flight.engines is not None and in_flight.engines.is_bound:
        num_new_tokens = in_flight.stopwatch.num_tokens
        raise EngineFailed(request.request_id, str(left), num_new_tokens=num_new_tokens, can_resume=False) from left
    time_left_s = in_flight.ledger.time_left_s()
    return request if time_left_s is None else replace(request, timeout_s=max(0.0, time_left_s))
