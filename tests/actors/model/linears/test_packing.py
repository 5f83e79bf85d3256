"""Models with packed linear layers, and with plain ones. Tests of actors/model/linears/packed_linear.py.

That plain models give transformers' tokens is what tests/actors/model/test_model_runner.py shows.
"""

from __future__ import annotations

import json
import math
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from actors.config import ModelConfig
from actors.model.attention.probe import GeometryProbe
from actors.model.errors import SelfCheckFailed, UnsupportedModel
from actors.model.linears import onednn, packing
from actors.model.linears.onednn import RowResults
from actors.model.linears.packed_linear import PackedLinear, TiedLinear
from actors.model.linears.watched_layers import FoundLayer
from actors.model.loader import LoadedModel, load_model
from tests.actors.model.ranks import on_each_rank
from tests.actors.model.stepping import Sequence, Stepper, make_runner
from tests.checkpoints import FAMILIES
from tests.reference import greedy_tokens, random_prompt

CheckpointOf = Callable[[str], Path]


MLP = tuple(name.split("_")[0] for name in ("gate_proj", "up_proj", "down_proj"))


def load(directory: Path, **settings: object) -> LoadedModel:
    given = {"model": str(directory), "device": "cpu", "weight_packing": "auto"} | settings
    return load_model(ModelConfig.model_validate(given))


def packed_names(loaded: LoadedModel) -> list[str]:
    model = loaded.forward.model
    return [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]


def logits_of(loaded: LoadedModel, num_tokens: int = 6) -> Tensor:
    tokens = torch.arange(num_tokens)
    with torch.inference_mode():
        return loaded.forward(tokens, tokens, GeometryProbe("test"), tokens)


def add_to_config(directory: Path, settings: dict[str, object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))


def tied_llama(checkpoint: CheckpointOf, tmp_path: Path) -> Path:
    """A config without weights, for load_format="dummy"."""
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    add_to_config(directory, {"tie_word_embeddings": True})
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_give_the_tokens_of_generate(family: str, checkpoint: CheckpointOf) -> None:
    directory = checkpoint(family)
    stepper = Stepper(make_runner(directory, weight_packing="auto"))
    prompts = [random_prompt(length) for length in (7, 33)]
    for prompt in prompts:
        stepper.add(str(len(prompt)), Sequence(prompt))

    outputs = stepper.run(num_output_tokens=8, chunk=13)

    assert outputs == {str(len(prompt)): greedy_tokens(directory, tuple(prompt), 8) for prompt in prompts}


def test_every_linear_layer_of_a_llama_is_packed(checkpoint: CheckpointOf) -> None:
    loaded = load(checkpoint("llama"), weight_packing="onednn")

    layer = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in MLP]
    expected = [f"model.layers.{index}.{name}" for index in range(3) for name in layer]
    assert packed_names(loaded) == [*expected, "lm_head"]
    assert not [name for name, _ in loaded.forward.model.named_parameters() if "proj" in name]


