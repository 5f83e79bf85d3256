"""Describes the model's tokens to the grammar compiler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from actors.model.grammar.errors import CompilerUnusable
from actors.model.grammar.token_text import TokenTexts, can_be_in_text

if TYPE_CHECKING:
    import xgrammar


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's tokens as the compiler needs them, and what UTF-8 and JSON demand of them."""

    tokens: xgrammar.TokenizerInfo
    texts: TokenTexts


class LazyVocabulary:
    """Loads the vocabulary on first use, on the caller's thread, since most engines never need one."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._loaded: Vocabulary | None = None

    def get(self) -> Vocabulary:
        """Return the vocabulary, loaded once. Raises CompilerUnusable. Safe from any thread."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded


def load_vocabulary(directory: Path, vocab_size: int, stop_token_ids: tuple[int, ...]) -> Vocabulary:
    """Read the checkpoint's tokenizer.

    vocab_size: the size of the model's vocabulary, which can be larger than the tokenizer's
    stop_token_ids: the tokens that end an output; a grammar allows them only where the output may end
    Raises CompilerUnusable.
    """
    try:
        # Imported here, since the import takes a second and most engines never get a grammar.
        import xgrammar

        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        found = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=list(stop_token_ids)
        )
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise CompilerUnusable(f"the tokenizer in {directory} cannot be used for grammars: {error}") from error
    specials = _special_token_ids(tokenizer)
    # The compiler never allows a token whose text is empty.
    texts = [
        text if token_id not in specials and can_be_in_text(text) else b""
        for token_id, text in enumerate(found.decoded_vocab)
    ]
    tokens = xgrammar.TokenizerInfo(
        texts,
        xgrammar.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=list(stop_token_ids),
        add_prefix_space=found.add_prefix_space,
    )
    return Vocabulary(tokens, TokenTexts(texts, -(-vocab_size // 32)))


def _special_token_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the special tokens. A grammar that allows "<|im_end|>" means these ten characters, not the token."""
    added = tokenizer.added_tokens_decoder
    return {token_id for token_id, token in added.items() if token.special}


def deserialize_grammar(serialized: str, vocabulary: Vocabulary) -> xgrammar.CompiledGrammar:
    """Read a grammar that another process has compiled for this vocabulary."""
    import xgrammar

    return xgrammar.CompiledGrammar.deserialize_json(serialized, vocabulary.tokens)
