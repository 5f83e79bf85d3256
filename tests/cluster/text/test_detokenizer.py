from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from cluster.text.detokenizer import Detokenizer
from tests.fakes import EOS_TOKEN_ID, byte_tokenizer

TOKENIZER = byte_tokenizer()


def _decode(prompt: bytes, output: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER, list(prompt), skip_special_tokens=skip_special_tokens)
    return [detokenizer.step(token_id) for token_id in output]


def test_a_character_split_over_tokens_comes_whole_with_its_last_one() -> None:
    assert _decode(b"hi ", list("a€b".encode())) == ["a", "", "", "€", "b"]


def test_special_tokens_show_only_if_they_are_not_skipped() -> None:
    assert _decode(b"x", [*b"ab", EOS_TOKEN_ID]) == ["a", "b", ""]
    assert _decode(b"x", [*b"ab", EOS_TOKEN_ID], skip_special_tokens=False) == ["a", "b", "<eos>"]


def test_a_prompt_that_ends_inside_a_character_is_not_repeated_as_output() -> None:
    pieces = _decode("text €".encode()[:-1], [*b"abc"])

    assert pieces == ["a", "b", "c"]


@given(prompt=st.text(max_size=12), output=st.text(max_size=12))
def test_pieces_join_to_the_text_and_none_is_half_a_character(prompt: str, output: str) -> None:
    output = output.replace("\ufffd", "")

    pieces = _decode(prompt.encode(), list(output.encode()))

    assert "".join(pieces) == output
    assert not any("\ufffd" in piece for piece in pieces)


def test_decoding_goes_on_after_a_decoder_rewrites_what_is_out() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "XYZ")])
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=True)

    assert [detokenizer.step(token_id) for token_id in (0, 1, 2)] == ["a", "b", "c"]
