"""Sampling parameters as people type them."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.commands.terminal_chat.sampling_words import parse_assignments


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("temperature=0.7", 0.7),
        ("max_tokens=5", 5),
        ("ignore_eos=true", True),
        ('stop=["a", "b"]', ["a", "b"]),
        ("stop=END", "END"),
        ("stop_token_ids=7", [7]),
        ('logit_bias={"7": -1.5}', {7: -1.5}),
        ("regex=123", "123"),
        ("choice=yes", ["yes"]),
        ("allowed_token_ids=[7, 8]", [7, 8]),
        ("allowed_token_ids=7", [7]),
        ("bad_words=no", "no"),
        ("seed=", None),
    ],
)
def test_a_value_is_what_its_parameter_holds(word: str, value: Any) -> None:
    assert parse_assignments([word]) == {word.partition("=")[0]: value}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("temprature=1", "temperature.*not 'temprature=1'"),
        ("temperature", "--param are name=value.*not 'temperature'"),
        ("max_tokens=many", "max_tokens cannot be 'many'"),
        ('logit_bias={"x": 1}', "logit_bias cannot be"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_assignments([word], "--param")
