"""The progress of a batch, several samples of several prompts, over as many calls as it takes. Pure.

A batch is asked for in one call. When the call is cut, the rest of the batch has two parts. Prompts without any output
become a smaller batch, whose samples share a prefill again. Of the other prompts each sample that has not ended goes on
as a request of its own, with its own seed and tokens, as in stream_progress.py. With best_of the reader gets all
samples of a prompt or none, so that there is only the first part.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.api.protos.sample_seeds import sample_seed
from cluster.client.streams.stream_progress import StreamProgress

_MAX_REQUEST_ID_CHARS = 112

_Place = tuple[int, int]
"""(prompt_index, sample_index)."""


@dataclass(frozen=True, slots=True)
class Rest:
    """The rest of a batch whose call was cut.

    batch:          a request for the prompts without any output; None if there are none
    prompt_indices: for each prompt of that request its index in the whole batch
    samples:        the samples that have begun and not ended, by (prompt_index, sample_index)
    """

    batch: generate_pb2.GenerateBatchRequest | None
    prompt_indices: list[int]
    samples: dict[_Place, StreamProgress]


class BatchProgress:
    """A batch, and what its reader has got so far."""

    def __init__(self, request: generate_pb2.GenerateBatchRequest) -> None:
        self._request = generate_pb2.GenerateBatchRequest()
        self._request.CopyFrom(request)
        self._n = request.n if request.HasField("n") else 1
        self._request_id = request.each.request_id
        self._num_calls = 0
        self._samples: dict[_Place, StreamProgress] = {}
        self._logprobs: dict[_Place, float] = {}
        self._seeds: dict[int, int] = {}
        self._incomplete: dict[int, list[generate_pb2.GenerateBatchResponse]] = {}

    @property
    def has_begun(self) -> bool:
        """Whether the reader has got a response."""
        return any(sample.has_begun for sample in self._samples.values())

    @property
    def has_ended(self) -> bool:
        """Whether the reader has got every sample's last response."""
        num_ended = sum(sample.has_ended for sample in self._samples.values())
        return num_ended == self._n * len(self._request.prompts)

    @property
    def request_id(self) -> str:
        """The request id that the reader sees; "" until it is known."""
        return self._request_id

    def next_request(self) -> generate_pb2.GenerateBatchRequest:
        """Return the request for the whole batch, while the reader has got nothing."""
        self._num_calls += 1
        self._incomplete.clear()
        request = generate_pb2.GenerateBatchRequest()
        request.CopyFrom(self._request)
        request.each.request_id = self._further_id(self._num_calls)
        return request

    def take(self, response: generate_pb2.GenerateBatchResponse) -> list[generate_pb2.GenerateBatchResponse]:
        """Take a response of the batch's call, and return the responses that the reader gets now.

        With best_of they are held back until all samples of a prompt are there. Raises CallFailed if a response is not
        the next part of its sample.
        """
        self._request_id = self._request_id or response.response.request_id
        if not self._request.HasField("best_of"):
            return [self._take(response)]
        whole = self._incomplete.setdefault(response.prompt_index, [])
        whole.append(response)
        if len(whole) < self._n:
            return []
        return [self._take(one) for one in whole]

    def take_of(self, place: _Place, response: generate_pb2.GenerateResponse) -> generate_pb2.GenerateBatchResponse:
        """Return a response of a sample that goes on as a request of its own, as part of the batch.

        The sample's StreamProgress has taken the response already.
        """
        message = generate_pb2.GenerateBatchResponse(prompt_index=place[0], sample_index=place[1], response=response)
        message.response.request_id = self._request_id
        self._count(place, response)
        has_ended = response.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED
        if has_ended and self._request.each.sampling_params.HasField("logprobs"):
            message.cumulative_logprob = self._logprobs.get(place, 0.0)
        return message

    def rest(self) -> Rest:
        """Return the rest of the batch, for calls that begin now."""
        prompts = range(len(self._request.prompts))
        begun = {place[0] for place in self._samples}
        samples = {
            (prompt_index, sample_index): self._sample((prompt_index, sample_index))
            for prompt_index in prompts
            if prompt_index in begun
            for sample_index in range(self._n)
        }
        untouched = [prompt_index for prompt_index in prompts if prompt_index not in begun]
        batch = None
        if untouched:
            batch = generate_pb2.GenerateBatchRequest()
            batch.CopyFrom(self._request)
            del batch.prompts[:]
            batch.prompts.extend(self._request.prompts[prompt_index] for prompt_index in untouched)
            batch.each.request_id = self._further_id(self._num_calls + 1)
        return Rest(batch, untouched, {place: one for place, one in samples.items() if not one.has_ended})

    def _take(self, response: generate_pb2.GenerateBatchResponse) -> generate_pb2.GenerateBatchResponse:
        place = response.prompt_index, response.sample_index
        if place[1] == 0 and response.response.HasField("seed"):
            self._seeds[place[0]] = response.response.seed
        self._count(place, response.response)
        self._sample(place).take(response.response)
        response.response.request_id = self._request_id
        return response

    def _count(self, place: _Place, response: generate_pb2.GenerateResponse) -> None:
        total = sum(position.logprob for position in response.logprobs)
        self._logprobs[place] = self._logprobs.get(place, 0.0) + total

    def _sample(self, place: _Place) -> StreamProgress:
        sample = self._samples.get(place)
        if sample is None:
            sample = self._samples[place] = StreamProgress(self._single(*place))
            sample.next_request()  # The batch was the sample's first call.
        return sample

    def _single(self, prompt_index: int, sample_index: int) -> generate_pb2.GenerateRequest:
        """Return a request for a single sample."""
        request = generate_pb2.GenerateRequest()
        request.CopyFrom(self._request.each)
        prompt = self._request.prompts[prompt_index]
        kind = prompt.WhichOneof("prompt")
        if kind == "text":
            request.text = prompt.text
        elif kind is not None:
            getattr(request, kind).CopyFrom(getattr(prompt, kind))
        sampling = request.sampling_params
        seed = sampling.seed if sampling.HasField("seed") else self._seeds.get(prompt_index)
        if seed is not None:
            sampling.seed = sample_seed(seed, sample_index)
        if sample_index:
            sampling.ClearField("prompt_logprobs")
        request.request_id = f"{self._request_id}.{prompt_index}.{sample_index}" if self._request_id else ""
        return request

    def _further_id(self, num_calls: int) -> str:
        if num_calls == 1 or not self._request_id:
            return self._request.each.request_id
        request_id = f"{self._request_id}+{num_calls}"
        return request_id if len(request_id) <= _MAX_REQUEST_ID_CHARS else ""
