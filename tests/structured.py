"""Structured output for tests: a compiler without a process, and what a model has to say under a grammar."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import xgrammar
from transformers import LogitsProcessor

from actors.config import GrammarConfig
from actors.core.requests.sampling_params import StructuredOutputParams
from actors.model.grammar import manager
from actors.model.grammar.compiler_child import answer
from actors.model.grammar.compiler_process import COMPILED
from actors.model.grammar.errors import GrammarRefused
from actors.model.grammar.matching import TokenMatcher
from actors.model.grammar.vocabulary import deserialize_grammar, load_vocabulary
from tests.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE
from tests.reference import load_model

KINDS = {
    "schema": StructuredOutputParams(
        "json_schema",
        json.dumps(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 6},
                    "sizes": {
                        "type": "array",
                        "items": {"type": "integer", "minimum": -9, "maximum": 99},
                        "maxItems": 3,
                    },
                    "kind": {"enum": ["a", "b"]},
                },
                "required": ["name", "sizes", "kind"],
            }
        ),
    ),
    "regex": StructuredOutputParams("regex", r"[a-f]{3}(-[0-9]{2}){6}!"),
    "choice": StructuredOutputParams("choice", json.dumps(['the first "one"\n', "the second é"])),
    "grammar": StructuredOutputParams("grammar", 'root ::= "(" pair ("," pair){9,12} ")"\npair ::= [0-9] [0-9] | "."'),
}
"""Forms whose outputs are sure to end soon, whatever the model likes."""
MAX_WHITESPACE = 1
"""Random weights love it."""


class CompilerInProcess:
    """In place of a CompilerProcess: it takes seconds to start one of those."""

    def __init__(self, config: GrammarConfig) -> None:
        self._compiler: xgrammar.GrammarCompiler | None = None

    def compile(self, params: StructuredOutputParams, vocabulary: Callable[[], str]) -> str:
        if self._compiler is None:
            tokens = xgrammar.TokenizerInfo.deserialize_json(vocabulary())
            self._compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
        said = answer(self._compiler, params.kind, params.value, MAX_WHITESPACE)
        if said[:1] != COMPILED:
            raise GrammarRefused(said[1:].decode())
        return said[1:].decode()

    def close(self) -> None:
        self._compiler = None


@contextmanager
def compiling_in_process() -> Iterator[None]:
    """Engines that are built in here start no processes for their grammars."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "CompilerProcess", CompilerInProcess)
        yield


def constrained_tokens(
    directory: Path,
    prompt: Sequence[int],
    params: StructuredOutputParams,
    num_tokens: int,
    processors: Sequence[LogitsProcessor] = (),
) -> list[int]:
    """The most likely tokens that a grammar allows, by transformers' own forward, until the end or so many.

    processors: transformers' own, which may forbid further tokens
    """
    vocabulary = load_vocabulary(directory, VOCAB_SIZE, (EOS_TOKEN_ID,))
    matcher = TokenMatcher(
        compiled(directory, params), vocabulary.texts, is_json=params.is_json, max_seconds_per_token=1.0
    )
    tokens = list(prompt)
    for _ in range(num_tokens):
        bits = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
        matcher.fill(bits, 0)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB_SIZE].astype(bool)
        with torch.inference_mode():
            logits = load_model(directory)(torch.tensor([tokens])).logits[:, -1]
        for processor in processors:
            logits = processor(torch.tensor([tokens]), logits)
        tokens.append(int(logits[0].masked_fill(~torch.from_numpy(allowed), -torch.inf).argmax()))
        assert matcher.accept(tokens[-1:]) is None
        if tokens[-1] == EOS_TOKEN_ID:
            break
    return tokens[len(prompt) :]


@functools.cache
def compiled(directory: Path, params: StructuredOutputParams) -> xgrammar.CompiledGrammar:
    vocabulary = load_vocabulary(directory, VOCAB_SIZE, (EOS_TOKEN_ID,))
    serialized = CompilerInProcess(GrammarConfig()).compile(params, vocabulary.tokens.serialize_json)
    return deserialize_grammar(serialized, vocabulary)
