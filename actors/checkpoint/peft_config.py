"""Reads PEFT's adapter_config.json, and refuses adapters that raypd cannot serve exactly.

The formulas are PEFT's own (peft/tuners/lora/layer.py, update_layer; peft/utils/other.py, get_pattern_key):
scaling = alpha / r, or alpha / sqrt(r) with use_rslora; rank and alpha may be given for modules that match a pattern.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actors.errors import TravellingError

NumberT = TypeVar("NumberT", int, float)

# Settings beside _PeftConfig's that do not change the output of a trained adapter.
_HARMLESS: Final = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)
_REFUSED: Final = {
    "use_dora": "DoRA is not served",
    "modules_to_save": "it replaces whole modules of the model (modules_to_save), which is not served",
    "lora_bias": "it has biases of its own (lora_bias), which is not served",
    "target_parameters": "it adapts parameters that are no linear layers (target_parameters), which is not served",
    "trainable_token_indices": "it changes embeddings (trainable_token_indices), which is not served",
    "layer_replication": "it repeats layers of the model (layer_replication), which is not served",
    "alora_invocation_tokens": "it begins at certain tokens only (aLoRA), which is not served",
}
# Adapters that were initialized by one of these methods belong to base weights that the method has changed.
_CHANGED_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga", "milora")


class AdapterRefused(TravellingError):
    """The adapter cannot be served: files are missing, broken or too large, or a setting is not served.

    The message says which.
    """


class _PeftConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")

    peft_type: str
    task_type: str | None = None
    r: int = Field(8, ge=1)
    lora_alpha: float = Field(8, allow_inf_nan=False)
    target_modules: str | list[str] | None = None
    rank_pattern: dict[str, Any] | None = None
    alpha_pattern: dict[str, Any] | None = None
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of a LoRA adapter.

    rank, alpha:    for modules that no pattern matches
    target_modules: a regular expression that module names have to match, or the last parts of module names
    rank_pattern, alpha_pattern: regular expressions for the ends of module names, and the value for matching modules
    """

    rank: int
    alpha: float
    use_rslora: bool
    target_modules: str | tuple[str, ...]
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: bytes, max_rank: int) -> AdapterConfig:
        """Read an adapter_config.json. Raises AdapterRefused."""
        try:
            given = _PeftConfig.model_validate_json(text)
        except ValidationError as error:
            mistakes = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
            raise AdapterRefused(f"adapter_config.json: {mistakes}") from error
        if (reason := _find_refusal(given)) is not None:
            raise AdapterRefused(reason)
        config = cls(
            rank=given.r,
            alpha=given.lora_alpha,
            use_rslora=given.use_rslora,
            target_modules=_targets(given.target_modules),
            rank_pattern=tuple((key, _rank(key, value)) for key, value in (given.rank_pattern or {}).items()),
            alpha_pattern=tuple((key, _alpha(key, value)) for key, value in (given.alpha_pattern or {}).items()),
        )
        if config.max_rank > max_rank:
            raise AdapterRefused(f"its rank is {config.max_rank}, and lora.max_lora_rank allows {max_rank}")
        _check_patterns(config)
        return config

    @property
    def max_rank(self) -> int:
        """The highest rank of any of the adapter's modules."""
        return max([self.rank, *(rank for _, rank in self.rank_pattern)])

    def targets(self, module: str) -> bool:
        """Return whether the adapter changes a module. module: the module's name in the model"""
        if isinstance(self.target_modules, str):
            is_all = self.target_modules == "all-linear"
            return is_all or re.fullmatch(self.target_modules, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in self.target_modules)

    def rank_of(self, module: str) -> int:
        """Return the adapter's rank for a module."""
        return _of_pattern(self.rank_pattern, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """Return the factor of the adapter's product B A x for this module (LoRA, arXiv 2106.09685, section 4.1)."""
        rank, alpha = self.rank_of(module), _of_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _find_refusal(given: _PeftConfig) -> str | None:
    if given.peft_type != "LORA":
        return f"its peft_type is {given.peft_type}; only LORA is served"
    if given.task_type not in (None, "CAUSAL_LM"):
        return f"its task_type is {given.task_type}; only CAUSAL_LM is served"
    if given.bias != "none":
        return f"it changes biases (bias: {given.bias}), which is not served"
    init = given.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(_CHANGED_BASE):
        return f"it belongs to changed base weights (init_lora_weights: {init}); convert it to a plain LoRA first"
    # An unknown option may change the output, so only options known to be harmless are ignored.
    for name, value in (given.model_extra or {}).items():
        if name == "loftq_config" or name in _HARMLESS or not value:
            continue
        return _REFUSED.get(name, f"it uses {name}, which is not served")
    return None


def _targets(given: str | list[str] | None) -> str | tuple[str, ...]:
    if not given:
        raise AdapterRefused("it names no target_modules")
    return given if isinstance(given, str) else tuple(given)


def _rank(key: str, value: Any) -> int:  # Any: a value of parsed JSON
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AdapterRefused(f"rank_pattern has {value!r} for {key!r}, which is no rank")
    return value


def _alpha(key: str, value: Any) -> float:  # Any: a value of parsed JSON
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise AdapterRefused(f"alpha_pattern has {value!r} for {key!r}, which is no number")
    return float(value)


def _check_patterns(config: AdapterConfig) -> None:
    patterns = [key for key, _ in (*config.rank_pattern, *config.alpha_pattern)]
    if isinstance(config.target_modules, str):
        patterns.append(config.target_modules)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterRefused(f"{pattern!r} is not a regular expression: {error}") from error


def _of_pattern(patterns: Iterable[tuple[str, NumberT]], module: str, otherwise: NumberT) -> NumberT:
    for pattern, value in patterns:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise
