"""Tests of cluster/parameters/json_schema_overlap.py, cluster/parameters/json_schema_rules.py,
cluster/parameters/json_types.py.
"""

from __future__ import annotations

import json

import pytest

from actors.core.requests.sampling_params import StructuredOutputParams
from cluster.errors import InvalidRequest
from cluster.parameters.json_types import JSON
from cluster.parameters.sampling_options import SamplingOptions
from cluster.parameters.sampling_rules import Violations
from cluster.parameters.structured_output_rules import check_structured_output, refused_by_compiler
from cluster.settings.input_limits import InputLimits

LIMITS = InputLimits(max_grammar_chars=400, max_choices=3, max_schema_depth=4)
CHOICE = StructuredOutputParams("choice", '["yes", "no"]')


def violations_of(
    params: StructuredOutputParams, *, has_end: bool = True, ignore_eos: bool = False, min_tokens: int | None = None
) -> list[str]:
    violations = Violations()
    options = SamplingOptions(structured_output=params, ignore_eos=ignore_eos, min_tokens=min_tokens)
    check_structured_output(options, has_end=has_end, limits=LIMITS, violations=violations)
    try:
        violations.raise_if_any()
    except InvalidRequest as refusal:
        return [str(violation) for violation in refusal.violations]
    return []


def schema_violations(schema: JSON) -> list[str]:
    return violations_of(StructuredOutputParams("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "params",
    [
        CHOICE,
        StructuredOutputParams("regex", "[a-z]+"),
        StructuredOutputParams("grammar", 'root ::= "a"'),
        StructuredOutputParams("json_object"),
        StructuredOutputParams("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    ],
)
def test_what_is_well_formed_passes(params: StructuredOutputParams) -> None:
    assert violations_of(params) == []


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (StructuredOutputParams("regex", ""), "sampling_params.regex is ''; allowed: at least one character"),
        (StructuredOutputParams("regex", "a" * 401), "401 characters long; allowed: at most 400 characters"),
        (StructuredOutputParams("choice", "[]"), "sampling_params.choice is []; allowed: 1 to 3 texts"),
        (StructuredOutputParams("choice", '["a", ""]'), "none of them empty"),
        (StructuredOutputParams("choice", '["a", "b", "c", "d"]'), "1 to 3 texts"),
        (StructuredOutputParams("json_object", "false"), "sampling_params.json_object is False; allowed: true"),
        (StructuredOutputParams("json_schema", '{"type": '), "a JSON schema as JSON text"),
        (StructuredOutputParams("json_schema", "[]"), "a JSON schema, which is an object"),
        (StructuredOutputParams("json_schema", '{"const": NaN}'), "NaN is no JSON"),
    ],
)
def test_what_is_not_is_refused_with_its_field(params: StructuredOutputParams, words: str) -> None:
    [violation] = violations_of(params)
    assert words in violation


def test_options_that_go_on_past_the_end_are_refused_beside_it() -> None:
    assert (
        "sampling_params.ignore_eos is True; allowed: not together with choice"
        in violations_of(CHOICE, ignore_eos=True)[0]
    )
    assert violations_of(CHOICE, min_tokens=3)[0].startswith("sampling_params.min_tokens is 3")
    assert "no end-of-sequence token" in violations_of(CHOICE, has_end=False)[0]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, "the schema: not is not supported"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems is not supported"),
        ({"type": "object", "properties": {"a/b": {"contains": {}}}}, "/properties/a~1b: contains is not supported"),
        ({"anyOf": [{"type": "integer"}], "minimum": 3}, "anyOf is not supported beside minimum"),
        ({"$ref": "#/$defs/a", "type": "integer", "$defs": {"a": {}}}, "$ref is not supported beside type"),
        ({"$ref": "http://example.com"}, "only supported within the schema"),
        ({"enum": [1, "a"], "type": "string"}, "values that are not of its type"),
        ({"allOf": [{}, {}]}, "allOf is only supported with one schema"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is only supported where"),
        ({"minimum": 3}, "minimum needs a type beside it"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "only one is supported at a time"),
        ({"type": "string", "pattern": 'a"'}, "pattern is not supported with quotes"),
        ({"type": "string", "pattern": r"a\\b"}, "pattern is not supported with quotes"),
        ({"type": "string", "pattern": r"a\n"}, "pattern is not supported with quotes"),
        ({"type": "number", "multipleOf": 2}, "multipleOf is only supported for integers"),
        ({"type": "integer", "multipleOf": 2, "minimum": 3}, "multipleOf is not supported together with limits"),
        ({"type": "object", "required": ["a"]}, "required names 'a', which is not in properties"),
        ({"type": "object", "required": [["a"]]}, "required a list of names"),
        ({"patternProperties": {"a": {}}, "properties": {"ab": {}}}, "patternProperties is only supported alone"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"b": {}}}, "propertyNames is not supported together"),
        ({"type": "object", "minProperties": 2}, "minProperties is only supported up to what is required"),
        ({"items": {"items": {"items": {"items": {"items": {}}}}}}, "too many schemas inside each other"),
        ({"properties": {"a": 3}}, "/properties/a: a schema is an object or a boolean"),
    ],
)
def test_what_the_compiler_would_take_for_something_else_is_refused(schema: JSON, words: str) -> None:
    assert any(words in violation for violation in schema_violations(schema)), schema_violations(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"title": "T", "description": "d", "type": ["integer", "null"], "minimum": 3, "x-order": 1},
        {"type": "string", "enum": ["a", "b"], "default": "a"},
        {"type": "integer", "const": 3.0},
        {"type": "string", "pattern": r"^[^a]\d\s\[x\]$"},
        {"oneOf": [{"type": "integer"}, {"type": "string"}, {"const": None}]},
        {"items": {"type": "string"}, "minItems": 2, "uniqueItems": False},
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 1},
    ],
)
def test_what_it_takes_for_what_it_means_passes(schema: JSON) -> None:
    assert schema_violations(schema) == []


def test_one_of_schemas_that_a_constant_tells_apart_passes() -> None:
    def tagged(tag: str) -> JSON:
        return {"type": "object", "properties": {"kind": {"const": tag}}, "required": ["kind"]}

    definitions: JSON = {"a": tagged("a"), "b": tagged("b"), "c": {"$ref": "#/$defs/c"}}
    assert schema_violations({"$defs": definitions, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}) == []
    assert schema_violations({"$defs": definitions, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]})
    assert schema_violations({"$defs": definitions, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/c"}]})


def test_the_compilers_words_come_with_the_field() -> None:
    refusal = refused_by_compiler(StructuredOutputParams("regex", "(a"), "the parenthesis is not closed")
    assert (
        str(refusal) == "sampling_params.regex is '(a'; allowed: what engines can follow: the parenthesis is not closed"
    )


def problems_of(schema: JSON) -> list[str]:
    """Return what is wrong with a schema that may be longer than those above."""
    violations = Violations()
    options = SamplingOptions(structured_output=StructuredOutputParams("json_schema", json.dumps(schema)))
    check_structured_output(options, has_end=True, limits=InputLimits(), violations=violations)
    try:
        violations.raise_if_any()
    except InvalidRequest as refusal:
        return [violation.allowed for violation in refusal.violations]
    return []


def one_of_enums(num_enums: int, num_values: int, num_properties: int) -> JSON:
    """The same long lists, without a value in common, compared to each other in many places."""
    enums: dict[str, JSON] = {f"e{i}": {"enum": [f"{i}-{j}" for j in range(num_values)]} for i in range(num_enums)}
    one_of: JSON = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in enums]}
    return {"$defs": enums, "properties": {f"p{i}": one_of for i in range(num_properties)}}


def test_comparisons_are_counted_for_the_whole_schema() -> None:
    assert problems_of(one_of_enums(64, 10, 3)) == []
    found = problems_of(one_of_enums(64, 10, 12))
    assert found[0].startswith("/properties/p3: oneOf would take too many comparisons, with what came before")
    assert len(found) == 8


def test_a_schema_of_too_many_schemas_is_refused_at_the_one_too_many() -> None:
    assert problems_of({"anyOf": [{}] * 4094}) == []
    assert problems_of({"anyOf": [{"anyOf": [{}]}] * 3000}) == [
        "/anyOf/2047: too many schemas: at most 4095 in all",
    ]


def test_numbers_that_are_equal_are_one_constant() -> None:
    assert problems_of({"oneOf": [{"const": 1}, {"const": True}]}) == []
    assert problems_of({"oneOf": [{"const": 1}, {"const": 1.0}]})
    assert problems_of({"oneOf": [{"const": [1, {"a": 2.0}]}, {"const": [1.0, {"a": 2}]}]})


def test_a_long_place_is_shortened() -> None:
    [problem] = problems_of({"properties": {"a" * 10_000: {"not": {}}}})
    assert len(problem) < 300
    assert problem.endswith("…: not is not supported")
