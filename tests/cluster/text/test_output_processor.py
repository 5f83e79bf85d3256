import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.requests.request import EngineCoreRequest, FinishReason
from actors.core.requests.sampling_params import SamplingParams
from cluster.errors import InvalidRequest
from cluster.parameters.sampling_options import SamplingOptions
from cluster.text.output_processor import OutputProcessor, ProcessedOutput
from tests.fakes import EOS_TOKEN_ID, byte_tokenizer

TOKENIZER = byte_tokenizer()


def _processor(options: SamplingOptions, *, given_tokens: bytes = b"") -> OutputProcessor:
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=list(b"prompt"),
        output_token_ids=list(given_tokens),
        sampling_params=SamplingParams(min_tokens=options.min_tokens or 0),
    )
    return OutputProcessor(TOKENIZER, request, options)


def _output(
    first_position: int,
    token_ids: bytes | list[int],
    finish_reason: FinishReason | None = None,
    stop_token_id: int | None = None,
) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id="r",
        attempt=0,
        new_token_ids=list(token_ids),
        first_position=first_position,
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
    )


def test_a_stop_string_inside_an_output_ends_it_at_the_token_that_completes_it() -> None:
    processor = _processor(SamplingOptions(stop=("TOP",)))

    assert processor.process(_output(0, b"a S")).text == "a S"
    assert processor.process(_output(3, b"TOPPED")) == ProcessedOutput(
        text="",
        token_ids=list(b"TOP"),
        first_position=3,
        logprobs=None,
        finish_reason=FinishReason.STOP,
        stop_reason="TOP",
    )
    assert processor.num_output_tokens == 6


def test_held_text_goes_out_with_the_last_output() -> None:
    processor = _processor(SamplingOptions(stop=("TOP",)))

    assert processor.process(_output(0, b"aT")).text == "a"
    assert processor.process(_output(2, b"O", FinishReason.LENGTH)).text == "TO"


def test_a_stop_token_is_among_the_tokens_but_not_in_the_text() -> None:
    last = _output(1, b"b!", FinishReason.STOP, stop_token_id=ord("!"))

    processed = _processor(SamplingOptions()).process(last)

    assert (processed.text, processed.token_ids, processed.stop_reason) == ("b", list(b"b!"), ord("!"))
    assert _processor(SamplingOptions(include_stop_str_in_output=True)).process(last).text == "b!"


def test_an_end_of_sequence_token_has_no_text() -> None:
    processed = _processor(SamplingOptions()).process(_output(0, [97, EOS_TOKEN_ID], FinishReason.STOP, EOS_TOKEN_ID))

    assert (processed.text, processed.token_ids) == ("a", [97, EOS_TOKEN_ID])


def test_a_character_that_the_end_cuts_off_is_never_sent() -> None:
    processed = _processor(SamplingOptions()).process(_output(0, "a€".encode()[:-1], FinishReason.LENGTH))

    assert processed.text == "a"


def test_a_stop_string_before_min_tokens_is_just_text() -> None:
    processor = _processor(SamplingOptions(stop=("!",), min_tokens=3))

    assert processor.process(_output(0, b"a!")).finish_reason is None
    assert processor.process(_output(2, b"b")).text == "b"
    assert processor.process(_output(3, b"!")).stop_reason == "!"


def test_output_that_has_ended_cannot_be_resumed() -> None:
    with pytest.raises(InvalidRequest, match="output_token_ids is output with the stop string 'TOP'"):
        _processor(SamplingOptions(stop=("TOP",)), given_tokens=b"a TOP")


@given(text=st.text("aTOP€ ", min_size=1, max_size=12), data=st.data())
def test_a_resumed_request_sends_exactly_the_text_that_was_not_sent(text: str, data: st.DataObject) -> None:
    options = SamplingOptions(stop=("TOP", "€a"))
    tokens = text.encode()
    cut = data.draw(st.integers(0, len(tokens)))
    whole = _processor(options)
    pieces = [whole.process(_output(position, [token])) for position, token in enumerate(tokens)]
    ended = next((index for index, piece in enumerate(pieces) if piece.finish_reason is not None), len(tokens))
    cut = min(cut, ended)

    resumed = _processor(options, given_tokens=tokens[:cut])
    rest = [
        resumed.process(_output(position, [tokens[position]])) for position in range(cut, min(ended + 1, len(tokens)))
    ]

    assert [piece.text for piece in rest] == [piece.text for piece in pieces[cut : ended + 1]]
