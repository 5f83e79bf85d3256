"""Models whose attention modules do not get the batch from transformers' code are served with the right tokens.

Tests of actors/model/attention_modules/falcon.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.config import ModelConfig
from actors.model.attention_modules import batch_delivery
from actors.model.errors import SelfCheckFailed
from actors.model.loader import LoadedModel, load_model
from tests.actors.model.ranks import on_each_rank
from tests.reference import load_model as load_stock
from tests.reference import random_prompt

CheckpointOf = Callable[[str], Path]


def load(directory: Path) -> LoadedModel:
    return load_model(ModelConfig(model=str(directory), dtype="float32", device="cpu"))


@pytest.mark.parametrize(("family", "num_kv_heads"), [("falcon", 1), ("falcon_40b", 2), ("falcon_mha", 4)])
def test_each_kv_head_of_falcon_is_cached_once(family: str, num_kv_heads: int, checkpoint: CheckpointOf) -> None:
    geometry = load(checkpoint(family)).geometry
    assert (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim) == (4, num_kv_heads, 12)


@pytest.mark.parametrize("family", ["falcon_40b", "nemotron", "stablelm"])
def test_without_a_batch_the_model_computes_what_transformers_computes(family: str, checkpoint: CheckpointOf) -> None:
    directory = checkpoint(family)
    loaded = load(directory)
    loaded.forward.model.set_attn_implementation("eager")
    tokens = torch.tensor(random_prompt(20))
    with torch.inference_mode():
        assert torch.equal(loaded.forward.stock(tokens), load_stock(directory)(tokens[None]).logits[0])


def test_a_replaced_forward_that_computes_something_else_is_found(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = batch_delivery._REPLACED_FORWARDS["falcon"]

    def wrong(module: torch.nn.Module, *inputs: object, **arguments: object) -> tuple[torch.Tensor, None]:
        output, _ = replaced(module, *inputs, **arguments)
        return 1.1 * output, None

    monkeypatch.setitem(batch_delivery._REPLACED_FORWARDS, "falcon", wrong)
    with pytest.raises(SelfCheckFailed, match="its logits through the paged cache differ"):
        load(checkpoint("falcon_40b"))


def test_two_ranks_share_a_model_whose_layers_drop_the_batch(checkpoint: CheckpointOf) -> None:
    config = ModelConfig(model=str(checkpoint("nemotron")), device="cpu")
    loaded = on_each_rank(2, lambda group: load_model(config, group))
    assert [one.geometry.num_heads for one in loaded] == [2, 2]
