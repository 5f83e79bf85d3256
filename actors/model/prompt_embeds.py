"""Embeddings that clients give in place of a prompt's tokens.

They are put where the model looks the prompt's tokens up, so that whatever it does with what it found there (scaling,
positions, projections) it does with them: as transformers does with inputs_embeds. The tokens of the output are looked
up as ever. A request keeps its embeddings until it is forgotten: preempted, it is computed from them again.
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

_NOTHING: Final = nullcontext()


class PromptEmbedsBatch:
    """Those of the requests that the worker knows. Costs nothing in steps without any."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._lookup = _find_lookup(model)
        self._embeds: dict[str, Tensor] = {}

    @property
    def embedding_size(self) -> int:
        """How wide they have to be; 0 if the model has no look-up that they can take the place of."""
        return 0 if self._lookup is None else self._lookup.embedding_dim

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Take in one step's requests that come and go."""
        if self._embeds:
            for req_id in scheduler_output.finished_req_ids:
                self._embeds.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            if new.prompt_embeds is not None:
                self._embeds[new.req_id] = _read(new.prompt_embeds).to(self._model.dtype)

    def in_place(self, batch: StepBatch) -> AbstractContextManager[None]:
        """While inside, the step's tokens are looked up so."""
        found = self._find(batch) if self._embeds else None
        return _NOTHING if found is None else self._replaced(*found)

    @contextmanager
    def _replaced(self, places: Tensor, embeds: Tensor) -> Iterator[None]:
        assert self._lookup is not None, "an engine whose model has no look-up refuses such requests"
        hook = self._lookup.register_forward_hook(
            lambda module, inputs, output: output.index_copy(1, places, embeds[None].to(output.dtype))
        )
        try:
            yield
        finally:
            hook.remove()

    def _find(self, batch: StepBatch) -> tuple[Tensor, Tensor] | None:
        """The step's tokens that have embeddings, [n] int64, and these, [n, hidden_size]."""
        device = self._model.device
        places: list[Tensor] = []
        embeds: list[Tensor] = []
        begin = int(batch.num_new_tokens[: batch.num_plain].sum())
        for index in range(batch.num_plain, len(batch)):
            num_new_tokens = int(batch.num_new_tokens[index])
            own = self._embeds.get(batch.req_ids[index])
            if own is not None:
                first = int(batch.num_computed_tokens[index])
                part = own[first : first + num_new_tokens]
                places.append(torch.arange(begin, begin + len(part)))
                embeds.append(part)
            begin += num_new_tokens
        if not sum(map(len, embeds)):
            return None
        return torch.cat(places).to(device), torch.cat(embeds).to(device)


def _read(embeds: PromptEmbeds) -> Tensor:
    """[num_tokens, hidden_size] in the dtype that they came in."""
    dtype: torch.dtype = getattr(torch, embeds.dtype)
    # A copy, since what came over the wire cannot be written.
    return torch.frombuffer(bytearray(embeds.data), dtype=dtype).reshape(embeds.num_tokens, embeds.hidden_size)


def _find_lookup(model: PreTrainedModel) -> nn.Embedding | None:
    try:
        lookup = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return lookup if isinstance(lookup, nn.Embedding) else None
