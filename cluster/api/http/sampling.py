"""Reads the sampling parameters of a body, which cluster/parameters/sampling_options.py declares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from actors.core.requests.sampling_params import StructuredOutputParams
from cluster.api.http.requests import GenerationBody, JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.json_types import JSON
from cluster.parameters.sampling_options import PARAMETERS, SamplingOptions

NAMES: Final[Mapping[str, str]] = {"text": "prompt", "token_ids": "prompt", "chat": "messages"}
"""Fields that have another name over HTTP."""
_BY_NAME: Final = sorted(PARAMETERS.keys() & GenerationBody.model_fields.keys() - {"max_tokens", "prompt_logprobs"})
"""The parameters that are read by their names; max_tokens and prompt_logprobs depend on the kind of call."""
_STRUCTURED_KINDS: Final = ("json_schema", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The form that the output has to have, and the body's parameter that asks for it."""

    params: StructuredOutputParams
    parameter: str

    @property
    def names(self) -> dict[str, str]:
        """The body's name of each of Serving's fields: those of NAMES, and the parameter that asks for the form."""
        return dict(NAMES) | dict.fromkeys(_STRUCTURED_KINDS, self.parameter)


def sampling_of(
    body: GenerationBody,
    form: OutputForm | None,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingOptions:
    """Read the options of a request, which Serving checks. The caller knows the numbers of this kind of call."""
    given: dict[str, Any] = {}
    for name in _BY_NAME:
        value = getattr(body, name)
        if value is not None:
            given[name] = tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    return SamplingOptions(**given, structured_output=form.params if form is not None else None)


def form_of(body: GenerationBody) -> OutputForm | None:
    """Return the form that the output has to have; None: any. Raises InvalidRequest if several parameters name one."""
    forms = [form for form in _forms(body) if form is not None]
    if len(forms) > 1:
        names = " and ".join(form.parameter for form in forms)
        raise InvalidRequest(FieldViolation(forms[1].parameter, "given too", f"one of {names}"))
    return forms[0] if forms else None


def _forms(body: GenerationBody) -> list[OutputForm | None]:
    structured = body.structured_outputs
    return [
        _response_format(body),
        _json_schema(body.guided_json, "guided_json"),
        _form("regex", body.guided_regex, "guided_regex"),
        _choice(body.guided_choice, "guided_choice"),
        _form("grammar", body.guided_grammar, "guided_grammar"),
        OutputForm(StructuredOutputParams("json_object"), "guided_json_object") if body.guided_json_object else None,
        *(_structured_outputs(structured) if structured is not None else []),
    ]


def _response_format(body: GenerationBody) -> OutputForm | None:
    name = "response_format"
    match body.response_format:
        case JsonObjectFormat():
            return OutputForm(StructuredOutputParams("json_object"), name)
        case JsonSchemaFormat(json_schema=wanted):
            if wanted.json_schema is None:
                raise InvalidRequest(FieldViolation(f"{name}.json_schema.schema", "missing", "a JSON schema"))
            return _json_schema(wanted.json_schema, name)
        case _:
            return None


def _structured_outputs(wanted: StructuredOutputs) -> list[OutputForm | None]:
    name = "structured_outputs"
    return [
        _json_schema(wanted.json_, f"{name}.json"),
        _form("regex", wanted.regex, f"{name}.regex"),
        _choice(wanted.choice, f"{name}.choice"),
        _form("grammar", wanted.grammar, f"{name}.grammar"),
        OutputForm(StructuredOutputParams("json_object"), f"{name}.json_object") if wanted.json_object else None,
    ]


def _json_schema(schema: str | Mapping[str, JSON] | None, parameter: str) -> OutputForm | None:
    text = schema if schema is None or isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return _form("json_schema", text, parameter)


def _choice(choices: list[str] | None, parameter: str) -> OutputForm | None:
    return _form("choice", None if choices is None else json.dumps(choices, ensure_ascii=False), parameter)


def _form(kind: str, value: str | None, parameter: str) -> OutputForm | None:
    if value is None:
        return None
    return OutputForm(StructuredOutputParams(kind, value), parameter)  # type: ignore[arg-type]  # one of the Literal's
