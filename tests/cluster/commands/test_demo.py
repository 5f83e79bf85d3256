from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import islice

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.commands.demo import demo_prompts, exposed_transfer_s
from cluster.config import DEMO_MODEL
from tools.demo_corpus.programs import write_programs
from tools.judge_demo_model import continuations, cut_at_last_statement, is_python

_HEADS = ["def fibonacci(n):", "class Stack:", "def read_file(path):"]
FINISHED = generate_pb2.REQUEST_STATUS_FINISHED_LENGTH_CAPPED
RUNNING = generate_pb2.REQUEST_STATUS_RUNNING


def engine(**changes: float) -> generate_pb2.EngineTimings:
    statuses = {"prefilled": FINISHED, "running": RUNNING}
    made = [generate_pb2.StatusChange(status=statuses[name], at_s=at_s) for name, at_s in changes.items()]
    return generate_pb2.EngineTimings(status_changes=made)


def test_prompts_begin_with_heads_of_functions_and_no_two_alike() -> None:
    prompts = demo_prompts(16)
    assert len(prompts) == 16
    assert prompts[:3] == demo_prompts(3) == _HEADS
    assert len({prompt[:16] for prompt in prompts}) == 16
    lengths = [len(prompt) for prompt in prompts[3:]]
    assert lengths == sorted(lengths)


def test_the_exposed_part_of_a_transfer_is_from_the_end_of_prefill_to_running() -> None:
    timings = generate_pb2.Timings(
        prefill_engine=engine(running=1.0, prefilled=2.0),
        decode_engine=engine(running=2.25),
        transfer=generate_pb2.Transfer(transfer_s=0.5),
    )
    assert exposed_transfer_s(timings) == 0.25


def test_without_a_handoff_no_transfer_is_exposed() -> None:
    assert exposed_transfer_s(generate_pb2.Timings(decode_engine=engine(running=2.25))) is None


def test_the_heads_are_what_the_demo_model_was_trained_on() -> None:
    programs = list(islice(write_programs(seed=1), 1500))
    for head in _HEADS:
        assert any(program.startswith(head) for program in programs)


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return {head: continuations(model, tokenizer, head, num_tokens=160, num_samples=0)[0] for head in _HEADS}


def test_the_demo_model_continues_the_heads_with_python(answers: dict[str, str]) -> None:
    assert [head for head, answer in answers.items() if not is_python(head, answer)] == []


def test_the_demo_model_writes_a_fibonacci_that_works(answers: dict[str, str]) -> None:
    [head, _, _] = _HEADS
    definition = ast.parse(cut_at_last_statement(head + answers[head]) or "").body[0]
    names: dict[str, Callable[[int], int]] = {}
    exec(ast.unparse(definition), names)
    assert [names["fibonacci"](n) for n in (0, 1, 2, 10)] == [0, 1, 1, 55]


def test_the_demo_model_writes_a_stack_that_pushes_and_pops(answers: dict[str, str]) -> None:
    [_, head, _] = _HEADS
    definition = ast.parse(cut_at_last_statement(head + answers[head]) or "").body[0]
    assert isinstance(definition, ast.ClassDef)
    methods = {method.name for method in definition.body if isinstance(method, ast.FunctionDef)}
    assert methods >= {"__init__", "push", "pop"}
