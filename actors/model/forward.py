"""One forward pass of a transformers model over a flattened batch."""

from __future__ import annotations

import inspect

from torch import Tensor
from transformers import PreTrainedModel

from actors.model.attention.base import BATCH_ARGUMENT, BatchAttention


class FlatForward:
    """Calls a causal language model with all requests' tokens in one row.

    Invariant: nothing but attention mixes tokens, and attention goes by the batch, so requests do not see each other.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, input_ids: Tensor, positions: Tensor, batch: BatchAttention, logits_indices: Tensor) -> Tensor:
        """Logits where they are wanted.

        input_ids, positions: [num_tokens] int64; logits_indices: [n] int64, into the tokens
        Returns [n, vocab_size] in the model's dtype.
        """
        arguments: dict[str, object] = {BATCH_ARGUMENT: batch}
        if self._keeps_logits:
            arguments["logits_to_keep"] = logits_indices
        output = self.model(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **arguments
        )
        logits: Tensor = output.logits[0]
        return logits if self._keeps_logits else logits[logits_indices]
