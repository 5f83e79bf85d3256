"""From OpenAI's and vLLM's parameters to Serving's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from actors.core.requests.sampling_params import StructuredOutputParams
from cluster.api.http.requests import GenerationBody, JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.generation import SamplingOptions
from cluster.parameters.json_types import JSON

NAMES: Final[Mapping[str, str]] = {"text": "prompt", "token_ids": "prompt", "chat": "messages"}
"""Fields that have another name over HTTP."""
_STRUCTURED_KINDS: Final = ("json_schema", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What the output has to be, and the parameter that says so."""

    params: StructuredOutputParams
    parameter: str

    @property
    def names(self) -> dict[str, str]:
        """NAMES, and the parameter's for what Serving calls it."""
        return dict(NAMES) | dict.fromkeys(_STRUCTURED_KINDS, self.parameter)


def sampling_of(
    body: GenerationBody,
    form: OutputForm | None,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingOptions:
    """Serving's options; it fills in what is not given, and checks the values."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingOptions(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=body.logit_bias or {},
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words=tuple(body.bad_words or ()),
        skip_special_tokens=body.skip_special_tokens is not False,
        structured_output=form.params if form is not None else None,
    )


def form_of(body: GenerationBody) -> OutputForm | None:
    """What the output has to be, whichever parameter says it. Raises InvalidRequest if several do."""
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
