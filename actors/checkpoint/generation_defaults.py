"""Reads from generation_config.json how a model's tokens are sampled and when its answers end.

A value in the file is the default of requests that do not set it. As in vLLM, only values that are in the file count;
transformers' own defaults (such as top_k = 50) and do_sample do not.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FILE_NAME: Final = "generation_config.json"


class InvalidGenerationConfig(ValueError):
    """The file cannot be used; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling parameters for requests that do not set them. None: raypd's own default applies.

    max_tokens: the file's max_new_tokens
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


NO_DEFAULTS: Final = GenerationDefaults()


@dataclass(frozen=True, slots=True)
class GenerationFile:
    """The settings that raypd takes from generation_config.json.

    eos_token_ids: tokens that end an answer; None if the file names none
    """

    defaults: GenerationDefaults
    eos_token_ids: tuple[int, ...] | None


def read_generation_file(directory: Path) -> GenerationFile:
    """Read the file of a checkpoint; if it is missing, return no defaults. Raises InvalidGenerationConfig."""
    path = directory / FILE_NAME
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return GenerationFile(GenerationDefaults(), None)
    except OSError as error:
        raise InvalidGenerationConfig(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidGenerationConfig(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidGenerationConfig(f"{str(path)!r} must be a JSON object")
    file = _File(path, content)
    max_tokens = file.whole("max_new_tokens", 1, 2**31 - 1)
    top_k = file.whole("top_k", -1, 2**31 - 1)
    return GenerationFile(
        GenerationDefaults(
            temperature=file.number("temperature", 0.0, 2.0**31),
            top_k=None if top_k is None else max(top_k, 0),
            top_p=file.number("top_p", 0.0, 1.0, is_above=True),
            min_p=file.number("min_p", 0.0, 1.0),
            repetition_penalty=file.number("repetition_penalty", 0.0, 10.0, is_above=True),
            max_tokens=max_tokens,
        ),
        file.token_ids("eos_token_id"),
    )


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    content: dict[str, Any]

    def number(self, name: str, low: float, high: float, *, is_above: bool = False) -> float | None:
        """Return a number from low to high; None if the file has none. is_above: low itself is not allowed

        Raises InvalidGenerationConfig.
        """
        value = self.content.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high or (is_above and value == low):
            raise self._refusal(name, f"a number {'above' if is_above else 'from'} {low:g} to {high:g}")
        return float(value)

    def whole(self, name: str, low: int, high: int) -> int | None:
        """Return a whole number from low to high; None if the file has none. Raises InvalidGenerationConfig."""
        value = self.content.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._refusal(name, f"a whole number from {low} to {high}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """Return one token id, or a list of token ids, as a tuple; None if the file has none.

        Raises InvalidGenerationConfig.
        """
        value = self.content.get(name)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in values):
            raise self._refusal(name, "a token id or a list of them")
        return tuple(values)

    def _refusal(self, name: str, wanted: str) -> InvalidGenerationConfig:
        found = json.dumps(self.content[name])[:80]
        return InvalidGenerationConfig(f"{str(self.path)!r}: {name} is {found}, and must be {wanted}")
