"""Splits a call with several prompts, and several samples of each, into requests; puts their answers together.

Each sample is a request with a seed of its own, and its output is the same as if it had been sent alone. The samples of
a prompt only share the computation of the prompt. The first sample is the leader: its prompt is prefilled and handed
over. Once the leader's decode engine has given a token, the prompt's blocks are in that engine's prefix cache, and the
other samples go to that engine without a prefill engine: they share the full blocks, get a copy of the last block, and
compute the prompt's last token. If a leader ends before that, the next sample leads. See docs/decisions/0022.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from actors.core.requests.request import EngineCoreRequest
from cluster.api.protos.sample_seeds import sample_seed
from cluster.parameters.generation import GenerateChunk, GenerateRequest, Prompt
from cluster.parameters.sampling_rules import Violations
from cluster.requests.attempt import Attempt
from cluster.requests.model_versions import ModelVersion
from cluster.requests.turns import Turns
from cluster.routing.base import EngineT, Route, Router
from cluster.routing.engine_connection import EngineKey
from cluster.settings.input_limits import InputLimits
from cluster.text.input_processor import draw_engine_request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateManyRequest:
    """A call with several prompts, and several samples of each.

    n:       how many samples of each prompt the client gets
    best_of: how many samples are made of each prompt; when all have ended, the n with the largest cumulative
             log-probability are the answer, the best one first. None: n samples are made, and all of them streamed
    each:    everything else, the same for all samples; its prompt is ignored, its seed is the seed of each sample 0
    """

    prompts: Sequence[Prompt]
    n: int = 1
    best_of: int | None = None
    each: GenerateRequest

    @property
    def num_made(self) -> int:
        """How many samples are made of each prompt."""
        return self.n if self.best_of is None else self.best_of


@dataclass(frozen=True, slots=True)
class SampleChunk:
    """The next part of one sample of one prompt.

    cumulative_logprob: the sum of the log-probabilities of the sample's output tokens. The sample's last chunk has it,
                        if the client asked for log-probabilities or best_of; None in other chunks
    """

    prompt_index: int
    sample_index: int
    chunk: GenerateChunk
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One of the requests that a call is split into."""

    prompt_index: int
    sample_index: int
    request: GenerateRequest
    prompt: SharedPrompt


def split(request: GenerateManyRequest, limits: InputLimits) -> list[Sample]:
    """Split a call into a request for each sample. Raises InvalidRequest if there is no sample, or too many."""
    _check(request, limits)
    each, samples = request.each, []
    is_one = len(request.prompts) * request.num_made == 1
    sampling = each.sampling
    if request.best_of is not None and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    turns = Turns()
    for prompt_index, prompt in enumerate(request.prompts):
        shared = SharedPrompt(turns)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        for sample_index in range(request.num_made):
            own = replace(
                each,
                prompt=prompt,
                request_id=each.request_id if is_one else f"{each.request_id}.{prompt_index}.{sample_index}",
                sampling=replace(
                    sampling,
                    seed=sample_seed(seed, sample_index),
                    # Log-probabilities of the prompt are the same for all samples, and computing them takes the whole
                    # prompt, so only one sample asks for them.
                    prompt_logprobs=sampling.prompt_logprobs if sample_index == 0 else None,
                ),
            )
            samples.append(Sample(prompt_index, sample_index, own, shared))
    return samples


def _check(request: GenerateManyRequest, limits: InputLimits) -> None:
    violations = Violations()
    n, best_of, num_prompts = request.n, request.best_of, len(request.prompts)
    if not num_prompts:
        violations.add("prompts", "empty", "at least one prompt")
    violations.require(1 <= n <= limits.max_samples, "n", n, f"1 to {limits.max_samples}")
    is_allowed = best_of is None or n <= best_of <= limits.max_samples
    violations.require(is_allowed, "best_of", best_of, f"n to {limits.max_samples}")
    violations.raise_if_any()
    num_samples = num_prompts * request.num_made
    if num_samples > limits.max_samples_per_call:
        allowed = f"at most {limits.max_samples_per_call} of all prompts together, that is prompts x n (or best_of)"
        violations.add("prompts", f"{num_samples} samples", allowed)
    # To resume, a client sends one request for each sample, with that sample's own seed.
    allowed = "none: a sample is resumed by a call of its own, with its seed"
    violations.require(not request.each.output_token_ids, "output_token_ids", request.each.output_token_ids, allowed)
    violations.raise_if_any()


