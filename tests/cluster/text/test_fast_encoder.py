"""fastokens is used where it makes the tokens that Hugging Face's tokenizers make, and nowhere else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fastokens  # type: ignore[import-untyped]  # it ships no types
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from cluster.text import fast_encoder
from cluster.text.fast_encoder import FastEncoder, encode_exactly
from cluster.text.model_tokenizer import ModelTokenizer
from tests.cluster.tokenizer_kinds import BYTE_LEVEL, KINDS, SENTENCEPIECE, tokenizer_of_kind

_SPACES = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u3000", "\xa0", "\u2028", "\x00", "\x85"]
_LETTERS = [
    "é",
    "e\u0301",
    "あ",
    "漢字",
    "🙂",
    "👍🏽",
    "\u200d",
    "\u0e01",
    "\u0915\u094d",
    "\u017f",
    "\u212a",
    "İ",
    "ß",
]
_MARKS = [
    "'s",
    "'LL",
    "\u2019s",
    "1",
    "23",
    "4567",
    "...",
    "!?",
    "/",
    "a",
    "the",
    "Hello",
    "WORLD",
    "x_y",
    "▁",
    "<0x41>",
]
_ADDED = ["<|begin|>", "<|end|>", "<tool>", "<think>", " <think> ", "<thin"]
_PIECES = [*_SPACES, *_LETTERS, *_MARKS, *_ADDED]
_texts = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(_PIECES), max_size=40).map("".join),
    st.tuples(st.sampled_from(_PIECES), st.integers(1, 3000)).map(lambda drawn: drawn[0] * drawn[1]),
)


@pytest.fixture(params=BYTE_LEVEL)
def reference(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer_of_kind(request.param)


@pytest.fixture
def fast(reference: Tokenizer) -> FastEncoder:
    return FastEncoder.of(reference)


def _is_alike(encoder: FastEncoder | ModelTokenizer, reference: Tokenizer, text: str) -> bool:
    return all(
        encoder.encode(text, add_special_tokens=adds) == encode_exactly(reference, text, add_special_tokens=adds)
        for adds in (True, False)
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(text=_texts, begin=_texts, end=_texts)
def test_every_text_has_the_tokens_that_the_tokenizers_library_makes(
    kind: str, text: str, begin: str, end: str
) -> None:
    reference = tokenizer_of_kind(kind)
    tokenizer = ModelTokenizer(reference, use_fastokens=True)
    for one in (text, f"{begin}{text}", f"{begin}{text}{end}"):
        assert _is_alike(tokenizer, reference, one)


def test_byte_level_tokenizers_are_encoded_by_fastokens(reference: Tokenizer) -> None:
    assert ModelTokenizer(reference, use_fastokens=True).why_not_fast == ""


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_those_of_sentencepiece_are_not_as_it_takes_names_of_bytes_in_a_text_for_bytes(kind: str) -> None:
    tokenizer = ModelTokenizer(tokenizer_of_kind(kind), use_fastokens=True)
    assert tokenizer.why_not_fast.startswith("fastokens makes other tokens of ")
    assert _is_alike(tokenizer, tokenizer_of_kind(kind), "<0x41>")


def test_a_text_that_begins_as_one_before_it_does_has_its_own_tokens(fast: FastEncoder, reference: Tokenizer) -> None:
    """fastokens 0.1 took over what it had split of the last text, as far as the two were the same."""
    rng = random.Random(1)
    for begin in ("ab \n" * 1200, "".join(rng.choices(_PIECES, k=2500))):
        for middle in (" ", "   ", "\n", " \n", "12", "a", "é", "'", "あ"):
            for end in ("a", " ", "    ", " b", "2", "345", "\u0301", "s", ""):
                text = f"{begin}{middle}{end}"
                expected = encode_exactly(reference, text, add_special_tokens=False)
                assert fast.encode(text, add_special_tokens=False) == expected


def _all_characters(apart: int) -> Iterator[str]:
    """In texts of 64 of them each."""
    numbers = [*range(0, 0xD800, apart), *range(0xE000, 0x110000, apart)]
    for begin in range(0, len(numbers), 64):
        characters = map(chr, numbers[begin : begin + 64])
        yield "".join(f"a{character} 1{character}{character} \n{character}" for character in characters)


def test_characters_of_all_of_unicode_have_the_same_tokens(fast: FastEncoder, reference: Tokenizer) -> None:
    assert all(_is_alike(fast, reference, text) for text in _all_characters(apart=53))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_character_of_unicode_has_the_same_tokens(fast: FastEncoder, reference: Tokenizer) -> None:
    assert all(_is_alike(fast, reference, text) for text in _all_characters(apart=1))


def test_several_threads_may_encode_at_once(fast: FastEncoder, reference: Tokenizer) -> None:
    rng = random.Random(2)
    texts = ["".join(rng.choices(_PIECES, k=rng.choice((10, 300, 6000)))) for _ in range(40)]
    expected = [encode_exactly(reference, text, add_special_tokens=True) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            assert list(threads.map(lambda text: fast.encode(text, add_special_tokens=True), texts)) == expected


@pytest.mark.slow
def test_what_is_remembered_of_texts_has_a_bound() -> None:
    """One thread sees two and a half million words, and then a million others."""
    fast, rng = FastEncoder.of(tokenizer_of_kind("llama3")), random.Random(3)

    def memory_after(num_texts: int) -> int:
        for _ in range(num_texts):
            words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(1000)]
            fast.encode(" ".join(words), add_special_tokens=True)
        return int(psutil.Process().memory_info().rss)

    before = memory_after(2500)
    assert memory_after(1000) - before < 10 * 2**20


def _change(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda description: description.__setitem__(key, value)


def _change_pattern(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(description: dict[str, Any]) -> None:
        pattern = description["pre_tokenizer"]["pretokenizers"][0]["pattern"]
        assert old in pattern["Regex"]
        pattern["Regex"] = pattern["Regex"].replace(old, new)

    return change


def _change_added_token(content: str, **flags: bool) -> Callable[[dict[str, Any]], None]:
    def change(description: dict[str, Any]) -> None:
        [token] = [token for token in description["added_tokens"] if token["content"] == content]
        assert {key: token[key] for key in flags} != flags
        token.update(flags)

    return change


_SLIPS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "no normalization": ("qwen2", _change("normalizer", None)),
    "a normalization": ("llama3", _change("normalizer", {"type": "NFC"})),
    "no special tokens": ("llama3", _change("post_processor", None)),
    "single digits": ("llama3", _change_pattern("{1,3}", "")),
    "digits without end": ("llama3", _change_pattern("{1,3}", "+")),
    "ASCII's digits only": ("llama3", _change_pattern(r"\p{N}{1,3}", "[0-9]{1,3}")),
    "contractions in small letters only": ("gpt4o", _change_pattern("(?i:", "(?:")),
    "ASCII's spaces only": ("llama3", _change_pattern(r"\s+(?!\S)|\s+", r"[ \t\r\n]+(?![^ \t\r\n])|\s+")),
    "no space is left for the next word": ("llama3", _change_pattern(r"|\s+(?!\S)", "")),
    "no line ends after marks": ("llama3", _change_pattern(r"[\r\n]*", "")),
    "no slashes after marks": ("gpt4o", _change_pattern(r"[\r\n/]*", r"[\r\n]*")),
    "no accents in words": ("gpt4o", _change_pattern(r"\p{M}", "")),
    "an early merge is missing": ("llama3", lambda d: d["model"]["merges"].pop(3)),
    "the last merge is missing": ("gpt2", lambda d: d["model"]["merges"].pop()),
    "merges in another order": ("gpt2", lambda d: d["model"]["merges"].reverse()),
    "an added token takes no spaces": ("llama3", _change_added_token("<think>", lstrip=False)),
    "another one takes them": ("llama3", _change_added_token("<tool>", rstrip=True)),
    "an added token is a whole word": ("gpt2", _change_added_token("<tool>", single_word=True)),
    "an added token is unknown": ("gpt2", lambda d: d["added_tokens"].pop()),
}


@pytest.mark.parametrize("slip", _SLIPS)
def test_one_that_makes_other_tokens_is_not_used(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, change = _SLIPS[slip]
    description = json.loads(tokenizer_of_kind(kind).to_str())
    change(description)
    made = fastokens.Tokenizer.from_json_str(json.dumps(description))
    _pretend(monkeypatch, lambda _: made)

    tokenizer = ModelTokenizer(tokenizer_of_kind(kind), use_fastokens=True)

    assert tokenizer.why_not_fast.startswith("fastokens makes other tokens of ")
    text = "It's 1234  naïve <think> tools.\n"
    assert tokenizer.encode(text) == tokenizer_of_kind(kind).encode(text).ids


def _pretend(monkeypatch: pytest.MonkeyPatch, make: Callable[[str], Any]) -> None:
    class Tokenizer:
        from_json_str = staticmethod(make)

    monkeypatch.setattr(fastokens, "Tokenizer", Tokenizer)
    monkeypatch.setattr(fast_encoder, "_alike", set())


def test_a_kind_that_fastokens_does_not_know_is_left_to_the_tokenizers_library() -> None:
    backend = Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.normalizer = normalizers.Lowercase()

    tokenizer = ModelTokenizer(backend, use_fastokens=True)

    assert tokenizer.why_not_fast.startswith("fastokens does not support it: ")
    assert tokenizer.encode("One two three") == [0, 1, 2]


def test_it_is_not_used_where_it_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(_: str) -> None:
        raise AssertionError

    _pretend(monkeypatch, make)
    tokenizer = ModelTokenizer(tokenizer_of_kind("gpt2"), use_fastokens=False)
    assert tokenizer.why_not_fast == "fastokens is not asked for"
    assert tokenizer.encode("as ever") == tokenizer_of_kind("gpt2").encode("as ever").ids


def test_a_tokenizer_that_fails_itself_is_left_alone() -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[], unk_token="<unk>"))
    assert ModelTokenizer(backend, use_fastokens=True).why_not_fast.startswith(
        "the tokenizers library itself fails at "
    )


def test_a_text_that_it_fails_at_is_encoded_all_the_same() -> None:
    class Failing:
        def encode(self, text: str, *, add_special_tokens: bool) -> None:
            raise ValueError("match limit exceeded")

    backend = tokenizer_of_kind("llama3")
    assert FastEncoder(Failing(), backend).encode("a b", add_special_tokens=True) == backend.encode("a b").ids


def test_a_tokenizer_that_comes_again_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Tokenizer] = []

    def trial_texts(tokenizer: Tokenizer) -> Iterator[str]:
        compared.append(tokenizer)
        return iter(["a text"])

    monkeypatch.setattr(fast_encoder, "_alike", set())
    monkeypatch.setattr(fast_encoder, "_trial_texts", trial_texts)
    for kind in ("gpt2", "llama3", "gpt2", "llama3"):
        FastEncoder.of(tokenizer_of_kind(kind))
    assert compared == [tokenizer_of_kind("gpt2"), tokenizer_of_kind("llama3")]
