"""Makes the OpenAPI document of the classes that read bodies and write answers, and a page that shows the document."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
from pydantic.json_schema import models_json_schema

from cluster.api.http.requests import MAX_TIMEOUT_S, TIMEOUT_HEADER, Body, WorkBody
from cluster.api.http.responses import ErrorBody
from cluster.api.shared.version import server_version

Document: TypeAlias = dict[str, Any]  # JSON in the shape that the OpenAPI specification defines

_REFERENCE: Final = "#/components/schemas/{name}"
_TIMEOUT: Final = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "description": "Timeout of the call in seconds, like timeout in its body; the lesser of the two applies.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
}
_ERRORS: Final = {
    400: "The request cannot be served as it is.",
    401: "No valid token.",
    403: "The token does not permit this call.",
    404: "No such model is served.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The content type is not JSON.",
    421: "The Host header names no host of this ingress.",
    429: "A limit is reached; the header retry-after says when to retry.",
    500: "An error inside the server.",
    503: "No engine serves, or this ingress is about to close or has too many connections.",
    504: "The request's deadline passed.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of the API, for the document.

    answer: the type of its answer with status 200; None: text
    stream: the type of each event, if the answer may be a stream
    """

    path: str
    method: str
    summary: str
    body: type[Body] | None
    answer: type[msgspec.Struct] | None
    stream: type[msgspec.Struct] | None = None
    errors: Sequence[int] = (401, 403, 421, 429, 500, 503)
    parameters: Sequence[str] = ()


_EVENT: Final = {
    "type": "object",
    "description": "One event: a chunk as JSON, and at the end [DONE].",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
"""The description of a stream: before OpenAPI 3.2 the schema of a stream is the schema of one event."""


def openapi(operations: Iterable[Operation]) -> Document:
    """Return the OpenAPI document of operations."""
    operations = list(operations)
    bodies = [(operation.body, "validation") for operation in operations if operation.body is not None]
    _, models = models_json_schema(bodies, ref_template=_REFERENCE.replace("name", "model"))  # type: ignore[arg-type]  # a Literal of its own
    kinds = {kind for one in operations for kind in (one.answer, one.stream) if kind is not None} | {ErrorBody}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    _, answers = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
    paths: Document = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "raypd", "version": server_version(), "description": "OpenAI's API, with vLLM's parameters."},
        "paths": paths,
        "components": {
            # Where a body and an answer share a name, the body's schema is renamed.
            "schemas": answers | _apart(models["$defs"], answers),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def page(document: Document) -> str:
    """Return a page that shows the document to people. The page loads nothing from anywhere."""
    rows = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = body.get("$ref", "").rpartition("/")[2]
            fields = document["components"]["schemas"].get(name, {}).get("properties", {})
            shown = "".join(f"<tr><td><code>{html.escape(field)}</code><td>{_kind(of)}" for field, of in fields.items())
            rows.append(
                f"<details><summary><code>{method.upper()} {html.escape(path)}</code> "
                f"{html.escape(operation['summary'])}</summary><table>{shown}</table></details>"
            )
    return (
        "<!doctype html><meta charset=utf-8><title>raypd</title>"
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "summary{padding:.4em 0;cursor:pointer}td{padding:.1em 1em .1em 0;vertical-align:top}</style>"
        "<h1>raypd</h1><p>OpenAI's API, with vLLM's parameters. <a href=\"openapi.json\">openapi.json</a></p>"
        + "".join(rows)
    )


def _operation(operation: Operation) -> Document:
    content: Document = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": {"$ref": _REFERENCE.format(name=operation.answer.__name__)}}
    if operation.stream is not None:
        content["text/event-stream"] = {"schema": _EVENT}
    if not content:
        content = {"text/plain": {"schema": {"type": "string"}}}
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(name="ErrorBody")}}}
    responses: Document = {"200": {"description": "Done.", "content": content}}
    statuses = [*operation.errors, *((400, 404, 408, 413, 415, 504) if operation.body is not None else ())]
    for status in sorted(statuses):
        responses[str(status)] = {"description": _ERRORS[status], "content": error}
    described: Document = {
        "summary": operation.summary,
        "operationId": operation.path.strip("/").replace("/", "_").replace("{", "").replace("}", ""),
        "responses": responses,
    }
    if operation.body is not None:
        schema = {"$ref": _REFERENCE.format(name=_body_name(operation.body))}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    parameters: list[Document] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in operation.parameters
    ]
    if operation.body is not None and issubclass(operation.body, WorkBody):
        parameters.append(_TIMEOUT)
    if parameters:
        described["parameters"] = parameters
    return described


def _body_name(body: type[Body]) -> str:
    return body.__name__


def _apart(models: Document, answers: Document) -> Document:
    """Return the schemas of bodies; those with the name of an answer's schema are renamed."""
    text = json.dumps(models)
    for name in models.keys() & answers.keys():
        text = text.replace(f'"#/components/schemas/{name}"', f'"#/components/schemas/{name}Input"')
    moved: Document = json.loads(text)
    return {(f"{name}Input" if name in answers else name): schema for name, schema in moved.items()}


def _kind(schema: Document) -> str:
    """Return a field's type in a few words."""
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "$ref" in schema:
        return html.escape(schema["$ref"].rpartition("/")[2])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if "const" in schema or "enum" in schema:
        return html.escape(" or ".join(json.dumps(one) for one in schema.get("enum", [schema.get("const")])))
    return html.escape(str(schema.get("type", "any")))
