"""Tells models apart by their last layer: token logits, a classification head, or nothing."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from actors.model.multimodal.families import vision_family

AutoClass = (
    type[AutoModel]
    | type[AutoModelForCausalLM]
    | type[AutoModelForImageTextToText]
    | type[AutoModelForSequenceClassification]
)

_CLASSIFIER_SUFFIX = "ForSequenceClassification"


class ModelKind(enum.Enum):
    """The kinds of models. Generating models return tokens and vectors; the other kinds return vectors only."""

    GENERATION = enum.auto()
    GENERATION_FROM_IMAGES = enum.auto()
    EMBEDDING = enum.auto()
    """A model without a head, which returns its last hidden states."""
    CLASSIFICATION = enum.auto()

    @property
    def generates(self) -> bool:
        """Whether a model of this kind generates tokens."""
        return self in (ModelKind.GENERATION, ModelKind.GENERATION_FROM_IMAGES)

    @property
    def auto_class(self) -> AutoClass:
        """The class of transformers that loads models of this kind."""
        match self:
            case ModelKind.GENERATION:
                return AutoModelForCausalLM
            case ModelKind.GENERATION_FROM_IMAGES:
                return AutoModelForImageTextToText
            case ModelKind.EMBEDDING:
                return AutoModel
            case ModelKind.CLASSIFICATION:
                return AutoModelForSequenceClassification


def kind_of(config: PretrainedConfig) -> ModelKind:
    """Return the kind of the class that the config names; without a class name, the model counts as generating."""
    name = (getattr(config, "architectures", None) or [""])[0]
    if name.endswith(_CLASSIFIER_SUFFIX):
        return ModelKind.CLASSIFICATION
    headless = MODEL_MAPPING_NAMES.get(str(config.model_type), ())
    if name and name in ((headless,) if isinstance(headless, str) else headless):
        return ModelKind.EMBEDDING
    return ModelKind.GENERATION if vision_family(config) is None else ModelKind.GENERATION_FROM_IMAGES


def has_class(config: PretrainedConfig) -> bool:
    """Whether transformers has a class of the model's kind for its model type."""
    names_by_kind: dict[ModelKind, Mapping[str, object]] = {
        ModelKind.GENERATION: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        ModelKind.GENERATION_FROM_IMAGES: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        ModelKind.EMBEDDING: MODEL_MAPPING_NAMES,
        ModelKind.CLASSIFICATION: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }
    return config.model_type in names_by_kind[kind_of(config)]
