"""A model split over ranks gives the whole model's logits, bit for bit the same on every rank.

Tests of actors/model/tensor_parallel/group.py, actors/model/tensor_parallel/split_layers.py,
actors/model/tensor_parallel/mesh.py, actors/model/tensor_parallel/plan.py,
actors/model/tensor_parallel/rank_calls.py, actors/model/tensor_parallel/rank_peers.py.
"""

from __future__ import annotations

import json
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from actors.config import ModelConfig
from actors.model import loader
from actors.model.errors import CheckpointError, RankLost, UnsupportedModel
from actors.model.loader import LoadedModel, load_model
from actors.model.tensor_parallel.group import Rendezvous, TensorParallelGroup, join_group
from actors.model.tensor_parallel.mesh import MAX_SMALL_BYTES
from actors.model.tensor_parallel.rank_calls import RankTrust
from kv_transfer.trust.handshake import Dialer, Party
from kv_transfer.trust.membership import Trust, TrustMaterial
from kv_transfer.trust.secret import Purpose
from tests.actors.model.config.test_support import SMALL, dummy
from tests.actors.model.ranks import on_each_rank
from tests.checkpoints import VOCAB_SIZE, draw_weights, make_checkpoint
from tests.trusted import RANK_TRUST, TRUST, with_tls

CheckpointOf = Callable[[str], Path]

MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
SPLIT_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "qwen3_moe")
FURTHER = ("granitemoe_swa", "nemotron")
UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "one KV head for three ranks": (
        "qwen2",
        {"num_attention_heads": 6, "num_key_value_heads": 1, "intermediate_size": 66},
    ),
    "vocabulary that no rank count divides": ("llama", {"vocab_size": VOCAB_SIZE - 1, "num_key_value_heads": 4}),
    "tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "biases before and after the sum": ("llama", {"attention_bias": True, "mlp_bias": True}),
}


def load(directory: Path, size: int, **settings: object) -> list[LoadedModel]:
    """Every rank's part, which has passed the self-check in lockstep with the others'."""
    config = ModelConfig.model_validate({"model": str(directory), "device": "cpu"} | settings)
    return on_each_rank(size, lambda group: load_model(config, group))


def logits_of(directory: Path, size: int) -> list[Tensor]:
    config = ModelConfig(model=str(directory), device="cpu")

    def compute(group: TensorParallelGroup) -> Tensor:
        model = load_model(config, group).forward.model
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            logits: Tensor = model(input_ids=_tokens(), use_cache=False).logits
        return logits

    return on_each_rank(size, compute)


def _tokens() -> Tensor:
    return torch.randint(3, VOCAB_SIZE - 1, (1, 40), generator=torch.Generator().manual_seed(0))


def assert_equals_whole_model(directory: Path, size: int) -> None:
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = whole(_tokens(), use_cache=False).logits
    parts = logits_of(directory, size)
    assert (parts[0] - expected).abs().max() < 1e-4
    assert all(torch.equal(part, parts[0]) for part in parts)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "family", [*SPLIT_FAMILIES, "granite_swa", *(pytest.param(family, marks=pytest.mark.more) for family in FURTHER)]
)
def test_split_logits_equal_the_whole_models(family: str, size: int, checkpoint: CheckpointOf) -> None:
    assert_equals_whole_model(checkpoint(family), size)


@pytest.mark.parametrize("case", UNEVEN)
def test_uneven_parts_give_the_same_logits(case: str, tmp_path: Path) -> None:
    family, overrides = UNEVEN[case]
    size = 3 if "three" in case else 2
    assert_equals_whole_model(make_checkpoint(family, tmp_path, **overrides), size)


RENAMED: dict[str, dict[str, Any]] = {
    "gpt_neox": {"num_key_value_heads": None},
    "hy_v3": MOE | {"num_experts": 4, "head_dim": 8},
    "glm4_moe": MOE | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8},
}


@pytest.mark.parametrize("model_type", RENAMED)
def test_weights_that_transformers_renames_and_buffers_that_it_saves_are_read(model_type: str, tmp_path: Path) -> None:
    settings = SMALL | {"vocab_size": VOCAB_SIZE} | RENAMED[model_type]
    config = CONFIG_MAPPING[model_type](**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]  # left untyped
    generator = torch.Generator().manual_seed(0)
    draw_weights(model, generator)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(tmp_path)
    assert_equals_whole_model(tmp_path, 2)


