"""Gives the step's batch to attention modules that transformers' code does not hand it to.

Most models hand the unknown keyword arguments of their forward down to the attention function, which finds the batch
among them. The decoder layers of a few models drop these arguments, and Falcon's attention calls no attention function.
For those models a hook or a replaced forward of the attention modules takes the batch from here. Without a batch, as in
the checks against transformers' own output, the modules compute what transformers' code computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn
from transformers import PreTrainedModel

from actors.model.attention.batch_attention import ATTENTION_NAME, BATCH_ARGUMENT, BatchAttention
from actors.model.attention_modules.falcon import attend_as_falcon
from actors.model.config.class_facts import WITH_BATCH_DELIVERED

ReplacedForward = Callable[..., tuple[Any, None]]

_REPLACED_FORWARDS: Final[dict[str, ReplacedForward]] = {"falcon": attend_as_falcon}
"""By model type: computes what the attention module computes, with the batch. See attend_as_falcon."""


class BatchDelivery:
    """Holds the batch while a model's forward runs. One forward of a model runs at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Prepare the attention modules of a model whose type is in WITH_BATCH_DELIVERED."""
        self._config = model.config
        self._batch: BatchAttention | None = None
        replaced = _REPLACED_FORWARDS.get(model.config.model_type)
        for module in model.modules():
            if type(module).__name__.endswith("Attention"):
                if replaced is None:
                    module.register_forward_pre_hook(self._add_batch, with_kwargs=True)
                else:
                    self._replace(module, replaced)

    @contextmanager
    def holding(self, batch: BatchAttention) -> Iterator[None]:
        """Give this batch to the attention modules until the context ends."""
        self._batch = batch
        usual = self._config._attn_implementation
        # transformers builds no mask for an attention that it does not know.
        self._config._attn_implementation_internal = ATTENTION_NAME
        try:
            yield
        finally:
            self._batch = None
            self._config._attn_implementation_internal = usual

    def _add_batch(
        self, module: nn.Module, inputs: tuple[object, ...], arguments: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        if self._batch is None:
            return None
        if "layer_idx" in arguments:
            # Zamba2's attention is told its layer with each call.
            module.layer_idx = arguments["layer_idx"]  # type: ignore[assignment]  # nn.Module's attributes are untyped
        return inputs, arguments | {BATCH_ARGUMENT: self._batch}

    def _replace(self, module: nn.Module, replaced: ReplacedForward) -> None:
        own = module.forward

        def forward(*inputs: object, **arguments: object) -> object:
            if self._batch is None:
                return own(*inputs, **arguments)
            return replaced(module, self._batch, *inputs, **arguments)

        module.forward = forward


def delivery_for(model: PreTrainedModel) -> BatchDelivery | None:
    """Return the delivery of a model that needs one, or None."""
    return BatchDelivery(model) if model.config.model_type in WITH_BATCH_DELIVERED else None
