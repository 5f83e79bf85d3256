"""Checks JSON schemas: they may only have what the grammar compiler understands exactly as the standard means it.

The compiler ignores other keywords, or follows only a part of their meaning, so that an output might not be valid. Such
schemas are refused, with the path of the keyword. Unknown keywords are annotations, as in the standard. Objects without
additionalProperties are closed, and their properties come in the schema's order: such outputs are valid too.
tests/actors/model/grammar/test_random_schemas.py compares schemas that pass here with a validator.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeGuard

from cluster.parameters.json_schema_overlap import Overlaps, TooMuchWork
from cluster.parameters.json_types import JSON, type_names_of

_NEVER: Final = frozenset(
    [
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "additionalItems"),
        *("dependencies", "dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef"),
    ]
)
_ONLY_FALSE: Final = frozenset(["uniqueItems", "unevaluatedItems", "unevaluatedProperties"])
_ALONE: Final = ("$ref", "allOf", "anyOf", "const", "enum", "oneOf")
_KEYWORDS_OF: Final = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    ),
}
_TYPE_OF_KEYWORD: Final = {keyword: name for name, keywords in _KEYWORDS_OF.items() for keyword in keywords}
_ASSERTIONS: Final = frozenset([*_ALONE, *_TYPE_OF_KEYWORD, "type"])
_MAX_ONE_OF: Final = 64
"""The most schemas of a oneOf. Each of them is compared with each."""
MAX_SCHEMAS: Final = 4096
"""The limit on schemas inside a schema. Each takes about 5 µs to check; a useful one has more than 16 characters."""
_MAX_PLACE_CHARS: Final = 200
_SCHEMA_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS: Final = ("prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMAS: Final = ("items", "additionalProperties", "propertyNames")
_ESCAPED_IN_JSON: Final = re.compile(r'"|\\(?:[\\nrtfv0c]|x[01]|x22|x5[cC]|u00[01]|u0022|u005[cC])')
"""Characters that occur in JSON strings only as escapes, for which a pattern has no form."""


@dataclass(frozen=True, slots=True)
class SchemaProblem:
    """A part of a schema that is refused. place: a JSON pointer to it"""

    place: str
    reason: str

    def __str__(self) -> str:
        place = self.place or "the schema"
        return f"{place if len(place) <= _MAX_PLACE_CHARS else place[:_MAX_PLACE_CHARS] + '…'}: {self.reason}"


def find_unsupported(schema: JSON, max_depth: int) -> Iterator[SchemaProblem]:
    """Yield the problems of a schema, the outermost first. This takes at most some 30 ms, whatever the schema is."""
    return _walk(_Node(schema, None, ()), max_depth, _Check(Overlaps(schema)))


@dataclass(slots=True)
class _Check:
    overlaps: Overlaps
    num_schemas: int = 0


@dataclass(frozen=True, slots=True)
class _Node:
    schema: JSON
    parent: _Node | None
    names: tuple[str, ...]

    def child(self, *names: str) -> _Node:
        value = self.schema
        for name in names:
            assert isinstance(value, dict | list), "only what is there has children"
            value = value[name] if isinstance(value, dict) else value[int(name)]
        return _Node(value, self, names)

    @property
    def place(self) -> str:
        """The node's JSON pointer. It is made only for problems, because names can be long and schemas deep."""
        inside = "" if self.parent is None else self.parent.place
        return inside + "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in self.names)


def _walk(node: _Node, depth: int, check: _Check) -> Iterator[SchemaProblem]:
    check.num_schemas += 1
    if check.num_schemas >= MAX_SCHEMAS:
        if check.num_schemas == MAX_SCHEMAS:
            yield SchemaProblem(node.place, f"too many schemas: at most {MAX_SCHEMAS - 1} in all")
        return
    schema = node.schema
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield SchemaProblem(node.place, "a schema is an object or a boolean")
        return
    if depth == 0:
        yield SchemaProblem(node.place, "too many schemas inside each other")
        return
    for problem in _problems_of(schema, check.overlaps):
        yield SchemaProblem(node.place, problem)
    for child in _children(node, schema):
        yield from _walk(child, depth - 1, check)
        if check.num_schemas >= MAX_SCHEMAS:
            return


def _children(node: _Node, schema: Mapping[str, JSON]) -> Iterator[_Node]:
    for keyword in _SCHEMAS:
        if keyword in schema:
            yield node.child(keyword)
    for keyword in _SCHEMA_MAPS:
        if isinstance(named := schema.get(keyword), dict):
            yield from (node.child(keyword, name) for name in named)
    for keyword in _SCHEMA_LISTS:
        if isinstance(listed := schema.get(keyword), list):
            yield from (node.child(keyword, str(index)) for index in range(len(listed)))


