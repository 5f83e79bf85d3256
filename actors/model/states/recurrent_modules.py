"""Lets transformers' recurrent modules compute a flattened batch, each request from its own state.

The modules take a cache, from which they read a request's state and to which they write the new one. That is all that
raypd needs: a module's forward is called as it is, once for all requests that decode and once for each chunk of a
prompt, with a cache that holds these requests' states. Without a step's states, as in the checks against transformers'
own output, the modules compute what transformers' code computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from actors.model.config.class_facts import RECURRENT_MODULES
from actors.model.states.step_states import ModuleCache, StepStates


class RecurrentModules:
    """Holds the states of a step while a model's forward runs. One forward of a model runs at a time."""

    def __init__(self, model: PreTrainedModel, module_name: str) -> None:
        """Replace the forward of the model's recurrent modules. module_name: of their class"""
        self._states: StepStates | None = None
        for module in model.modules():
            if type(module).__name__ == module_name:
                self._replace(module)

    @contextmanager
    def holding(self, states: StepStates) -> Iterator[None]:
        """Give these states to the modules until the context ends."""
        self._states = states
        try:
            yield
        finally:
            self._states = None

    def _replace(self, module: Any) -> None:  # a module of transformers, whose attributes are untyped
        own = module.forward
        argument = "cache_params" if "cache_params" in inspect.signature(own).parameters else "past_key_values"

        def forward(hidden_states: Tensor, *inputs: object, **arguments: object) -> Tensor:
            if self._states is None:
                output: Tensor = own(hidden_states, *inputs, **arguments)
                return output

            def run(states: Tensor, cache: ModuleCache) -> Tensor:
                computed: Tensor = own(states, **{argument: cache})
                return computed

            return self._states.run(module.layer_idx, hidden_states, run)

        module.forward = forward


def recurrent_modules_of(model: PreTrainedModel) -> RecurrentModules | None:
    """Return the recurrent modules of a model that has some, or None."""
    name = RECURRENT_MODULES.get(model.config.get_text_config(decoder=True).model_type)
    return None if name is None else RecurrentModules(model, name)
