from __future__ import annotations

import pytest

from actors.core.requests.multimodal import MultiModalFeature, find_feature_mistake


@pytest.mark.parametrize(
    ("features", "mistake"),
    [
        ([], None),
        ([MultiModalFeature("a", 0, 4, 4), MultiModalFeature("b", 4, 6, 2)], None),
        ([MultiModalFeature("a", 0, 0, 4)], "multimodal item 0 has 0 tokens and 4 embeddings"),
        ([MultiModalFeature("a", 0, 4, -1)], "multimodal item 0 has 4 tokens and -1 embeddings"),
        (
            [MultiModalFeature("a", 2, 4, 4), MultiModalFeature("b", 5, 1, 1)],
            "multimodal item 1 begins at token 5, the one before it ends at 6",
        ),
        ([MultiModalFeature("a", -1, 4, 4)], "multimodal item 0 begins at token -1, the one before it ends at 0"),
        ([MultiModalFeature("a", 8, 4, 4)], "multimodal item 0 ends at token 12, the prompt at 10"),
    ],
)
def test_items_stand_in_order_inside_the_prompt(features: list[MultiModalFeature], mistake: str | None) -> None:
    assert find_feature_mistake(features, 10) == mistake
