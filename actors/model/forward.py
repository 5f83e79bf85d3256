"""One forward pass of a transformers model over a flattened batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.model.attention.batch_attention import BATCH_ARGUMENT, BatchAttention
from actors.model.attention_modules.batch_delivery import delivery_for
from actors.model.attention_modules.latent import keep_latents
from actors.model.attention_modules.request_positions import RequestPositions
from actors.model.config.class_facts import WITH_POSITIONS_BY_CACHE
from actors.model.config.model_kind import ModelKind
from actors.model.states.recurrent_modules import recurrent_modules_of
from actors.model.states.step_states import BatchWithStates

TakeStates = Callable[[Tensor], None]
"""A function that gets the last layer's hidden states after the last norm, [num_tokens, hidden_size]."""


class OneTokenForward(Protocol):
    """Computes what FlatForward computes for one token, in the same bits."""

    elapsed_s: float
    """The seconds that its compilation took."""

    def __call__(self, input_ids: Tensor, positions: Tensor, batch: BatchAttention, indices: Tensor) -> Tensor:
        """Return the logits of the token, [1, vocab_size]."""


class FlatForward:
    """Calls a model with all requests' tokens in one row.

    The output is logits for a causal language model, and the last hidden states for a model of another kind.

    Invariant: only attention and recurrent modules mix tokens, and they keep to the request of each token, so requests
    are independent.
    """

    def __init__(self, model: PreTrainedModel, kind: ModelKind = ModelKind.GENERATION) -> None:
        self.model = model
        self.generates = kind.generates
        self._called: nn.Module = model.base_model if kind is ModelKind.CLASSIFICATION else model
        self.padding_idx = _padding_idx(self._called)
        """The padding token of a model that counts positions from the number after it, as RoBERTa does; else None."""
        self.first_position = 0 if self.padding_idx is None else self.padding_idx + 1
        """The number that the model gives to a sequence's first position."""
        self._delivery = delivery_for(model)
        self._recurrent = recurrent_modules_of(model)
        config = model.config.get_text_config(decoder=True)
        self._counts_by_cache = config.model_type in WITH_POSITIONS_BY_CACHE
        keep_latents(model)
        self.one_token: OneTokenForward | None = None
        """Computes the steps of one token, if it was compiled."""
        self.num_compiled = 0
        """How many steps were computed by it."""
        self._keeps_logits = self.generates and "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: BatchAttention,
        indices: Tensor,
        take_states: TakeStates | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the output at the given indices.

        input_ids: [num_tokens] int64; indices: [n] int64, into the tokens
        positions: [num_tokens] int64, or [3, num_tokens] for a model that places images by frame, row and column
        take_states: called with the hidden states of all tokens
        inputs_embeds: [num_tokens, hidden_size] in the model's dtype, instead of the embeddings of input_ids
        Returns [n, vocab_size], or [n, hidden_size], in the model's dtype.
        """
        is_plain = take_states is None and inputs_embeds is None
        if self.one_token is not None and is_plain and input_ids.shape == positions.shape == indices.shape == (1,):
            self.num_compiled += 1
            return self.one_token(input_ids, positions, batch, indices)
        inputs = {"input_ids": input_ids[None]} if inputs_embeds is None else {"inputs_embeds": inputs_embeds[None]}
        if take_states is None:
            return self._run(inputs, positions, batch, indices)
        trunk = self._called
        if self.generates:
            # The head does not always get its hidden states from the base model: OPT's gets them from the decoder.
            trunk = self.model.get_decoder()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        hook = trunk.register_forward_hook(lambda module, inputs, output: take_states(output.last_hidden_state[0]))
        try:
            return self._run(inputs, positions, batch, indices)
        finally:
            hook.remove()

    def _run(self, inputs: Mapping[str, Tensor], positions: Tensor, batch: BatchAttention, indices: Tensor) -> Tensor:
        arguments: dict[str, object] = {BATCH_ARGUMENT: batch, **inputs}
        if self._keeps_logits:
            arguments["logits_to_keep"] = indices
        if self._counts_by_cache:
            arguments["past_key_values"] = RequestPositions(positions)
        if self.first_position:
            positions = positions + self.first_position
        with self._holding_states(batch), nullcontext() if self._delivery is None else self._delivery.holding(batch):
            output = self._called(position_ids=positions[..., None, :], use_cache=False, return_dict=True, **arguments)
        rows: Tensor = (output.logits if self.generates else output.last_hidden_state)[0]
        return rows if self._keeps_logits else rows[indices]

    def _holding_states(self, batch: BatchAttention) -> AbstractContextManager[None]:
        if self._recurrent is None or not isinstance(batch, BatchWithStates):
            return nullcontext()
        return self._recurrent.holding(batch.states)

    def stock(self, input_ids: Tensor) -> Tensor:
        """Return the output for every token of one sequence, computed with the model's own attention.

        input_ids: [num_tokens] int64
        Returns [num_tokens, vocab_size], or [num_tokens, hidden_size], in the model's dtype.
        """
        output = self._called(input_ids=input_ids[None], use_cache=False, return_dict=True)
        rows: Tensor = (output.logits if self.generates else output.last_hidden_state)[0]
        return rows


def _padding_idx(model: nn.Module) -> int | None:
    # A language model's embeddings are below its base model, a headless one's its own.
    base = getattr(model, "base_model", model)
    positions = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    index: int | None = getattr(positions, "padding_idx", None)
    return index