@pytest.mark.parametrize("model_type", ["granitemoe", "granitemoeshared", "phimoe"])
def test_a_plan_that_leaves_attention_whole_is_the_reason_that_is_given(model_type: str, tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = ModelConfig(model=str(tmp_path), load_format="dummy", device="cpu")
    CONFIG_MAPPING[model_type](**SMALL | experts).save_pretrained(tmp_path)

    with pytest.raises(UnsupportedModel, match="its plan does not split its attention"):
        on_each_rank(2, lambda group: load_model(model, group))


def test_each_rank_holds_its_heads_and_its_share_of_the_weights(checkpoint: CheckpointOf) -> None:
    loaded = load(checkpoint("llama"), 2, weight_packing="none")
    geometries = [(m.geometry.tp_rank, m.geometry.tp_size, m.geometry.num_replicas) for m in loaded]
    assert geometries == [(0, 2, 1), (1, 2, 1)]
    assert {(m.geometry.num_heads, m.geometry.num_kv_heads, m.vocab_size) for m in loaded} == {(2, 1, VOCAB_SIZE)}
    attention = [m.forward.model.get_submodule("model.layers.0.self_attn") for m in loaded]
    whole = load_file(checkpoint("llama") / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    held = [part.get_parameter("q_proj.weight").data for part in attention]
    assert torch.equal(torch.cat(held), whole)


def test_few_kv_heads_are_held_by_several_ranks(checkpoint: CheckpointOf) -> None:
    loaded = load(checkpoint("llama"), 4, weight_packing="none")
    assert {(m.geometry.num_heads, m.geometry.num_kv_heads, m.geometry.num_replicas) for m in loaded} == {(1, 1, 2)}
    keys = [m.forward.model.get_parameter("model.layers.1.self_attn.k_proj.weight") for m in loaded]
    assert torch.equal(keys[0], keys[1])
    assert torch.equal(keys[2], keys[3])
    assert not torch.equal(keys[0], keys[2])


def test_only_a_ranks_slices_are_read(checkpoint: CheckpointOf) -> None:
    whole = load_model(ModelConfig(model=str(checkpoint("llama")), device="cpu", weight_packing="none"))
    parts = load(checkpoint("llama"), 4, weight_packing="none")
    embeddings = VOCAB_SIZE * 48

    def num_split(model: LoadedModel) -> int:
        return int(model.forward.model.num_parameters()) - embeddings

    # Two KV heads on four ranks: keys and values are held twice.
    assert num_split(parts[0]) < 0.3 * num_split(whole)


def test_drawn_weights_are_those_of_the_whole_model(checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, draw = threading.Lock(), loader._make_dummy_model

    def draw_alone(*arguments: Any) -> PreTrainedModel:
        # The ranks of this test are threads, and share the process' random generator; real ones do not.
        with lock:
            return draw(*arguments)

    monkeypatch.setattr(loader, "_make_dummy_model", draw_alone)
    drawn: dict[str, Any] = {"load_format": "dummy", "seed": 3, "dtype": "float32", "weight_packing": "none"}
    parts = load(checkpoint("llama"), 2, **drawn)
    whole = load_model(ModelConfig(model=str(checkpoint("llama")), device="cpu", **drawn))
    name = "model.layers.2.mlp.down_proj.weight"
    held = [part.forward.model.get_parameter(name).data for part in parts]
    assert torch.equal(torch.cat(held, dim=1), whole.forward.model.get_parameter(name))
    assert parts[0].fingerprint == parts[1].fingerprint == whole.fingerprint


def test_half_precision_is_served(checkpoint: CheckpointOf) -> None:
    assert [part.dtype for part in load(checkpoint("llama"), 2, dtype="bfloat16")] == [torch.bfloat16] * 2


def test_one_rank_of_a_process_builds_at_a_time(checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch) -> None:
    building = threading.Lock()
    build = AutoModelForCausalLM.from_config
    overlaps: list[bool] = []

    def build_slowly(*args: Any, **kwargs: Any) -> PreTrainedModel:
        alone = building.acquire(blocking=False)
        overlaps.append(not alone)
        time.sleep(0.02)
        try:
            model: PreTrainedModel = build(*args, **kwargs)  # type: ignore[no-untyped-call]  # left untyped
            return model
        finally:
            if alone:
                building.release()

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", build_slowly)
    load(checkpoint("llama"), 2, dtype="bfloat16")
    assert overlaps == [False] * len(overlaps) != []


@pytest.mark.parametrize(
    ("family", "size", "reason"),
    [
        ("gpt2", 2, "transformers has no tensor-parallel plan for it"),
        ("phi3", 2, r"model\.layers\.0\.self_attn\.\w+ .*cannot be split over ranks"),
        ("llama", 3, "its 4 attention heads cannot be shared evenly by 3 ranks"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(family: str, size: int, reason: str, checkpoint: CheckpointOf) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        load(checkpoint(family), size)


def test_kv_heads_that_cannot_be_shared_evenly_are_refused(tmp_path: Path) -> None:
    directory = make_checkpoint("llama", tmp_path, num_attention_heads=12, num_key_value_heads=6)
    with pytest.raises(UnsupportedModel, match="6 KV heads cannot be shared by 4 ranks"):
        load(directory, 4)


def test_a_layer_that_cannot_be_split_evenly_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"mlp\.gate_proj cannot be split over 2 ranks: it has 65 features"):
        load(make_checkpoint("llama", tmp_path, intermediate_size=65), 2)


def test_experts_that_cannot_be_split_evenly_are_refused_by_name(tmp_path: Path) -> None:
    directory = make_checkpoint("mixtral", tmp_path, intermediate_size=65)
    with pytest.raises(UnsupportedModel, match=r"mlp\.experts cannot be split over 2 ranks: .* 65 features"):
        load(directory, 2)


def test_a_missing_expert_is_noticed(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        load(directory, 2)


@pytest.mark.parametrize("method", ["fp8", "gptq", "compressed-tensors"])
def test_quantized_weights_are_refused_whatever_their_method(
    method: str, checkpoint: CheckpointOf, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 8}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="quantized"):
        load(directory, 2)


def test_a_norm_with_a_row_for_each_head_is_refused_by_name(tmp_path: Path) -> None:
    directory = Path(dummy("cohere", SMALL | {"use_qk_norm": True}, tmp_path).model)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.self_attn\.q_norm has a row for each of 4 heads"):
        load(directory, 2, load_format="dummy", dtype="float32")


def test_missing_weights_are_named(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:7].clone()
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r": model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight \(\(7,\)"
    ):
        load(directory, 2)


def test_the_checkpoints_own_dtype_counts_where_its_config_is_silent(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config.pop("dtype", None)
    (directory / "config.json").write_text(json.dumps(config))
    weights = {name: weight.half() for name, weight in load_file(directory / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert AutoConfig.from_pretrained(directory).dtype is None
    assert [part.dtype for part in load(directory, 2)] == [torch.float16] * 2


@pytest.fixture(params=[False, True], ids=["plain", "TLS"])
def trust(request: pytest.FixtureRequest) -> RankTrust:
    return replace(RANK_TRUST, tls=with_tls().tls) if request.param else RANK_TRUST


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_elements", [1, 5000, MAX_SMALL_BYTES, 20 * MAX_SMALL_BYTES])
def test_sums_and_gathers_have_the_same_bits_on_every_rank(
    num_elements: int, dtype: torch.dtype, trust: RankTrust
) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(3, num_elements, generator=generator).to(dtype)

    def work(group: TensorParallelGroup) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            gathered = group.all_gather(parts[group.rank].clone())
        return gathered, group.all_reduce(parts[group.rank].clone())

    results = on_each_rank(3, work, trust)
    for gathered, total in results:
        assert torch.equal(gathered, parts)
        assert torch.equal(total, results[0][1])
        torch.testing.assert_close(total.float(), parts.float().sum(0), atol=0.05, rtol=0.02)


def test_the_smallest_number_of_all_ranks_counts() -> None:
    assert on_each_rank(3, lambda group: group.smallest(10 - group.rank)) == [8, 8, 8]


@pytest.mark.parametrize("num_elements", [4, MAX_SMALL_BYTES])
def test_a_rank_that_leaves_fails_the_others_at_once(num_elements: int, trust: RankTrust) -> None:
    def work(group: TensorParallelGroup) -> str:
        if group.rank == 1:
            return "left"
        with pytest.raises(RankLost):
            group.all_reduce(torch.zeros(num_elements))
        return "noticed"

    assert on_each_rank(2, work, trust) == ["noticed", "left"]


@pytest.mark.parametrize("num_elements", [4, MAX_SMALL_BYTES])
def test_a_rank_that_stalls_fails_the_others_after_the_deadline(num_elements: int, trust: RankTrust) -> None:
    is_over = threading.Event()

    def work(group: TensorParallelGroup) -> float:
        group.set_timeout(0.2)
        if group.rank == 1:
            assert is_over.wait(60.0)
            return 0.0
        begin_s = time.monotonic()
        with pytest.raises(RankLost):
            group.all_reduce(torch.zeros(num_elements))
        is_over.set()
        return time.monotonic() - begin_s

    assert 0.2 <= on_each_rank(2, work, trust)[0] < 30.0


def test_a_rank_that_never_comes_is_waited_for_up_to_the_deadline() -> None:
    cpu = torch.device("cpu")
    rendezvous = Rendezvous("127.0.0.1", cpu, 1.0)
    with pytest.raises(RankLost, match="rank 0 of 2 did not connect to the other ranks"):
        join_group(rendezvous, 0, 2, device=cpu, host="127.0.0.1", timeout_s=0.2, trust=RANK_TRUST)
    with pytest.raises(RankLost, match="rank 1 of 2 did not connect to the other ranks"):
        join_group(rendezvous.address, 1, 2, device=cpu, host="127.0.0.1", timeout_s=0.2, trust=RANK_TRUST)
    rendezvous.close()


@pytest.mark.parametrize("stranger", ["silent", "half a handshake", "a length of 4 GiB", "another cluster's rank"])
def test_strangers_neither_fail_a_start_nor_are_taken_for_ranks(stranger: str, trust: RankTrust) -> None:
    """They call first, and more of them than are heard at a time."""
    cpu, timeout_s = torch.device("cpu"), 60.0
    rendezvous = Rendezvous("127.0.0.1", cpu, timeout_s)
    with ExitStack() as strangers, ThreadPoolExecutor(2) as pool:
        for _ in range(80):
            connection = strangers.enter_context(socket.create_connection(rendezvous.address))
            if stranger == "a length of 4 GiB":
                connection.sendall(b"\xff" * 64)
            elif stranger == "half a handshake":
                connection.sendall(b"\x16\x03\x01\x02")
            elif stranger == "another cluster's rank":
                other = RankTrust(Trust(TrustMaterial.draw()), RANK_TRUST.engine)
                dialer = Dialer(other.keys, Purpose.TENSOR_PARALLEL, other.party(1), other.party(0))
                connection.sendall(struct.pack("!H", len(dialer.challenge)) + dialer.challenge)

        def join(rank: int) -> float:
            meeting = rendezvous.address if rank else rendezvous
            group = join_group(meeting, rank, 2, device=cpu, host="127.0.0.1", timeout_s=timeout_s, trust=trust)
            try:
                return float(group.all_reduce(torch.tensor([rank + 1.0])))
            finally:
                group.close()

        assert [future.result(2 * timeout_s) for future in [pool.submit(join, rank) for rank in range(2)]] == [3.0, 3.0]
    rendezvous.close()


@pytest.mark.parametrize("other", ["of another engine", "without TLS", "with TLS alone", "of another authority"])
def test_a_rank_that_is_not_like_the_first_is_refused(other: str) -> None:
    cpu = torch.device("cpu")
    rendezvous = Rendezvous("127.0.0.1", cpu, 1.0)
    encrypted = replace(RANK_TRUST, tls=with_tls().tls)
    first, second = {
        "of another engine": (RANK_TRUST, RankTrust(TRUST, Party("engine-1", 1))),
        "without TLS": (encrypted, RANK_TRUST),
        "with TLS alone": (RANK_TRUST, encrypted),
        "of another authority": (encrypted, replace(RANK_TRUST, tls=with_tls().tls)),
    }[other]
    with ThreadPoolExecutor(2) as pool:
        joining = [
            pool.submit(join_group, meeting, rank, 2, device=cpu, host="127.0.0.1", timeout_s=1.0, trust=trust)
            for rank, meeting, trust in ((0, rendezvous, first), (1, rendezvous.address, second))
        ]
        assert all(isinstance(future.exception(60.0), RankLost) for future in joining)
    rendezvous.close()
