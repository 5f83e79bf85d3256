"""Whole answers, put together from the responses of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cluster.api.protos.raypd.v1 import generate_pb2


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole answer to one request: all responses of its stream as one.

    logprobs:        one entry for each output token; empty if they were not asked for
    prompt_logprobs: one entry for each token of the prompt but the first; empty if they were not asked for
    stop:            the stop string, or the id of the end-of-sequence or stop token, that ended the output; None if
                     the output ended for another reason
    seed:            the seed of the sampling; the same request with this seed gives the same answer on the same model
    cumulative_logprob: the sum of the log-probabilities of all output tokens; None unless the answer is part of a batch
                     that asked for logprobs or best_of
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[generate_pb2.TokenLogprobs, ...]
    prompt_logprobs: tuple[generate_pb2.TokenLogprobs, ...]
    finish_reason: generate_pb2.FinishReason
    stop: str | int | None
    seed: int
    usage: generate_pb2.Usage
    timings: generate_pb2.Timings
    cumulative_logprob: float | None = None

    @classmethod
    def of_batch(cls, responses: Iterable[generate_pb2.GenerateBatchResponse]) -> list[list[Answer]]:
        """Put together the answers of a batch that has ended. Returns for each prompt its answers, in sample order."""
        by_place: dict[tuple[int, int], list[generate_pb2.GenerateBatchResponse]] = {}
        for response in responses:
            by_place.setdefault((response.prompt_index, response.sample_index), []).append(response)
        answers: list[list[Answer]] = [[] for _ in {prompt_index for prompt_index, _ in by_place}]
        for (prompt_index, _), parts in sorted(by_place.items()):
            last = parts[-1]
            total = last.cumulative_logprob if last.HasField("cumulative_logprob") else None
            answer = replace(cls.of([part.response for part in parts]), cumulative_logprob=total)
            answers[prompt_index].append(answer)
        return answers

    @classmethod
    def of(cls, responses: Sequence[generate_pb2.GenerateResponse]) -> Answer:
        """Put together all responses of a stream that has ended; at least one."""
        first, last = responses[0], responses[-1]
        kind = last.WhichOneof("stop_reason")
        return cls(
            request_id=first.request_id,
            text="".join(response.text for response in responses),
            token_ids=tuple(token_id for response in responses for token_id in response.token_ids),
            logprobs=tuple(logprobs for response in responses for logprobs in response.logprobs),
            prompt_logprobs=tuple(logprobs for response in responses for logprobs in response.prompt_logprobs),
            finish_reason=last.finish_reason,
            stop=None if kind is None else getattr(last, kind),
            seed=first.seed,
            usage=last.usage,
            timings=last.timings,
        )
