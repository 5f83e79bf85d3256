"""What the grammar compiler knows of the model's tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from actors.model.grammar.errors import CompilerUnusable

if TYPE_CHECKING:
    import xgrammar


class LazyVocabulary:
    """Loads on first use, on whichever thread that is: what no request needs costs an engine nothing."""

    def __init__(self, load: Callable[[], xgrammar.TokenizerInfo]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._loaded: xgrammar.TokenizerInfo | None = None

    def get(self) -> xgrammar.TokenizerInfo:
        """Raises CompilerUnusable."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded


def load_vocabulary(directory: Path, vocab_size: int, stop_token_ids: tuple[int, ...]) -> xgrammar.TokenizerInfo:
    """Read the checkpoint's tokenizer.

    vocab_size: the model's, which can be larger than the tokenizer's
    stop_token_ids: end an output; a grammar allows them where it is complete, and nowhere else
    Raises CompilerUnusable.
    """
    try:
        # Here and not above: it takes a second, and most engines never see a grammar.
        import xgrammar

        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        found = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=list(stop_token_ids)
        )
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise CompilerUnusable(f"the tokenizer of {directory} is of no use for grammars: {error}") from error
    texts = found.decoded_vocab
    for token_id in _special_token_ids(tokenizer):
        if token_id < len(texts):
            texts[token_id] = b""
    return xgrammar.TokenizerInfo(
        texts,
        xgrammar.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=list(stop_token_ids),
        add_prefix_space=found.add_prefix_space,
    )


def _special_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that are no text: a grammar that allows "<|im_end|>" means these ten characters, not the token."""
    added = tokenizer.added_tokens_decoder
    return [token_id for token_id, token in added.items() if token.special]


def deserialize_grammar(serialized: str, vocabulary: xgrammar.TokenizerInfo) -> xgrammar.CompiledGrammar:
    """Read a grammar that another process has compiled for this vocabulary."""
    import xgrammar

    return xgrammar.CompiledGrammar.deserialize_json(serialized, vocabulary)
