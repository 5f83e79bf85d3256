"""Every declared sampling parameter comes to Serving, and to engines, by each API, and is refused alike by each.

Tests of cluster/parameters/ranges.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import pytest

from actors.core.requests.sampling_params import SamplingParams, StructuredOutputParams
from cluster.api.grpc.conversions.generate import request_from_proto
from cluster.api.http.requests import ChatCompletionRequest, CompletionRequest
from cluster.api.http.sampling import sampling_of
from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client.options import Sampling, make_sampling_params
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.ranges import AtMost, Between, Bounds, KnownTokens, NumChars, Range, UpTo, ValuesBetween
from cluster.parameters.sampling_options import PARAMETERS, Parameter, SamplingOptions
from cluster.parameters.sampling_rules import Violations, check_sampling, resolve_sampling
from cluster.settings.input_limits import InputLimits

BOUNDS = Bounds(vocab_size=500, limits=InputLimits())
VALUES: dict[object, Any] = {
    float: 0.5,
    int: 3,
    tuple[str, ...]: ("word", "other"),
    tuple[int, ...]: (7, 8),
    dict[int, float]: {7: 0.5},
}
SIMPLE = [one for one in PARAMETERS.values() if one.kind is not StructuredOutputParams]


@dataclass(frozen=True)
class Api:
    """One way for a client to give a parameter. read: makes Serving's options of its name and value"""

    name: str
    read: Callable[[str, Any], SamplingOptions]


def _by_grpc(name: str, value: Any) -> SamplingOptions:
    message = generate_pb2.GenerateRequest(sampling_params=generate_pb2.SamplingParams(**{name: value}))
    received = generate_pb2.GenerateRequest.FromString(message.SerializeToString())
    return asyncio.run(request_from_proto("r", received, None)).sampling


def _by_client(name: str, value: Any) -> SamplingOptions:
    message = generate_pb2.GenerateRequest(sampling_params=make_sampling_params({name: value}))
    return asyncio.run(request_from_proto("r", message, None)).sampling


def _by_http(name: str, value: Any) -> SamplingOptions:
    body = CompletionRequest.model_validate({"prompt": "x", name: _as_json(value)})
    given = {"max_tokens": body.max_tokens, "logprobs": body.logprobs, "prompt_logprobs": body.prompt_logprobs}
    return sampling_of(body, None, **given)


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): each for key, each in value.items()}
    return list(value) if isinstance(value, tuple) else value


APIS = [Api("gRPC", _by_grpc), Api("client", _by_client), Api("HTTP", _by_http)]


def _given(parameter: Parameter) -> Any:
    """A value that is allowed and no default."""
    if parameter.kind is bool:
        return not getattr(SamplingOptions(), parameter.name)
    return VALUES[parameter.kind]


def _outside(parameter: Parameter, range_: Range) -> Any:
    """A value that this range does not allow."""
    limits = BOUNDS.limits
    match range_:
        case Between(low=low, is_above=is_above):
            return parameter.kind(low if is_above else low - 1)
        case UpTo(limit):
            return getattr(limits, limit) + 1
        case AtMost(limit):
            entries = [
                str(number) if parameter.kind == tuple[str, ...] else 7 for number in range(getattr(limits, limit) + 1)
            ]
            return dict.fromkeys(range(len(entries)), 0.5) if parameter.is_map else tuple(entries)
        case NumChars(limit):
            return ("x" * (getattr(limits, limit) + 1),)
        case KnownTokens():
            return {BOUNDS.vocab_size: 0.5} if parameter.is_map else (BOUNDS.vocab_size,)
        case ValuesBetween(high=high):
            return {7: high + 0.5}
    raise AssertionError(range_)


def _violations(options: SamplingOptions) -> tuple[FieldViolation, ...]:
    found = Violations()
    check_sampling(options, BOUNDS.vocab_size, BOUNDS.limits, found)
    try:
        found.raise_if_any()
    except InvalidRequest as refusal:
        return refusal.violations
    return ()


@pytest.mark.parametrize("parameter", SIMPLE, ids=lambda one: one.name)
@pytest.mark.parametrize("api", APIS, ids=lambda one: one.name)
def test_a_parameter_reaches_serving_and_its_engines(api: Api, parameter: Parameter) -> None:
    given = _given(parameter)

    options = api.read(parameter.name, given)

    assert options == SamplingOptions(**{parameter.name: given})
    assert _violations(options) == ()
    params = resolve_sampling(options, max_tokens=options.max_tokens or 9, bad_words=((7, 8),))
    engines_words = ((7, 8),) if parameter.name == "bad_words" else given
    if parameter.name in {one.name for one in fields(SamplingParams)}:
        assert getattr(params, parameter.name) == engines_words
    else:
        assert parameter.name in {"stop", "include_stop_str_in_output", "skip_special_tokens"}, "the ingress's own work"


@pytest.mark.parametrize("api", APIS, ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("parameter", "range_"),
    [(one, range_) for one in SIMPLE for range_ in one.ranges],
    ids=lambda one: one.name if isinstance(one, Parameter) else type(one).__name__,
)
def test_a_value_outside_of_a_range_is_refused_in_its_words(api: Api, parameter: Parameter, range_: Range) -> None:
    bad = _outside(parameter, range_)

    violations = _violations(api.read(parameter.name, bad))

    said = [violation for violation in violations if violation.allowed == range_.allowed(BOUNDS)]
    assert [violation.field for violation in said] == [f"sampling_params.{parameter.name}"]
    assert violations == _violations(SamplingOptions(**{parameter.name: bad})), "the same, whichever way it came"


@pytest.mark.parametrize("parameter", SIMPLE, ids=lambda one: one.name)
def test_what_is_allowed_here_no_engine_refuses(parameter: Parameter) -> None:
    """An engine decodes a request with bounds of its own, which must not be the narrower ones."""
    values = [_given(parameter)]
    for range_ in parameter.ranges:
        if isinstance(range_, Between):
            values += [parameter.kind(range_.high)] + ([] if range_.is_above else [parameter.kind(range_.low)])
        if isinstance(range_, ValuesBetween):
            values += [{7: range_.low}, {7: range_.high}]
    for value in values:
        options = SamplingOptions(**{parameter.name: value})
        params = resolve_sampling(options, max_tokens=options.max_tokens or 9)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_each_api_names_all_parameters_and_no_others() -> None:
    messages = {field.name for field in generate_pb2.SamplingParams.DESCRIPTOR.fields}
    forms = {field.name for field in generate_pb2.SamplingParams.DESCRIPTOR.oneofs_by_name["structured_output"].fields}
    names = {one.name for one in SIMPLE}

    assert messages == names | forms
    assert Sampling.__annotations__.keys() == names | forms
    for body in (CompletionRequest, ChatCompletionRequest):
        assert names <= body.model_fields.keys()
