from __future__ import annotations

import itertools

import numpy as np
import pytest

from actors.model.grammar.token_text import TokenTexts, can_be_in_text

BYTES = [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize(
    "token", ["é".encode(), b"\x9f", b"\x80\x80\x80a", b"a\xe0", b"\xf0\x9f\x98", "é日🙂".encode()[1:-1]]
)
def test_pieces_of_text_can_be_in_text(token: bytes) -> None:
    assert can_be_in_text(token)


@pytest.mark.parametrize(
    "token", [b"\xc0", b"\xff", b"\xf5", b"\xe0\x80", b"\xed\xa0\x80", b"\xc3a", b"\x80\x80\x80\x80"]
)
def test_what_is_no_piece_of_any_text_cannot(token: bytes) -> None:
    assert not can_be_in_text(token)


def begins_a_character(lead: int, second: int) -> bool:
    num_more = 0 if lead < 0xE0 else 1 if lead < 0xF0 else 2
    try:
        (bytes([lead, second]) + b"\x80" * num_more).decode()
    except UnicodeDecodeError:
        return False
    return True


def test_after_a_first_byte_exactly_the_second_ones_are_allowed_that_utf8_has() -> None:
    texts = TokenTexts(BYTES, num_words=8)
    for lead, second in itertools.product(range(0xC2, 0xF5), range(0x80, 0xC0)):
        mask = texts.mask_after(lead)
        is_allowed = mask is None or bool(np.unpackbits(mask.view(np.uint8), bitorder="little")[second])
        assert is_allowed == can_be_in_text(bytes([lead, second])) == begins_a_character(lead, second), (lead, second)


def test_after_a_whole_character_the_grammar_alone_decides() -> None:
    texts = TokenTexts([b"", b"a", "é".encode(), b"\xe0"], num_words=1)
    assert [texts.mask_after(token_id) is None for token_id in range(4)] == [True, True, True, False]


def test_json_has_no_control_characters_but_line_ends() -> None:
    mask = TokenTexts(BYTES, num_words=8).json_mask
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert [bytes([byte]) for byte in range(0x20) if allowed[byte]] == [b"\n", b"\r"]
    assert allowed[0x20:].all()
