"""The problems of the last schemas are remembered, and their texts are not.

Tests of cluster/parameters/structured_output_rules.py.
"""

from __future__ import annotations

import weakref

from cluster.parameters.structured_output_rules import RememberedSchemas


def test_only_the_last_schemas_are_remembered_each_with_its_depth() -> None:
    asked: list[tuple[str, int]] = []

    def find(text: str, max_depth: int) -> tuple[str, ...]:
        asked.append((text, max_depth))
        return (f"{text} {max_depth}",)

    schemas = RememberedSchemas(find, max_schemas=2)
    assert [schemas.problems(text, 4) for text in "aabacb"] == [(f"{text} 4",) for text in "aabacb"]
    # "b" was used longest ago when "c" came.
    assert asked == [("a", 4), ("b", 4), ("c", 4), ("b", 4)]
    assert schemas.problems("b", 5) == ("b 5",)


class _Text(str):
    """A text that is seen to be freed."""


def test_a_schemas_text_is_not_kept() -> None:
    schemas = RememberedSchemas(lambda text, max_depth: (), max_schemas=2)
    text = _Text("half a character: \ud800")
    schemas.problems(text, 4)
    freed = weakref.ref(text)
    del text
    assert freed() is None
