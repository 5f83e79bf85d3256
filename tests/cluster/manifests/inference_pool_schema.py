"""The fields of inference.networking.k8s.io/v1 InferencePools, as the API's documentation defines them (November 2026).

In our own words: names, types and ranges. A field that is not here is refused, so whoever uses one more looks it up
there first.
"""

from __future__ import annotations

from typing import Any, Final

import jsonschema

_NAME: Final = {"type": "string", "minLength": 1, "maxLength": 253}
_LABEL_VALUE: Final = {"type": "string", "maxLength": 63, "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}
_PORT: Final = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
    "required": ["number"],
    "additionalProperties": False,
}


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_SPEC: Final = _object(
    ("selector", "targetPorts", "endpointPickerRef"),
    selector=_object(
        ("matchLabels",),
        matchLabels={"type": "object", "additionalProperties": _LABEL_VALUE, "maxProperties": 64},
    ),
    targetPorts={"type": "array", "items": _PORT, "minItems": 1, "maxItems": 8},
    endpointPickerRef=_object(
        ("name",),
        group={"type": "string", "maxLength": 253},
        kind={"type": "string", "minLength": 1, "maxLength": 63},
        name=_NAME,
        port=_PORT,
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)


def inference_pool_validator() -> jsonschema.Draft7Validator:
    """For InferencePools."""
    kind = {"enum": ["InferencePool"]}
    version = {"enum": ["inference.networking.k8s.io/v1"]}
    metadata = {"type": "object", "required": ["name", "namespace"]}
    required = ("apiVersion", "kind", "metadata", "spec")
    return jsonschema.Draft7Validator(_object(required, apiVersion=version, kind=kind, metadata=metadata, spec=_SPEC))
