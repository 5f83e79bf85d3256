"""The text and the bytes of single tokens, for log-probabilities."""

from __future__ import annotations

from typing import Final

from tokenizers import Tokenizer

_BROKEN: Final = "\ufffd"
_SPACE_MARK: Final = "\u2581"
"""SentencePiece's character for a space."""
_MAX_CACHED: Final = 65_536


def _bytes_by_spelling() -> dict[str, int]:
    """Return GPT-2's spelling of bytes: printable ones as themselves, the others as the characters from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}


_BYTES_BY_SPELLING: Final = _bytes_by_spelling()


class TokenTexts:
    """The texts of one tokenizer's tokens. Texts are cached once they have been asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def text(self, token_id: int) -> str:
        """Return a token's text; U+FFFD stands for a part of a character."""
        return self._look_up(token_id)[0]

    def text_and_bytes(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's text and its bytes; the bytes are exact even if they are only a part of a character."""
        return self._look_up(token_id)

    def _look_up(self, token_id: int) -> tuple[str, list[int]]:
        if (known := self._known.get(token_id)) is not None:
            return known
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        spelling = self._tokenizer.id_to_token(token_id) or ""
        if spelling.startswith(_SPACE_MARK) and not text.startswith(" "):
            text = " " + text  # The decoder has removed the space, as it does from the first token of every text.
        found = text, list(_bytes_of(spelling) if _BROKEN in text else text.encode())
        if len(self._known) < _MAX_CACHED:
            self._known[token_id] = found
        return found


def _bytes_of(spelling: str) -> bytes:
    if spelling.startswith("<0x") and len(spelling) == len("<0xAB>"):
        return bytes.fromhex(spelling[3:5])
    if all(char in _BYTES_BY_SPELLING for char in spelling):
        return bytes(_BYTES_BY_SPELLING[char] for char in spelling)
    return spelling.encode()
