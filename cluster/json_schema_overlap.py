"""Whether schemas can have a value in common, as far as types and constants tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Final

from cluster.json_types import JSON, type_names_of

_MAX_REFERENCES: Final = 16


def are_disjoint(schemas: Sequence[JSON], root: JSON) -> bool:
    """Whether it is certain that no value is of two of the schemas. root: what $ref refers to."""
    resolved = [_resolve(schema, root) for schema in schemas]
    return all(_differ(first, second, root) for first, second in combinations(resolved, 2))


def _differ(first: JSON, second: JSON, root: JSON) -> bool:
    if not isinstance(first, dict) or not isinstance(second, dict):
        return first is False or second is False
    one, other = _constants(first), _constants(second)
    if one is not None and other is not None:
        return not one & other
    types, other_types = _type_names(first), _type_names(second)
    if types and other_types and not types & other_types:
        return True
    return bool(types == other_types == {"object"}) and _differ_by_property(first, second, root)


def _differ_by_property(first: dict[str, JSON], second: dict[str, JSON], root: JSON) -> bool:
    """Whether both must have a property whose constants tell them apart."""
    required = _required(first) & _required(second)
    for name in required:
        constants = [_constants(_resolve(_property(schema, name), root)) for schema in (first, second)]
        if constants[0] is not None and constants[1] is not None and not constants[0] & constants[1]:
            return True
    return False


def _constants(schema: JSON) -> set[str] | None:
    """All values of a schema, written as JSON; None if there are more than it lists."""
    if isinstance(schema, dict) and "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    if isinstance(schema, dict) and isinstance(values := schema.get("enum"), list):
        return {json.dumps(value, sort_keys=True) for value in values}
    return None


def _type_names(schema: dict[str, JSON]) -> set[str]:
    """The types of a schema's values, empty if it does not say; an integer is a number as well."""
    constants = _constants(schema)
    if constants is not None:
        return set().union(*(type_names_of(json.loads(constant)) for constant in constants))
    declared = schema.get("type", [])
    names = {str(name) for name in declared} if isinstance(declared, list) else {str(declared)}
    return names | {"integer", "number"} if names & {"integer", "number"} else names


def _required(schema: dict[str, JSON]) -> set[str]:
    required = schema.get("required")
    return {str(name) for name in required} if isinstance(required, list) else set()


def _property(schema: dict[str, JSON], name: str) -> JSON:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


def _resolve(schema: JSON, root: JSON) -> JSON:
    """Follow references; None if one leads nowhere, or in a circle."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = _find(reference, root)
    return None


def _find(reference: str, root: JSON) -> JSON:
    found = root
    for name in reference.split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
