"""Makes the vectors of pooling requests from hidden states, over as many chunks as their prompts take.

After each chunk of a prompt a partial result is kept: the sum of its hidden states so far (mean), or the first of them
(cls). It belongs to the request, not to its row, and is reset with the prompt's first token, so a preempted request
starts over like any other. A request whose prefix was found in a cache has no hidden states for the prefix; only
requests that need nothing but the last token's may have one (Request.reads_prefix_cache).

Sums are in float32, whatever the model's dtype, and separate for each request: a vector does not depend on its batch.
All ranks of an engine have the same hidden states; the vectors of rank 0 are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.core.outputs.scheduler_output import SchedulerOutput, StepBatch
from actors.core.requests.sampling_params import PoolingParams
from actors.model.pooling.head import ClassificationHead

_TINY = 1e-12
"""The smallest norm to divide by, as in torch.nn.functional.normalize: a vector of zeros stays zero."""


@dataclass(slots=True)
class _Pooled:
    """A request that wants a vector. partial: [hidden_size], the sum or the first state of its earlier chunks"""

    params: PoolingParams
    num_prompt_tokens: int
    partial: Tensor | None = None


class Pooler:
    """Knows the engine's pooling requests. It costs nothing in a step without such requests."""

    def __init__(self, head: ClassificationHead | None = None) -> None:
        """head: the classification head; None if the model does not classify."""
        self._head = head
        self._requests: dict[str, _Pooled] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Add the step's new pooling requests, and drop those that have finished."""
        if self._requests:
            for req_id in scheduler_output.finished_req_ids:
                self._requests.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            if new.pooling_params is not None:
                self._requests[new.req_id] = _Pooled(new.pooling_params, len(new.prompt_token_ids))

    def begin_step(self, batch: StepBatch) -> PooledStep | None:
        """Plan the pooling of the step's hidden states; None if no request in the step wants a vector."""
        if not self._requests:
            return None
        # The first num_plain requests decode one token each; a pooling request is never among them.
        indices = range(batch.num_plain, len(batch))
        pooled = {
            index: self._requests[batch.req_ids[index]] for index in indices if batch.req_ids[index] in self._requests
        }
        return PooledStep(batch, pooled, self._head) if pooled else None


class PooledStep:
    """One step's pooling requests, by their index in the batch."""

    def __init__(self, batch: StepBatch, requests: dict[int, _Pooled], head: ClassificationHead | None) -> None:
        self._batch = batch
        self._requests = requests
        self._head = head
        self._vectors: dict[int, Tensor] = {}

    def take_states(self, states: Tensor) -> None:
        """Pool the step's hidden states, [num_tokens, hidden_size]."""
        ends = np.cumsum(self._batch.num_new_tokens)
        for index, request in self._requests.items():
            stop, num_new_tokens = int(ends[index]), int(self._batch.num_new_tokens[index])
            num_computed_tokens = int(self._batch.num_computed_tokens[index])
            vector = _pool(request, states[stop - num_new_tokens : stop], num_computed_tokens)
            if num_computed_tokens + num_new_tokens == request.num_prompt_tokens:
                self._vectors[index] = vector
                request.partial = None

    def outputs(self) -> dict[str, list[float]]:
        """Return the vectors of the requests whose prompts end in this step, by request id."""
        req_ids, vectors = self._batch.req_ids, {}
        embedded = [i for i in self._vectors if self._requests[i].params.task == "embed"]
        classified = [i for i in self._vectors if self._requests[i].params.task != "embed"]
        if embedded:
            pooled = torch.stack([self._vectors[index] for index in embedded]).float().cpu().numpy()
            for index, vector in zip(embedded, pooled, strict=True):
                vectors[req_ids[index]] = _finish_embedding(vector, self._requests[index].params)
        if classified:
            assert self._head is not None, "without a head such a request is refused"
            logits = self._head.logits(torch.stack([self._vectors[index] for index in classified]))
            scores = self._head.activate(logits).tolist()
            for place, index in enumerate(classified):
                is_activated = self._requests[index].params.activate
                vectors[req_ids[index]] = scores[place] if is_activated else logits[place].tolist()
        return vectors


def _pool(request: _Pooled, states: Tensor, num_computed_tokens: int) -> Tensor:
    """Pool a chunk's hidden states, [num_new_tokens, hidden_size], with those of the chunks before it.

    Returns the pooled state so far, [hidden_size].
    """
    pooling, is_first = request.params.pooling, num_computed_tokens == 0
    if pooling == "last":
        return states[-1]
    if pooling == "cls":
        if is_first:
            request.partial = states[0].clone()
        assert request.partial is not None, "the prompt's first token was not computed by this engine"
        return request.partial
    total = states.sum(dim=0, dtype=torch.float32)
    if not is_first:
        assert request.partial is not None, "the prompt's first tokens were not computed by this engine"
        total += request.partial
    request.partial = total
    return total / (num_computed_tokens + len(states))


def _finish_embedding(vector: np.ndarray, params: PoolingParams) -> list[float]:
    """Cut a vector, [hidden_size] float32, to the wanted dimensions, then scale it to length 1 if that is wanted."""
    if params.dimensions is not None:
        vector = vector[: params.dimensions]
    if params.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), _TINY)
    numbers: list[float] = vector.tolist()
    return numbers
