"""The classification head of a checkpoint, applied to pooled hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.checkpoint.pooling_facts import Activation
from actors.model.errors import UnsupportedModel

_MAX_ERROR = 1e-3


class ClassificationHead:
    """The layers of transformers' own model behind pooling."""

    def __init__(self, model: PreTrainedModel, activation: Activation) -> None:
        """Raises UnsupportedModel if the head is not one linear layer called score."""
        score = getattr(model, "score", None)
        if not isinstance(score, nn.Linear):
            raise UnsupportedModel(type(model).__name__, "its classification head is not a linear layer `score`")
        self._model = model
        self._score = score
        self._activation = activation

    def logits(self, pooled: Tensor) -> Tensor:
        """[n, hidden_size] in the model's dtype -> [n, num_labels] float32, on the CPU."""
        logits: Tensor = self._score(pooled.to(self._score.weight.dtype))
        return logits.float().cpu()

    def activate(self, logits: Tensor) -> Tensor:
        """Return the scores of logits; both are [n, num_labels] float32."""
        if self._activation == "softmax":
            return logits.softmax(dim=-1)
        return logits.sigmoid() if self._activation == "sigmoid" else logits

    def check(self, input_ids: Tensor, states: Tensor) -> None:
        """Raise UnsupportedModel unless the whole model and this head give the same logits for a sequence.

        input_ids: [num_tokens]; states: [num_tokens, hidden_size] of its tokens. The head gets the last token's state.
        The whole model runs with its own attention.
        """
        stock = self._model(input_ids=input_ids[None], use_cache=False, return_dict=True).logits.float().cpu()
        own = self.logits(states[-1:])
        error = float((own - stock).norm() / stock.norm().clamp_min(torch.finfo(torch.float32).tiny))
        if not error <= _MAX_ERROR:  # This comparison is false for a NaN, so a NaN fails the check.
            raise UnsupportedModel(
                type(self._model).__name__,
                f"its logits are not its head's for the last token (they differ by {error:.2g})",
            )
