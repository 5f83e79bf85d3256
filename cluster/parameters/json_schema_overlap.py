"""Finds out by types and constants whether schemas can have a value in common, with a bounded number of comparisons.

A schema of some kilobytes can need billions of comparisons: of every pair of a oneOf's schemas, many of which can refer
to the same long lists. So the facts of a schema are cached, and comparisons are counted over the whole check.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from cluster.parameters.json_types import JSON, type_names_of

_MAX_REFERENCES: Final = 16
_PAIR_COST: Final = 20
"""The cost of a comparison of two schemas, in look-ups of a value in a set: about a microsecond."""
MAX_WORK: Final = 200_000
"""The most work of one check, about 10 ms: five oneOf of 64 schemas each, or look-ups of 200 000 values."""


class TooMuchWork(Exception):
    """The schemas of one check need more comparisons than are allowed."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """The facts by which a schema can be told from others.

    is_never:      whether no value satisfies the schema
    constants:     all values that satisfy it, as JSON; None if the schema does not list them
    type_names:    the types of its values; empty if it names none. An integer is a number as well
    required:      for each required property with constants these constants
    """

    is_never: bool = False
    constants: frozenset[str] | None = None
    type_names: frozenset[str] = frozenset()
    required: Mapping[str, frozenset[str]] | None = None


class Overlaps:
    """Compares the schemas inside one root schema, each of which it reads once."""

    def __init__(self, root: JSON, max_work: int = MAX_WORK) -> None:
        """Begin a check. root: the schema that $ref refers to; max_work: the most comparisons"""
        self._root = root
        self._work_left = max_work
        # The keys are identities of schemas, which the root keeps alive.
        self._facts: dict[int, _Facts] = {}
        self._constants: dict[int, frozenset[str] | None] = {}
        self._found: dict[str, JSON] = {}

    def are_disjoint(self, schemas: Sequence[JSON]) -> bool:
        """Whether it is certain that no value satisfies two of the schemas. Raises TooMuchWork."""
        facts = [self._facts_of(self._resolve(schema)) for schema in schemas]
        return all(self._differ(first, second) for first, second in combinations(facts, 2))

    def _differ(self, first: _Facts, second: _Facts) -> bool:
        self._spend(_PAIR_COST)
        if first.is_never or second.is_never:
            return True
        if first.constants is not None and second.constants is not None:
            return self._have_none_in_common(first.constants, second.constants)
        types, other_types = first.type_names, second.type_names
        if types and other_types and not types & other_types:
            return True
        return bool(types == other_types == {"object"}) and self._differ_by_property(first, second)

    def _differ_by_property(self, first: _Facts, second: _Facts) -> bool:
        """Whether both schemas require a property whose constants differ."""
        fewer, more = sorted((first.required or {}, second.required or {}), key=len)
        for name, constants in fewer.items():
            self._spend(1)
            if name in more and self._have_none_in_common(constants, more[name]):
                return True
        return False

    def _have_none_in_common(self, first: frozenset[str], second: frozenset[str]) -> bool:
        self._spend(min(len(first), len(second)))
        return first.isdisjoint(second)

    def _spend(self, work: int) -> None:
        self._work_left -= work
        if self._work_left < 0:
            raise TooMuchWork

    def _facts_of(self, schema: JSON) -> _Facts:
        if not isinstance(schema, dict):
            return _Facts(is_never=schema is False)
        facts = self._facts.get(id(schema))
        if facts is None:
            constants = self._constants_of(schema)
            facts = _Facts(False, constants, _type_names(schema), self._required_of(schema))
            self._facts[id(schema)] = facts
        return facts

    def _required_of(self, schema: dict[str, JSON]) -> dict[str, frozenset[str]]:
        required, properties = schema.get("required"), schema.get("properties")
        if not isinstance(required, list) or not isinstance(properties, dict):
            return {}
        found = {}
        for name in required:
            constants = self._constants_of(self._resolve(properties.get(str(name))))
            if constants is not None:
                found[str(name)] = constants
        return found

    def _constants_of(self, schema: JSON) -> frozenset[str] | None:
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._constants:
            values = _values(schema)
            self._constants[id(schema)] = None if values is None else frozenset(map(_written, values))
        return self._constants[id(schema)]

    def _resolve(self, schema: JSON) -> JSON:
        """Follow references; None if one leads nowhere, or in a circle."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
                return schema
            if reference not in self._found:
                self._found[reference] = _find(reference, self._root)
            schema = self._found[reference]
        return None


def _values(schema: dict[str, JSON]) -> list[JSON] | None:
    """Return all values that satisfy a schema; None if it does not list them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _written(value: JSON) -> str:
    """Return a value as JSON, the same text for values that are equal in JSON schema."""
    return json.dumps(_with_equal_numbers(value), sort_keys=True)


def _with_equal_numbers(value: JSON) -> JSON:
    """Return a value with whole numbers as integers, because 1.0 equals 1 in JSON schema."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_equal_numbers(one) for one in value]
    if isinstance(value, dict):
        return {name: _with_equal_numbers(one) for name, one in value.items()}
    return value


def _type_names(schema: dict[str, JSON]) -> frozenset[str]:
    values = _values(schema)
    if values is not None:
        return frozenset().union(*map(type_names_of, values))
    declared = schema.get("type", [])
    names = {str(name) for name in declared} if isinstance(declared, list) else {str(declared)}
    return frozenset(names | {"integer", "number"} if names & {"integer", "number"} else names)


def _find(reference: str, root: JSON) -> JSON:
    found = root
    for name in reference.split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