def test_layers_that_take_the_same_inputs_are_one_product(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(checkpoint("llama"), weight_packing="onednn")
    num_outputs: list[int] = []
    multiply = onednn.multiply

    def count(inputs: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
        output = multiply(inputs, reordered, bias)
        num_outputs.append(output.shape[-1])
        return output

    monkeypatch.setattr(onednn, "multiply", count)
    logits_of(loaded)

    # Of four heads and two KV heads of 12; then those of the other layers.
    assert num_outputs == [96, 48, 128, 48] * 3 + [loaded.vocab_size]


def test_none_leaves_every_layer_plain(checkpoint: CheckpointOf) -> None:
    assert not packed_names(load(checkpoint("llama"), weight_packing="none"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "opt"])
def test_packed_and_plain_logits_differ_by_rounding_only(family: str, dtype: str, checkpoint: CheckpointOf) -> None:
    plain, packed = (
        logits_of(load(checkpoint(family), dtype=dtype, weight_packing=packing)).float() for packing in ("none", "auto")
    )

    assert float((plain - packed).abs().max() / plain.abs().max()) < (1e-5 if dtype == "float32" else 0.05)


def test_a_data_type_that_does_not_work_is_left_plain(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "reason_against", lambda dtype: "this processor cannot")

    assert not packed_names(load(checkpoint("llama")))
    with pytest.raises(UnsupportedModel, match=r"cannot be packed \(weight_packing: onednn.*: this processor cannot"):
        load(checkpoint("llama"), weight_packing="onednn")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_output_layer_that_is_tied_to_the_embeddings_computes_with_their_plain_weight(
    dtype: str, checkpoint: CheckpointOf, tmp_path: Path
) -> None:
    if (reason := onednn.reason_against(getattr(torch, dtype))) is not None:
        pytest.skip(f"this processor packs no {dtype}: {reason}")
    directory = tied_llama(checkpoint, tmp_path)
    plain = load(directory, dtype=dtype, load_format="dummy", weight_packing="none")
    expected = logits_of(plain).float()

    loaded = load(directory, dtype=dtype, load_format="dummy")

    model = loaded.forward.model
    assert isinstance(model.get_submodule("lm_head"), TiedLinear)
    assert "model.layers.0.mlp.up_proj" in packed_names(loaded)
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    error = (logits_of(loaded).float() - expected).abs().max() / expected.abs().max()
    assert float(error) < (1e-5 if dtype == "float32" else 0.05)


def test_a_tied_output_layer_whose_rows_depend_on_the_batch_keeps_torchs_product(
    checkpoint: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        onednn,
        "try_rows",
        lambda *shape, has_bias, is_reordered: RowResults.INDEPENDENT if is_reordered else RowResults.DEPENDENT,
    )

    loaded = load(tied_llama(checkpoint, tmp_path), load_format="dummy")

    assert type(loaded.forward.model.get_submodule("lm_head")) is nn.Linear
    assert "model.layers.0.mlp.up_proj" in packed_names(loaded)


def test_a_tied_output_layer_stays_plain_where_packing_is_not_wanted(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    loaded = load(tied_llama(checkpoint, tmp_path), load_format="dummy", weight_packing="none")
    assert type(loaded.forward.model.get_submodule("lm_head")) is nn.Linear


def test_a_shape_whose_rows_depend_on_the_batch_is_left_plain(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def try_rows(
        in_features: int, out_features: int, dtype: torch.dtype, *, has_bias: bool, is_reordered: bool
    ) -> RowResults:
        return RowResults.DEPENDENT if in_features == 64 else RowResults.INDEPENDENT_FROM_TWO

    expected = logits_of(load(checkpoint("llama"), weight_packing="none"))
    monkeypatch.setattr(onednn, "try_rows", try_rows)
    loaded = load(checkpoint("llama"))

    assert not [name for name in packed_names(loaded) if name.endswith("down_proj")]
    assert [name for name in packed_names(loaded) if name.endswith("up_proj")]
    for num_tokens in (1, 6):
        assert torch.allclose(logits_of(loaded, num_tokens), expected[:num_tokens], atol=1e-4)


@pytest.mark.parametrize(
    ("results", "num_tokens", "expected"),
    [
        (RowResults.INDEPENDENT, 1, {1}),
        (RowResults.INDEPENDENT_FROM_TWO, 1, {2}),
        (RowResults.INDEPENDENT_IN_BLOCKS, 40, {32, 8}),
    ],
)
def test_rows_are_computed_in_numbers_that_are_summed_in_one_order(
    results: RowResults,
    num_tokens: int,
    expected: set[int],
    checkpoint: CheckpointOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(onednn, "try_rows", lambda *shape, has_bias, is_reordered: results)
    loaded, num_rows, multiply = load(checkpoint("llama")), list[int](), onednn.multiply

    def counting(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        num_rows.append(inputs.numel() // inputs.shape[-1])
        return multiply(inputs, weight, bias)

    monkeypatch.setattr(onednn, "multiply", counting)
    logits_of(loaded, num_tokens=num_tokens)
    assert set(num_rows) == expected


def test_each_shape_is_tried_once_with_a_bias_and_once_without(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, int, torch.dtype, bool, bool]] = []

    def try_rows(
        in_features: int, out_features: int, dtype: torch.dtype, *, has_bias: bool, is_reordered: bool
    ) -> RowResults:
        tried.append((in_features, out_features, dtype, has_bias, is_reordered))
        return RowResults.DEPENDENT if has_bias else RowResults.INDEPENDENT

    monkeypatch.setattr(onednn, "try_rows", try_rows)
    trials, weight, bias = packing._RowTrials(packing.PackedLayers()), torch.ones(8, 16), torch.ones(8)
    for _ in range(2):
        assert trials.of(weight, None) is RowResults.INDEPENDENT
        assert trials.of(weight, bias) is RowResults.DEPENDENT
        assert trials.of(weight.bfloat16(), None) is RowResults.INDEPENDENT
        assert trials.of(weight, None, is_reordered=False) is RowResults.INDEPENDENT
    assert tried == [
        (16, 8, torch.float32, False, True),
        (16, 8, torch.float32, True, True),
        (16, 8, torch.bfloat16, False, True),
        (16, 8, torch.float32, False, False),
    ]


def test_a_layer_whose_packed_product_is_wrong_is_left_plain(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    reorder = onednn.reorder_weight
    monkeypatch.setattr(onednn, "reorder_weight", lambda weight: reorder(weight if weight.shape[1] == 48 else -weight))
    monkeypatch.setattr(onednn, "reason_against", lambda dtype: None)

    loaded = load(checkpoint("llama"))

    assert not [name for name in packed_names(loaded) if name.endswith("down_proj")]
    assert [name for name in packed_names(loaded) if name.endswith("up_proj")]


@pytest.mark.parametrize("factor", [2.0, math.nan])
def test_a_packed_model_that_computes_something_else_is_refused(
    factor: float, checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = packing._replace

    def change_the_outputs(model: nn.Module, found: FoundLayer, product: Callable[[Tensor], Tensor]) -> None:
        replace(model, found, lambda inputs: product(inputs) * factor)

    monkeypatch.setattr(packing, "_replace", change_the_outputs)

    with pytest.raises(SelfCheckFailed, match=r"once its linear layers are packed .* weight_packing: none"):
        load(checkpoint("llama"))


def test_ranks_pack_their_own_slices(checkpoint: CheckpointOf) -> None:
    settings = ModelConfig(model=str(checkpoint("llama")), device="cpu", weight_packing="onednn")

    loaded = on_each_rank(2, lambda group: load_model(settings, group))

    for model in loaded:
        names = packed_names(model)
        assert "model.layers.0.self_attn.q_proj" in names
        weights = [name for name, _ in model.forward.model.named_parameters()]
        assert not [name for name in weights if "proj" in name or "lm_head" in name]


def test_ranks_agree_on_leaving_layers_plain(checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ModelConfig(model=str(checkpoint("llama")), device="cpu", weight_packing="auto")
    reasons = [None, "this processor cannot"]
    monkeypatch.setattr(onednn, "reason_against", lambda dtype: reasons.pop())

    loaded = on_each_rank(2, lambda group: load_model(settings, group))

    assert [packed_names(model) for model in loaded] == [[], []]


def test_a_layers_plain_weight_is_freed_before_the_next_is_packed(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(checkpoint("llama"), weight_packing="none")
    plain = [
        (weakref.ref(parameter), parameter.numel())
        for name, parameter in loaded.forward.model.named_parameters()
        if "proj" in name or "lm_head" in name
    ]
    total = sum(numel for _, numel in plain)
    largest_layer = max(numel for _, numel in plain) * 2  # The largest product joins two layers.
    reordered, in_memory, reorder = [0], list[int](), onednn.reorder_weight

    def measure(weight: Tensor) -> Tensor:
        reordered[0] += weight.numel()
        in_memory.append(reordered[0] + sum(numel for parameter, numel in plain if parameter() is not None))
        return reorder(weight)

    monkeypatch.setattr(onednn, "try_rows", lambda *shape, has_bias, is_reordered: RowResults.INDEPENDENT)
    monkeypatch.setattr(onednn, "reorder_weight", measure)

    report = packing.pack_linears(loaded.forward, loaded.architecture)

    assert (report.num_packed, report.num_products) == (3 * 7 + 1, 3 * 4 + 1)
    assert reordered[0] == total
    assert max(in_memory) <= total + largest_layer
    assert not [parameter for parameter, _ in plain if parameter() is not None]