class SharedPrompt:
    """A prompt that several samples share, and the engine that has its KV.

    Invariant: until an engine has the prompt's KV, only one of the samples is under way, the leader.
    """

    def __init__(self, turns: Turns) -> None:
        """turns: shared by all requests of the call"""
        self.turns = turns
        self._lead = asyncio.Lock()
        self._has_leader = False
        self._home: EngineKey | None = None
        self._processed: tuple[int, EngineCoreRequest] | None = None

    @property
    def is_computed(self) -> bool:
        """Whether an engine is known to have the prompt's KV, so that less than a block is left to compute."""
        return self._home is not None

    @property
    def model_version(self) -> int | None:
        """The model version of the samples so far; None before the first sample."""
        return None if self._processed is None else self._processed[0]

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until a sample may begin; the sample is the leader if no engine has the prompt's KV yet."""
        await self._lead.acquire()
        self._has_leader = True
        if self._home is not None:
            self._end_lead()
        try:
            yield
        finally:
            self._end_lead()

    def _end_lead(self) -> None:
        if self._has_leader:
            self._has_leader = False
            self._lead.release()

    def on_output(self, attempt: Attempt | None) -> None:
        """Let the other samples begin if the leader's decode engine has given tokens.

        attempt: the attempt of the sample that has an output
        """
        if self._has_leader and attempt is not None and attempt.has_decoded:
            self._home = attempt.route.decode.descriptor.key
            self._end_lead()

    async def process(self, model: ModelVersion, request: GenerateRequest) -> EngineCoreRequest:
        """Make a sample's request for the engines; the prompt is tokenized once for each model version.

        Raises what InputProcessor.process() raises.
        """
        if self._processed is None or self._processed[0] != model.version:
            first = await model.input_processor.process(request)
            self._processed = model.version, first
            return first
        first, sampling = self._processed[1], request.sampling
        assert sampling.seed is not None, "each sample has one"
        params = replace(first.sampling_params, seed=sampling.seed, prompt_logprobs=sampling.prompt_logprobs)
        return replace(first, request_id=draw_engine_request_id(request.request_id), sampling_params=params)

    def router(self, router: Router) -> Router:
        """Return a router that sends samples to the engine that has the prompt's KV."""
        return _HomeRouter(self, router)

    def home_among(self, engines: Sequence[EngineT]) -> EngineT | None:
        """Return the engine that has the prompt's KV, if it is one of these; None otherwise."""
        return next((engine for engine in engines if engine.descriptor.key == self._home), None)


@dataclass(frozen=True, slots=True)
class _HomeRouter:
    """A Router that sends samples to the engine that has their prompt's KV, and follows another router before that."""

    prompt: SharedPrompt
    router: Router

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Choose the engine that has the prompt's KV; without one, let the other router choose."""
        home = self.prompt.home_among(engines)
        return self.router.choose(request, engines) if home is None else Route(None, home)

    def reroute(self, waiting_id: str, again: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT] | None:
        """Let the sample stay where it is: the others follow it."""
        return None

    def on_start(self, request: EngineCoreRequest, route: Route[EngineT]) -> None:
        """Tell the other router, unless the sample went to the prompt's engine, which that router knows already."""
        if self.prompt.home_among([route.decode]) is None:
            self.router.on_start(request, route)

    def on_end(self, request: EngineCoreRequest, output_token_ids: Sequence[int], route: Route[EngineT]) -> None:
        """Tell the other router."""
        self.router.on_end(request, output_token_ids, route)

    def on_leave(self, request_id: str) -> None:
        """Tell the other router."""
        self.router.on_leave(request_id)


class Answers:
    """Turns the chunks of a call's samples into the chunks that the client gets."""

    def __init__(self, request: GenerateManyRequest) -> None:
        self._request = request
        self._wants_logprobs = request.each.sampling.logprobs is not None
        self._logprobs: dict[tuple[int, int], float] = {}
        self._chunks: dict[tuple[int, int], list[GenerateChunk]] = {}
        self._num_ended = [0] * len(request.prompts)

    def take(self, sample: Sample, chunk: GenerateChunk) -> Iterator[SampleChunk]:
        """Take a chunk of a sample, and yield the chunks that can be sent now."""
        key = sample.prompt_index, sample.sample_index
        if chunk.logprobs:
            total = sum(position.logprobs[0] for position in chunk.logprobs)
            self._logprobs[key] = self._logprobs.get(key, 0.0) + total
        if self._request.best_of is None:
            total_logprob = None if chunk.end is None or not self._wants_logprobs else self._logprobs.get(key, 0.0)
            yield SampleChunk(*key, chunk, total_logprob)
            return
        self._chunks.setdefault(key, []).append(chunk)
        if chunk.end is not None:
            self._num_ended[sample.prompt_index] += 1
            if self._num_ended[sample.prompt_index] == self._request.best_of:
                yield from self._best(sample.prompt_index)

    def _best(self, prompt_index: int) -> Iterator[SampleChunk]:
        """Yield the best samples of a prompt, the best one first. All samples of the prompt have ended.

        Of equally good samples the one that has the smaller index comes first.
        """
        made = [key for key in self._chunks if key[0] == prompt_index]
        made.sort(key=lambda key: (-self._logprobs.get(key, 0.0), key))
        prompt_logprobs = self._chunks[prompt_index, 0][0].prompt_logprobs
        for rank, key in enumerate(made[: self._request.n]):
            whole = _join(self._chunks[key], with_logprobs=self._wants_logprobs)
            # Log-probabilities of the prompt come with sample 0, which may not be among the best.
            whole = replace(whole, prompt_logprobs=prompt_logprobs if rank == 0 else None)
            yield SampleChunk(prompt_index, rank, whole, self._logprobs.get(key, 0.0))
        for key in made:
            del self._chunks[key]


def _join(chunks: Sequence[GenerateChunk], *, with_logprobs: bool) -> GenerateChunk:
    """Join all chunks of a sample into one chunk."""
    logprobs = [position for chunk in chunks for position in chunk.logprobs or ()]
    return GenerateChunk(
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        first_position=chunks[0].first_position,
        logprobs=logprobs if with_logprobs else None,
        seed=chunks[0].seed,
        model_version=chunks[0].model_version,
        lora_digest=chunks[0].lora_digest,
        prompt_token_ids=chunks[0].prompt_token_ids,
        end=chunks[-1].end,
    )
