import pytest

from tools.judge_demo_model import cut_at_last_statement, is_python


@pytest.mark.parametrize(
    ("prompt", "continuation", "expected"),
    [
        ("def f(n):", "\n    return n\n", True),
        ("def f(n):", "\n    return n\n\n\ndef g(", True),
        ("def f(n):", "\n    while n:\n        n -= 1\n    return (n +", True),
        ("def f(n):", "\n    return return n\n\n\n", False),
        ("def f(n):", "", False),
        ("import json", "", False),
        ("import json", "\nimport os\n", True),
    ],
)
def test_what_was_broken_off_is_cut_and_the_rest_has_to_parse(prompt: str, continuation: str, expected: bool) -> None:
    assert is_python(prompt, continuation) is expected


def test_a_text_of_which_more_than_half_is_broken_is_not_cut() -> None:
    assert cut_at_last_statement("x = 1\ny = (\n1\n2\n3\n") is None
    assert cut_at_last_statement("x = 1\ny = 2\nz = (") == "x = 1\ny = 2"
