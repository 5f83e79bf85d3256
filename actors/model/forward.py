"""One forward pass of a transformers model over a flattened batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.model.attention.batch_attention import BATCH_ARGUMENT, BatchAttention
from actors.model.config.model_kind import ModelKind

TakeStates = Callable[[Tensor], None]
"""Gets the last layer's hidden states, [num_tokens, hidden_size], as the model's head does: after the last norm."""


class FlatForward:
    """Calls a model with all requests' tokens in one row.

    Its output is logits for a causal language model, and the last hidden states for one of another kind.

    Invariant: nothing but attention mixes tokens, and attention goes by the batch, so requests do not see each other.
    """

    def __init__(self, model: PreTrainedModel, kind: ModelKind = ModelKind.GENERATION) -> None:
        self.model = model
        self.generates = kind.generates
        self._called: nn.Module = model.base_model if kind is ModelKind.CLASSIFICATION else model
        self.padding_idx = _padding_idx(self._called)
        """Of a model that counts positions from the number after it: RoBERTa and its like."""
        self.first_position = 0 if self.padding_idx is None else self.padding_idx + 1
        """The model's own number of a sequence's first position."""
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
        """The output where it is wanted.

        input_ids: [num_tokens] int64; indices: [n] int64, into the tokens
        positions: [num_tokens] int64, or [3, num_tokens] for a model that places images by frame, row and column
        take_states: is given all tokens' hidden states on the way
        inputs_embeds: [num_tokens, hidden_size] in the model's dtype, instead of the tokens' own
        Returns [n, vocab_size], or [n, hidden_size], in the model's dtype.
        """
        inputs = {"input_ids": input_ids[None]} if inputs_embeds is None else {"inputs_embeds": inputs_embeds[None]}
        if take_states is None:
            return self._run(inputs, positions, batch, indices)
        trunk = self._called
        if self.generates:
            # What gives a head its hidden states is not always the base model: OPT's calls its decoder.
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
        if self.first_position:
            positions = positions + self.first_position
        output = self._called(position_ids=positions[..., None, :], use_cache=False, return_dict=True, **arguments)
        rows: Tensor = (output.logits if self.generates else output.last_hidden_state)[0]
        return rows if self._keeps_logits else rows[indices]

    def stock(self, input_ids: Tensor) -> Tensor:
        """The same output of one sequence's every token, as the model itself computes it; with its own attention.

        input_ids: [num_tokens] int64
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
