"""Grammars as the scheduler sees them: compiled once, elsewhere; followed by each request for itself.

Tests of actors/model/grammar/cache.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from actors.config import GrammarConfig
from actors.core.requests.sampling_params import StructuredOutputParams
from actors.core.requests.structured_output import GrammarFailure
from actors.model.grammar import manager as manager_module
from actors.model.grammar.cache import GrammarCache
from actors.model.grammar.errors import CompilerUnusable, GrammarError, GrammarTooLarge, GrammarTooSlow
from actors.model.grammar.manager import XGrammarManager
from tests.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE
from tests.structured import CompilerInProcess

CheckpointOf = Callable[[str], Path]
TIMEOUT_S = 60.0


def regex(value: str) -> StructuredOutputParams:
    return StructuredOutputParams("regex", value)


def token(character: str, directory: Path) -> int:
    [token_id] = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(character).ids
    return int(token_id)


@dataclass
class HeldCompiler(CompilerInProcess):
    """Compiles when the test lets it. compiled: what it was given, in order"""

    config: GrammarConfig
    may_go_on: threading.Event = field(default_factory=threading.Event)
    has_begun: threading.Event = field(default_factory=threading.Event)
    compiled: list[str] = field(default_factory=list)
    is_broken: bool = False
    error: GrammarError | None = None

    def __post_init__(self) -> None:
        super().__init__(self.config)
        self.may_go_on.set()

    def compile(self, params: StructuredOutputParams, vocabulary: Callable[[], str]) -> str:
        self.compiled.append(params.value)
        self.has_begun.set()
        assert self.may_go_on.wait(TIMEOUT_S)
        if self.is_broken:
            raise CompilerUnusable("it does not start")
        if self.error is not None:
            raise self.error
        return super().compile(params, vocabulary)


class Grammars:
    """A manager, its one compiler, and a wait for what it has to say."""

    def __init__(self, directory: Path, config: GrammarConfig) -> None:
        self._has_news = threading.Event()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager_module, "CompilerProcess", HeldCompiler)
            self.manager = XGrammarManager.of_checkpoint(
                config,
                directory,
                vocab_size=VOCAB_SIZE,
                stop_token_ids=(EOS_TOKEN_ID,),
                on_ready=self._has_news.set,
            )
        [compiler] = self.manager._compilers
        assert isinstance(compiler, HeldCompiler)
        self.compiler = compiler

    def start(self, request_id: str, params: StructuredOutputParams, *output_token_ids: int) -> None:
        self.manager.start_compiling(request_id, params, output_token_ids)

    def wait(self) -> dict[str, GrammarFailure | None]:
        assert self._has_news.wait(TIMEOUT_S)
        self._has_news.clear()
        return self.manager.take_compiled()

    def make(self, request_id: str, params: StructuredOutputParams) -> None:
        self.start(request_id, params)
        assert self.wait() == {request_id: None}

    def allowed(self, *request_ids: str) -> list[list[int]]:
        bits = self.manager.fill_bitmask(request_ids)
        assert bits.shape == (len(request_ids), -(-VOCAB_SIZE // 32))
        assert bits.dtype == np.int32
        return [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in bits]


@pytest.fixture
def directory(checkpoint: CheckpointOf) -> Path:
    return checkpoint("llama")


@pytest.fixture
def grammars(directory: Path) -> Iterator[Grammars]:
    grammars = Grammars(directory, GrammarConfig(max_matching_ms_per_token=1.0))
    yield grammars
    grammars.compiler.may_go_on.set()
    grammars.manager.shutdown()


def test_the_mask_follows_each_request_on_its_own_way(grammars: Grammars, directory: Path) -> None:
    a, b, c = (token(character, directory) for character in "abc")
    grammars.make("one", regex("ab|c"))
    grammars.start("other", regex("ab|c"))
    assert grammars.manager.take_compiled() == {"other": None}
    assert grammars.manager.accept_tokens("one", [a]) is None
    assert grammars.allowed("one", "other") == [[b], sorted([a, c])]
    assert grammars.manager.accept_tokens("one", [b]) is None
    assert grammars.allowed("one") == [[EOS_TOKEN_ID]]
    assert grammars.manager.accept_tokens("one", [EOS_TOKEN_ID]) is None


def test_a_token_that_the_grammar_does_not_allow_is_objected_to(grammars: Grammars, directory: Path) -> None:
    a, b = token("a", directory), token("b", directory)
    grammars.make("r", regex("aa"))
    assert grammars.manager.accept_tokens("r", [a, b]) == f"the grammar does not allow token {b} after 1 tokens"


def test_requests_with_the_same_grammar_wait_for_one_compilation(grammars: Grammars) -> None:
    grammars.compiler.may_go_on.clear()
    for request_id in "abc":
        grammars.start(request_id, regex("x"))
    grammars.manager.release("b")
    assert grammars.manager.take_compiled() == {}
    grammars.compiler.may_go_on.set()
    assert grammars.wait() == {"a": None, "c": None}
    assert grammars.compiler.compiled == ["x"]


def test_a_grammar_is_refused_once_for_all_that_have_it(grammars: Grammars) -> None:
    failure = GrammarFailure("Regex parsing error at position 3: The parenthesis is not closed.")
    grammars.start("a", regex("(x"))
    assert grammars.wait() == {"a": failure}
    grammars.start("b", regex("(x"))
    assert grammars.manager.take_compiled() == {"b": failure}
    assert grammars.compiler.compiled == ["(x"]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (StructuredOutputParams("json_schema", '{"$ref": "#"}'), "no output could be of this form"),
        (StructuredOutputParams("json_schema", '{"type": "strang"}'), 'Unsupported type "strang"'),
        (StructuredOutputParams("json_schema", '{"$ref": "#/a"}'), "Cannot find field a in #/a"),
        (StructuredOutputParams("regex", r"\bfoo"), "Word boundary is not supported yet"),
        (StructuredOutputParams("grammar", "a ::= b"), 'The root rule with name "root" is not found'),
    ],
)
def test_the_compilers_words_say_what_is_wrong(params: StructuredOutputParams, words: str, grammars: Grammars) -> None:
    grammars.start("r", params)
    failure = grammars.wait()["r"]
    assert failure is not None
    assert failure.is_requests_fault
    assert words in failure.reason
    assert ".cc" not in failure.reason


def test_a_compiler_that_is_broken_is_no_fault_of_the_request_and_is_tried_again(grammars: Grammars) -> None:
    grammars.compiler.is_broken = True
    grammars.start("a", regex("x"))
    assert grammars.wait() == {"a": GrammarFailure("it does not start", is_requests_fault=False)}
    grammars.compiler.is_broken = False
    grammars.make("b", regex("x"))


def test_what_nobody_waits_for_any_more_is_not_compiled(grammars: Grammars) -> None:
    grammars.compiler.may_go_on.clear()
    grammars.start("a", regex("x"))
    assert grammars.compiler.has_begun.wait(TIMEOUT_S)
    grammars.start("b", regex("y"))
    grammars.start("c", regex("z"))
    grammars.manager.release("b")
    grammars.compiler.may_go_on.set()
    ready: dict[str, GrammarFailure | None] = {}
    while "c" not in ready:
        ready |= grammars.wait()
    assert (ready, grammars.compiler.compiled) == ({"a": None, "c": None}, ["x", "z"])
    grammars.make("d", regex("y"))


def test_a_request_goes_on_after_the_tokens_that_it_came_with(grammars: Grammars, directory: Path) -> None:
    a, b = token("a", directory), token("b", directory)
    grammars.start("r", regex("aab"), a, a)
    assert grammars.wait() == {"r": None}
    assert grammars.allowed("r") == [[b]]
    grammars.start("s", regex("aab"), b)
    assert grammars.manager.take_compiled() == {
        "s": GrammarFailure(f"the grammar does not allow token {b} after 0 tokens")
    }


def test_compilations_are_counted_with_why_they_failed_and_those_that_were_not_needed(grammars: Grammars) -> None:
    grammars.make("a", regex("x"))
    grammars.start("again", regex("x"))
    grammars.start("b", regex("(x"))
    grammars.wait()
    grammars.start("again wrong", regex("(x"))
    for number, error in enumerate([GrammarTooSlow("too slow"), GrammarTooLarge("too large"), GrammarTooLarge("more")]):
        grammars.compiler.error = error
        grammars.start(f"c{number}", regex(f"y{number}"))
        grammars.wait()
    grammars.compiler.is_broken = True
    grammars.start("d", regex("z"))
    grammars.wait()
    stats = grammars.manager.make_stats()
    assert stats.num_compiled == 1
    assert stats.num_failed == {"wrong": 1, "too_slow": 1, "too_large": 2, "no_compiler": 1}
    assert stats.num_cached == 2
    assert stats.compile_s > 0


def test_special_tokens_are_no_text(grammars: Grammars) -> None:
    grammars.make("r", StructuredOutputParams("choice", '["<|im_end|>"]'))
    [allowed] = grammars.allowed("r")
    assert allowed
    assert min(allowed) > 2


@pytest.mark.parametrize("schema", ['{"type": "string", "maxLength": 9}', '{"type": "string", "pattern": "^[^a]*$"}'])
def test_strings_of_json_have_control_characters_in_escapes_only(
    schema: str, grammars: Grammars, directory: Path
) -> None:
    grammars.make("r", StructuredOutputParams("json_schema", schema))
    assert grammars.manager.accept_tokens("r", [token('"', directory)]) is None
    [allowed] = grammars.allowed("r")
    texts = [grammars.manager._vocabulary.get().tokens.decoded_vocab[token_id] for token_id in allowed]
    assert b"b" in texts
    assert not [text for text in texts if min(text) < 0x20]


def test_an_ambiguous_grammar_ends_before_it_holds_the_engine_up(
    grammars: Grammars, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.model.grammar.matching._GRACE_S", 0.05)
    a = token("a", directory)
    grammars.make("r", StructuredOutputParams("grammar", 'root ::= root root | "a" | ""'))
    grammars.make("s", StructuredOutputParams("grammar", 'root ::= "a"*'))
    objections = (grammars.manager.accept_tokens("r", [a]) for _ in range(2000))
    objection = next(objection for objection in objections if objection is not None)
    assert objection.startswith("the grammar is too ambiguous: following ")
    monkeypatch.setattr("actors.model.grammar.matching._GRACE_S", TIMEOUT_S)  # This one may have to wait for a core.
    assert grammars.manager.accept_tokens("s", [a] * 2000) is None


def test_the_cache_forgets_what_was_not_used_for_longest(directory: Path) -> None:
    grammars = Grammars(directory, GrammarConfig(cache_mib=1))
    grammars.manager._cache = GrammarCache(3_000)
    for value in ["x", "y", "x", "z" * 2_000, "x", "y"]:
        grammars.start(value, regex(value))
        while value not in grammars.manager.take_compiled():
            assert grammars._has_news.wait(TIMEOUT_S)
            grammars._has_news.clear()
    assert grammars.compiler.compiled == ["x", "y", "z" * 2_000, "x", "y"]
    grammars.manager.shutdown()


def test_a_model_whose_vocabulary_is_larger_than_its_tokenizers_has_no_such_tokens(directory: Path) -> None:
    grammars = Grammars(directory, GrammarConfig())
    grammars.make("r", regex("[^x]*"))
    [allowed] = grammars.allowed("r")
    assert max(allowed) < VOCAB_SIZE
    grammars.manager.shutdown()
