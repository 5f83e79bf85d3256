"""Parsing of sampling parameters as people type them: name=value."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from cluster.client.options import Sampling, make_sampling_params

_NAMES: Final = tuple(sorted(Sampling.__annotations__))


def parse_assignments(words: Iterable[str], what: str = "parameters") -> dict[str, Any]:
    """Parse name=value words into fields of raypd.v1.SamplingParams, by name; an empty value becomes None.

    A value that can be read as JSON (0.7, true, ["a", "b"]) is JSON, and any other value is text.
    what: the name of the parameters in error messages
    Raises ValueError, with what is allowed.
    """
    assignments: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign or name not in _NAMES:
            raise ValueError(f"{what} are name=value, with one of the names {', '.join(_NAMES)}; not {word!r}")
        value = _value(name, text)
        if value is not None:
            _check(name, value)
        assignments[name] = value
    return assignments


def _value(name: str, text: str) -> Any:
    if not text:
        return None
    if Sampling.__annotations__[name].__forward_arg__ == "str":
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    is_one = name in ("stop_token_ids", "allowed_token_ids", "choice") and not isinstance(value, list)
    if name == "logit_bias" and isinstance(value, dict):
        return {int(token_id) if token_id.isdecimal() else token_id: bias for token_id, bias in value.items()}
    return [value] if is_one else value


def _check(name: str, value: Any) -> None:
    try:
        make_sampling_params({name: value})
    except TypeError as error:
        raise ValueError(str(error)) from error
