"""Models with latent attention (MLA) keep one vector of a token in each layer, and give transformers' tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actors.config import ModelConfig
from actors.model.attention.backend import AttentionNeeds
from actors.model.attention.latent_heads import LatentHeads
from actors.model.attention.probe import KVGeometry
from actors.model.attention.triton_backend import find_uncovered
from actors.model.attention_modules.latent import is_absorbed
from actors.model.cache.kv_cache import make_layout
from actors.model.errors import SelfCheckFailed, UnsupportedModel
from actors.model.loader import LoadedModel, load_model
from actors.model.lora.targets import find_targets
from kv_transfer.layout import KeyOrder
from tests.actors.model.ranks import on_each_rank
from tests.reference import load_model as load_stock
from tests.reference import random_prompt

CheckpointOf = Callable[[str], Path]


def load(directory: Path, **settings: str) -> LoadedModel:
    fields = {"model": str(directory), "dtype": "float32", "device": "cpu"}
    return load_model(ModelConfig.model_validate(fields | settings))


def test_a_layer_of_deepseek_v3_keeps_1152_bytes_of_a_token_on_every_rank(checkpoint: CheckpointOf) -> None:
    tiny = load(checkpoint("deepseek_v3")).geometry
    published = KVGeometry(128, 1, 512 + 64, tiny.layers, tp_size=4, num_replicas=4, value_size=0)

    layout = make_layout(published, num_blocks=1, block_size=16, dtype=torch.bfloat16, model_fingerprint="")

    assert (tiny.num_heads, tiny.num_kv_heads, tiny.head_dim, tiny.value_size) == (4, 1, 24 + 8, 0)
    assert layout.block_size_bytes == 16 * tiny.num_layers * 1152
    assert layout.total_num_kv_heads == 1


def test_both_attentions_of_a_longcat_layer_keep_latents(checkpoint: CheckpointOf) -> None:
    loaded = load(checkpoint("longcat_flash"))

    assert loaded.forward.model.config.num_layers == 2
    assert loaded.geometry.num_layers == 4


def test_without_raypds_attention_the_model_computes_what_transformers_computes(checkpoint: CheckpointOf) -> None:
    directory = checkpoint("deepseek_v3")
    loaded = load(directory)
    loaded.forward.model.set_attn_implementation("eager")
    tokens = torch.tensor(random_prompt(20))
    with torch.inference_mode():
        assert torch.equal(loaded.forward.stock(tokens), load_stock(directory)(tokens[None]).logits[0])


@pytest.mark.parametrize("wrong", ["absorb", "project"])
def test_heads_that_read_latents_wrongly_are_found(
    wrong: str, checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(LatentHeads, wrong)

    def compute(self: LatentHeads, states: Tensor) -> Tensor:
        result: Tensor = right(self, states)
        return 1.1 * result

    monkeypatch.setattr(LatentHeads, wrong, compute)
    with pytest.raises(SelfCheckFailed, match="its logits through the paged cache differ"):
        load(checkpoint("deepseek_v3"))


def test_the_layer_that_attention_absorbs_stays_plain_and_takes_no_adapter(checkpoint: CheckpointOf) -> None:
    loaded = load(checkpoint("deepseek_v3"))
    model = loaded.forward.model

    targets = find_targets(model, loaded.split)

    assert is_absorbed(model, "model.layers.0.self_attn.kv_b_proj")
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa" in targets
    assert not [name for name in targets if name.endswith("kv_b_proj")]
    assert isinstance(model.get_submodule("model.layers.0.self_attn.kv_b_proj"), torch.nn.Linear)


@pytest.mark.parametrize("family", ["deepseek_v2", pytest.param("longcat_flash", marks=pytest.mark.more)])
def test_ranks_share_the_heads_and_each_keeps_all_latents(family: str, checkpoint: CheckpointOf) -> None:
    config = ModelConfig(model=str(checkpoint(family)), device="cpu")

    loaded = on_each_rank(2, lambda group: load_model(config, group))

    shapes = [(one.geometry.num_heads, one.geometry.num_kv_heads, one.geometry.num_replicas) for one in loaded]
    assert shapes == [(2, 1, 2), (2, 1, 2)]


@pytest.mark.parametrize("family", ["deepseek_v3", "youtu"])
def test_ranks_are_refused_where_transformers_plan_does_not_split_the_attention(
    family: str, checkpoint: CheckpointOf
) -> None:
    config = ModelConfig(model=str(checkpoint(family)), device="cpu")

    with pytest.raises(UnsupportedModel, match="plan does not split its latent attention: tensor_parallel_size is 2"):
        on_each_rank(2, lambda group: load_model(config, group))


def test_backends_other_than_torch_say_why_they_do_not_serve_latents(checkpoint: CheckpointOf) -> None:
    geometry = load(checkpoint("deepseek_v3")).geometry
    needs = AttentionNeeds(torch.device("cpu"), torch.bfloat16, geometry, 16, KeyOrder.PLAIN)

    assert find_uncovered(needs) == ("it has latent attention (MLA), which only the torch backend serves")
