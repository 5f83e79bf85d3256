"""Strict validation against the schemas of KubeRay's own CRDs, as its API server would do it (without CEL rules)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema
import yaml

CRDS: Final = Path(__file__).parents[4] / "shared" / "reference" / "crds"


@cache
def validator(kind: str) -> jsonschema.Draft7Validator:
    """For ray.io/v1 objects of this kind."""
    definition = yaml.load((CRDS / f"ray.io_{kind.lower()}s.yaml").read_text(), Loader=yaml.CSafeLoader)
    [version] = [one for one in definition["spec"]["versions"] if one["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    _make_strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(schema)


def _make_strict(schema: Any) -> None:  # JSON
    if isinstance(schema, list):
        for one in schema:
            _make_strict(one)
    if not isinstance(schema, dict):
        return
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
        schema.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if schema.get("type") == "object" and "properties" in schema and not is_open:
        schema["additionalProperties"] = False
    if isinstance(schema.get("required"), list):
        properties = schema.get("properties", {})
        schema["required"] = [name for name in schema["required"] if "default" not in properties.get(name, {})]
    for value in schema.values():
        _make_strict(value)
