"""The tables about transformers' classes say what the installed classes are like."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from actors.model.config.class_facts import (
    ACTIVATIONS,
    REFUSED_ON_TRIAL,
    WITH_BATCH_DELIVERED,
    WITH_CHUNKED_ATTENTION,
    WITH_LATENT_ATTENTION,
    WITH_POSITIONS_AFTER_PADDING,
    WITH_POSITIONS_BY_CACHE,
    WITH_RECURRENT_STATE,
    WITH_REPLACED_ATTENTION,
    WITH_WINDOW_IN_MASK,
    WITHOUT_ATTENTION_INTERFACE,
)


@pytest.mark.slow
def test_tables_name_the_model_types_whose_classes_are_so() -> None:
    classes: dict[str, Any] = {
        name: AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[name]] for name in sorted(_causal_types())
    }

    assert {n for n, c in classes.items() if not c._supports_attention_backend} == WITHOUT_ATTENTION_INTERFACE
    assert {n for n, c in classes.items() if c._is_stateful} == WITH_RECURRENT_STATE
    assert {n for n in _reached(classes) if _numbers_after_padding(classes[n])} == WITH_POSITIONS_AFTER_PADDING

    calls_it = {name for name in WITH_BATCH_DELIVERED if _calls_attention_function(classes[name])}
    assert calls_it == WITH_BATCH_DELIVERED - WITH_REPLACED_ATTENTION

    expands = {name for name, model_class in classes.items() if _makes_keys_of_latents(model_class)}
    assert expands >= WITH_LATENT_ATTENTION

    served = set(classes) - WITHOUT_ATTENTION_INTERFACE - WITH_RECURRENT_STATE - set(REFUSED_ON_TRIAL)
    by_cache = {n for n in served if "past_key_values.get_seq_length(self.layer_idx)" in _source(classes[n])}
    assert by_cache - _WITH_IMAGES == WITH_POSITIONS_BY_CACHE
    assert {n for n in served if "create_chunked_causal_mask(" in _source(classes[n])} - _WITH_IMAGES == (
        WITH_CHUNKED_ATTENTION
    )
    assert {
        name for name in served if _has_window_in_mask(name, classes[name])
    } - _NEVER_WINDOWED == WITH_WINDOW_IN_MASK


_NEVER_WINDOWED = {"got_ocr2", "moss_transcribe_diarize", "gemma4_unified_assistant", "gemma4_assistant"}
"""The models that are refused for their other inputs; their decoders are in other files."""


_WITH_IMAGES = {"llama4"}
"""The models that are refused for their images, and have the text model's class in their file."""


def test_the_activations_are_those_of_transformers() -> None:
    assert set(ACT2FN) == ACTIVATIONS


def _causal_types() -> set[str]:
    return set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING)


def _has_window_in_mask(name: str, model_class: type) -> bool:
    fields = {field.name for field in dataclasses.fields(CONFIG_MAPPING[name])}
    module = inspect.getmodule(model_class)
    assert module is not None
    calls_without_masks = re.sub(r"create_\w*mask[^)]*\)", "", inspect.getsource(module))
    return "sliding_window" in fields and "sliding_window=" not in calls_without_masks


def _reached(classes: dict[str, Any]) -> set[str]:
    return set(classes) - WITHOUT_ATTENTION_INTERFACE


def _numbers_after_padding(model_class: type) -> bool:
    module = inspect.getmodule(model_class)
    assert module is not None
    return "create_position_ids_from_input_ids" in inspect.getsource(module)


def _source(model_class: type) -> str:
    module = inspect.getmodule(model_class)
    assert module is not None
    return inspect.getsource(module)


def _makes_keys_of_latents(model_class: type) -> bool:
    return "= self.expand_kv(" in _source(model_class)


def _calls_attention_function(model_class: type) -> bool:
    module = inspect.getmodule(model_class)
    assert module is not None
    return "ALL_ATTENTION_FUNCTIONS.get_interface(" in inspect.getsource(module)
