"""Puts the embeddings that clients send instead of prompt tokens into the model's input.

A forward hook replaces the output of the model's token embedding. So the model does the same with these embeddings as
with those of tokens (scaling, positions, projections), as it does with transformers' inputs_embeds. Output tokens are
looked up as always. The worker keeps a request's embeddings until the request has finished, since a preempted request
is computed from them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.core.outputs.scheduler_output import SchedulerOutput, StepBatch
from actors.core.requests.request import PromptEmbeds

_NOTHING: Final = nullcontext(False)


class PromptEmbedsBatch:
    """The prompt embeddings of the requests that the worker knows. It costs nothing in steps without such requests."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._lookup = _find_lookup(model)
        self._embeds: dict[str, Tensor] = {}

    @property
    def embedding_size(self) -> int:
        """The number of components of an embedding; 0 if the model has no token embedding to replace."""
        return 0 if self._lookup is None else self._lookup.embedding_dim

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Add the embeddings of the step's new requests, and drop those of requests that have finished."""
        if self._embeds:
            for req_id in scheduler_output.finished_req_ids:
                self._embeds.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            if new.prompt_embeds is not None:
                self._embeds[new.req_id] = _read(new.prompt_embeds).to(self._model.dtype)

    def in_place(self, batch: StepBatch) -> AbstractContextManager[bool]:
        """Return a context in which the model finds these embeddings when it looks up the step's tokens.

        Its value says whether there are any.
        """
        found = self._find(batch) if self._embeds else None
        return _NOTHING if found is None else self._replaced(*found)

    @contextmanager
    def _replaced(self, positions: Tensor, embeds: Tensor) -> Iterator[bool]:
        assert self._lookup is not None, "an engine whose model has no token embedding refuses prompt embeddings"
        hook = self._lookup.register_forward_hook(
            lambda module, inputs, output: output.index_copy(1, positions, embeds[None].to(output.dtype))
        )
        try:
            yield True
        finally:
            hook.remove()

    def _find(self, batch: StepBatch) -> tuple[Tensor, Tensor] | None:
        """Return which of the step's tokens have embeddings, [n] int64, and the embeddings, [n, hidden_size]."""
        device = self._model.device
        positions: list[Tensor] = []
        embeds: list[Tensor] = []
        begin = int(batch.num_new_tokens[: batch.num_plain].sum())
        for index in range(batch.num_plain, len(batch)):
            num_new_tokens = int(batch.num_new_tokens[index])
            own = self._embeds.get(batch.req_ids[index])
            if own is not None:
                first = int(batch.num_computed_tokens[index])
                part = own[first : first + num_new_tokens]
                positions.append(torch.arange(begin, begin + len(part)))
                embeds.append(part)
            begin += num_new_tokens
        if not sum(map(len, embeds)):
            return None
        return torch.cat(positions).to(device), torch.cat(embeds).to(device)


def _read(embeds: PromptEmbeds) -> Tensor:
    """Return embeddings as a tensor, [num_tokens, hidden_size] in the dtype in which the client sent them."""
    dtype: torch.dtype = getattr(torch, embeds.dtype)
    # A copy: bytes are read-only, and torch has no read-only tensors.
    return torch.frombuffer(bytearray(embeds.data), dtype=dtype).reshape(embeds.num_tokens, embeds.hidden_size)


def _find_lookup(model: PreTrainedModel) -> nn.Embedding | None:
    try:
        lookup = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return lookup if isinstance(lookup, nn.Embedding) else None
