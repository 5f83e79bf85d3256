"""Tokens and words that an output must not have as rows of the table, each with drafts and some with a grammar."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from transformers import SuppressTokensLogitsProcessor

from actors.config import EngineConfig
from cluster.parameters.generation import GenerateChunk, GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from tests.checkpoints import VOCAB_SIZE
from tests.features.feature import Generated, Setup
from tests.integration.promises import token_ids_of
from tests.integration.recovering_cluster import RecoveringCluster
from tests.reference import greedy_tokens, random_prompt
from tests.structured import KINDS, constrained_tokens
from tests.token_rules import ALLOWED, OutputRules, ruled_tokens, words_in

ROWS: Final = (
    "allowed_token_ids, drafted ahead",
    "bad_words, drafted ahead",
    "allowed_token_ids and bad_words, with a grammar",
)
_NUM_TOKENS: Final = 24
_NUM_FORMED_TOKENS: Final = 80


def prepare_token_rules(config: EngineConfig, directory: Path) -> Setup:
    """The rows: greedy output is what generate() says under transformers' own processors.

    config: of engines with grammars, that draft
    """
    prompt = random_prompt(9) * 4
    words = words_in(directory, greedy_tokens(directory, tuple(prompt), _NUM_TOKENS))
    greedy = SamplingOptions(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    asked = [
        (replace(greedy, allowed_token_ids=ALLOWED), ruled_tokens(directory, prompt, _NUM_TOKENS, ALLOWED)),
        (
            replace(greedy, bad_words=words.words),
            ruled_tokens(directory, prompt, _NUM_TOKENS, bad_words=words.token_ids),
        ),
        _with_grammar(directory, prompt),
    ]
    features = []
    for name, (sampling, expected) in zip(ROWS, asked, strict=True):
        request = GenerateRequest(prompt=TokenPrompt(prompt), sampling=sampling, cache_salt=name)
        features.append(Generated(name, request, partial(_assert_tokens, expected)))
    return Setup(config, features, check=_assert_drafted)


def _with_grammar(directory: Path, prompt: list[int]) -> tuple[SamplingOptions, list[int]]:
    form = KINDS["regex"]
    formed = constrained_tokens(directory, prompt, form, _NUM_FORMED_TOKENS)
    first, *others = formed
    allowed = tuple(token_id for token_id in range(VOCAB_SIZE) if token_id != first)
    words = words_in(directory, others)
    rules = [SuppressTokensLogitsProcessor([first]), OutputRules(len(prompt), words.token_ids)]
    expected = constrained_tokens(directory, prompt, form, _NUM_FORMED_TOKENS, rules)
    assert expected != formed
    sampling = SamplingOptions(
        temperature=0.0,
        max_tokens=_NUM_FORMED_TOKENS,
        structured_output=form,
        allowed_token_ids=allowed,
        bad_words=words.words,
    )
    return sampling, expected


def _assert_tokens(expected: list[int], chunks: list[GenerateChunk]) -> None:
    assert token_ids_of(chunks) == expected


def _assert_drafted(cluster: RecoveringCluster) -> None:
    stats = [engine.stats.spec_decoding_stats for engine in cluster.engines.values()]
    assert sum(stat.num_draft_tokens for stat in stats if stat is not None) > 0
