from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.bench.arrivals import PlannedRequest
from cluster.bench.prompts import PromptSource, SharedPrefix, Vocabulary, checked, read_vocabulary, words_among
from cluster.errors import InvalidConfig

VOCABULARY = Vocabulary(range(100, 1100), ["one", "two", "three"])


def _request(index: int, num_tokens: int, blocks: tuple[int, ...] = ()) -> PlannedRequest:
    return PlannedRequest(index, 0.0, num_tokens, 1, blocks)


def test_a_prompt_has_the_planned_number_of_tokens_of_the_vocabulary() -> None:
    prompt = PromptSource(VOCABULARY, seed=1).token_ids(_request(0, 700))
    assert len(prompt) == 700
    assert set(prompt) <= set(VOCABULARY.token_ids)


def test_a_prompt_depends_on_the_seed_and_its_number_only() -> None:
    source = PromptSource(VOCABULARY, seed=1)
    first, second = source.token_ids(_request(0, 40)), source.token_ids(_request(1, 40))
    assert PromptSource(VOCABULARY, seed=1).token_ids(_request(1, 40)) == second
    assert first != second
    assert PromptSource(VOCABULARY, seed=2).token_ids(_request(0, 40)) != first


def test_prompts_share_a_prefix_of_their_group() -> None:
    source = PromptSource(VOCABULARY, seed=1, prefix=SharedPrefix(8, num_prefixes=2))
    prompts = [source.token_ids(_request(index, 4)) for index in range(4)]
    assert [len(prompt) for prompt in prompts] == [12] * 4
    assert prompts[0][:8] == prompts[2][:8] != prompts[1][:8] == prompts[3][:8]
    assert len({tuple(prompt[8:]) for prompt in prompts}) == 4


def test_prompts_of_a_trace_share_the_blocks_of_the_same_ids() -> None:
    source = PromptSource(VOCABULARY, seed=1)
    first, second = source.token_ids(_request(0, 1000, (7, 8))), source.token_ids(_request(1, 600, (7, 9)))
    assert (len(first), len(second)) == (1000, 600)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]


def test_a_text_has_a_word_for_each_token() -> None:
    text = PromptSource(VOCABULARY, seed=1, prefix=SharedPrefix(2)).text(_request(0, 5))
    assert len(text.split(" ")) == 7
    assert set(text.split(" ")) <= set(VOCABULARY.words)


def test_words_are_tokens_that_begin_with_a_space() -> None:
    spellings = ["Ġthe", "▁river", " sea", "the", "Ġa", "Ġ12", "Ġnaïve", "ĠThe"]
    assert words_among(spellings) == ["The", "river", "sea", "the"]


def test_a_tokenizer_gives_its_ids_without_special_ones(tmp_path: Path) -> None:
    spellings = {f"Ġw{chr(97 + index)}": index for index in range(20)}
    tokenizer = Tokenizer(models.BPE(vocab=spellings, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = read_vocabulary(tmp_path)
    assert list(vocabulary.token_ids) == list(range(20))
    assert vocabulary.words[:2] == ["wa", "wb"]
    assert read_vocabulary(tmp_path / "tokenizer.json") == vocabulary


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read as a tokenizer"):
        read_vocabulary(tmp_path)


def test_a_vocabulary_too_small_for_prompts_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="it gives 15 tokens to draw prompts from; at least 16"):
        checked(Vocabulary(range(15)), "here")