def _problems_of(schema: Mapping[str, JSON], overlaps: Overlaps) -> Iterator[str]:
    for keyword in sorted(schema.keys() & _NEVER):
        yield f"{keyword} is not supported"
    for keyword in sorted(schema.keys() & _ONLY_FALSE):
        if schema[keyword] is not False:
            yield f"{keyword} is not supported"
    if alone := [keyword for keyword in _ALONE if keyword in schema]:
        yield from _problems_of_alone(schema, alone[0], overlaps)
    else:
        yield from _problems_of_types(schema)
        yield from _problems_of_strings(schema)
        yield from _problems_of_numbers(schema)
        yield from _problems_of_objects(schema)


def _problems_of_alone(schema: Mapping[str, JSON], keyword: str, overlaps: Overlaps) -> Iterator[str]:
    """Yield the problems of a schema with a keyword beside which the compiler ignores all others."""
    allowed = {keyword, "type"} if keyword in ("const", "enum") else {keyword}
    if others := sorted((schema.keys() & _ASSERTIONS) - allowed):
        yield f"{keyword} is not supported beside {', '.join(others)}"
    value = schema[keyword]
    if keyword in ("const", "enum") and "type" in schema:
        values = value if keyword == "enum" and isinstance(value, list) else [value]
        types = _types(schema)
        if not all(type_names_of(one) & types for one in values):
            yield f"{keyword} has values that are not of its type"
    elif keyword == "$ref" and not (isinstance(value, str) and (value == "#" or value.startswith("#/"))):
        yield "$ref is only supported within the schema: # or #/…"
    elif keyword == "allOf" and not (isinstance(value, list) and len(value) == 1):
        yield "allOf is only supported with one schema"
    elif keyword == "oneOf":
        yield from _problems_of_one_of(value, overlaps)


def _problems_of_one_of(value: JSON, overlaps: Overlaps) -> Iterator[str]:
    try:
        is_clear = isinstance(value, list) and len(value) <= _MAX_ONE_OF and overlaps.are_disjoint(value)
    except TooMuchWork:
        yield "oneOf would take too many comparisons, with what came before; use anyOf, or shorter lists of constants"
        return
    if not is_clear:
        yield "oneOf is only supported where types or constants show that no value is of two of its schemas; use anyOf"


def _problems_of_types(schema: Mapping[str, JSON]) -> Iterator[str]:
    if "type" in schema:
        return
    needed = {_TYPE_OF_KEYWORD[keyword] for keyword in schema.keys() & _TYPE_OF_KEYWORD}
    if needed and needed not in ({"object"}, {"array"}):
        keywords = ", ".join(sorted(schema.keys() & _TYPE_OF_KEYWORD))
        yield f"{keywords} needs a type beside it"


def _problems_of_strings(schema: Mapping[str, JSON]) -> Iterator[str]:
    has_length = "minLength" in schema or "maxLength" in schema
    shaping = [keyword for keyword in ("pattern", "format") if keyword in schema]
    if len(shaping) + has_length > 1:
        yield "of pattern, format, and minLength with maxLength, only one is supported at a time"
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and _has_escaped_character(pattern):
        yield "pattern is not supported with quotes, backslashes or control characters as such"


def _has_escaped_character(pattern: str) -> bool:
    tokens = re.findall(r"\\(?:x..|u....|.)|[^\\]", pattern, re.DOTALL)
    return any(_ESCAPED_IN_JSON.match(token) or token < " " for token in tokens)


def _problems_of_numbers(schema: Mapping[str, JSON]) -> Iterator[str]:
    if "multipleOf" not in schema:
        return
    if _types(schema) & {"integer", "number"} != {"integer"}:
        yield "multipleOf is only supported for integers"
    if schema.keys() & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}:
        yield "multipleOf is not supported together with limits"


def _problems_of_objects(schema: Mapping[str, JSON]) -> Iterator[str]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not _are_names(required):
        yield "properties is an object and required a list of names"
        return
    if missing := [name for name in required if name not in properties]:
        yield f"required names {reprlib.repr(missing[0])}, which is not in properties"
    others = schema.get("additionalProperties", False)
    patterns, names = schema.get("patternProperties"), schema.get("propertyNames")
    if patterns is not None and (properties or others is not False or names is not None or not _has_one(patterns)):
        yield "patternProperties is only supported alone, with one pattern"
    if names is not None and properties:
        yield "propertyNames is not supported together with properties"
    minimum = schema.get("minProperties", 0)
    has_free_names = not properties or others is not False
    if isinstance(minimum, int | float) and has_free_names and minimum > max(1, len(required)):
        yield "minProperties is only supported up to what is required, where names are free: they could repeat"


def _are_names(value: JSON) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _has_one(patterns: JSON) -> bool:
    return isinstance(patterns, dict) and len(patterns) == 1


def _types(schema: Mapping[str, JSON]) -> set[str]:
    declared = schema.get("type", [])
    return {str(name) for name in declared} if isinstance(declared, list) else {str(declared)}
