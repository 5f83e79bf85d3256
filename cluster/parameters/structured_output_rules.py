"""Checks the form that a request wants its output to have. Whether a grammar compiles, an engine finds out later."""

from __future__ import annotations

import functools
import hashlib
import json
import reprlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Final

from actors.core.requests.sampling_params import StructuredOutputParams
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.json_schema_rules import find_unsupported
from cluster.parameters.json_types import JSON
from cluster.parameters.sampling_options import SamplingOptions
from cluster.parameters.sampling_rules import Violations
from cluster.settings.input_limits import InputLimits

_MAX_PROBLEMS: Final = 8
_MAX_REMEMBERED_SCHEMAS: Final = 64
"""The number of schemas whose problems are cached, by the hashes of their texts."""


def check_structured_output(
    options: SamplingOptions, *, has_end: bool, limits: InputLimits, violations: Violations
) -> None:
    """Check the form of the output. has_end: whether the model has an end-of-sequence token"""
    params = options.structured_output
    if params is None:
        return
    field = field_of(params)
    violations.require(has_end, field, params.value, "none, for a model that has no end-of-sequence token")
    allowed = f"not together with {params.kind}: the output ends when it is complete"
    violations.require(not options.ignore_eos, "sampling_params.ignore_eos", options.ignore_eos, allowed)
    violations.require(not options.min_tokens, "sampling_params.min_tokens", options.min_tokens, allowed)
    if len(params.value) > limits.max_grammar_chars:
        violations.add(field, f"{len(params.value)} characters long", f"at most {limits.max_grammar_chars} characters")
        return
    match params.kind:
        case "json_schema":
            _check_schema(field, params.value, limits.max_schema_depth, violations)
        case "json_object":
            violations.require(params.value == "", field, False, "true, or not given")
        case "choice":
            choices: list[str] = json.loads(params.value)
            is_allowed = 1 <= len(choices) <= limits.max_choices and all(choices)
            violations.require(is_allowed, field, choices, f"1 to {limits.max_choices} texts, none of them empty")
        case "regex" | "grammar":
            violations.require(params.value != "", field, params.value, "at least one character")


def remember_schema(text: str, limits: InputLimits) -> None:
    """Find the problems of a schema, so that check_structured_output() does not have to. Any thread may do it."""
    _remembered().problems(text, limits.max_schema_depth)


def field_of(params: StructuredOutputParams) -> str:
    """Return the name of the request's field that asks for a form."""
    return f"sampling_params.{params.kind}"


def refused_by_compiler(params: StructuredOutputParams, reason: str) -> InvalidRequest:
    """Return the error for a grammar that engines cannot compile, or cannot continue. reason: the engine's message"""
    return InvalidRequest(
        FieldViolation(field_of(params), reprlib.repr(params.value), f"what engines can follow: {reason}")
    )


def _check_schema(field: str, text: str, max_depth: int, violations: Violations) -> None:
    for problem in _remembered().problems(text, max_depth):
        violations.add(field, reprlib.repr(text), problem)


class RememberedSchemas:
    """Remembers the problems of the schemas that were used last, because many requests have the same schema.

    It keeps the hash of a schema's text, not the text: 64 texts of clients may have 16 MiB. Several threads may use it.
    """

    def __init__(self, find: Callable[[str, int], tuple[str, ...]], max_schemas: int) -> None:
        """find: finds the problems of a schema's text with a maximum depth; max_schemas: how many are remembered"""
        self._find = find
        self._max_schemas = max_schemas
        self._lock = threading.Lock()
        self._problems: OrderedDict[tuple[bytes, int], tuple[str, ...]] = OrderedDict()

    def problems(self, text: str, max_depth: int) -> tuple[str, ...]:
        """Return the problems of a schema."""
        key = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=32).digest(), max_depth
        with self._lock:
            problems = self._problems.get(key)
        if problems is None:
            problems = self._find(text, max_depth)
        with self._lock:
            self._problems[key] = problems
            self._problems.move_to_end(key)
            if len(self._problems) > self._max_schemas:
                self._problems.popitem(last=False)
        return problems


@functools.cache
def _remembered() -> RememberedSchemas:
    """Return what all ingresses of this process share."""
    return RememberedSchemas(_schema_problems, _MAX_REMEMBERED_SCHEMAS)


def _schema_problems(text: str, max_depth: int) -> tuple[str, ...]:
    try:
        schema: JSON = json.loads(text, parse_constant=_refuse_constant)
        if not isinstance(schema, dict):
            return ("a JSON schema, which is an object",)
        return tuple(map(str, islice(find_unsupported(schema, max_depth), _MAX_PROBLEMS)))
    except (ValueError, RecursionError) as error:
        return (f"a JSON schema as JSON text: {error}",)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
