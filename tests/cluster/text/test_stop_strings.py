from hypothesis import given
from hypothesis import strategies as st

from cluster.text.stop_strings import StopStrings


def _feed(stop: StopStrings, pieces: list[str]) -> list[str]:
    return [stop.push(piece) for piece in pieces]


def test_without_stop_strings_all_text_goes_through() -> None:
    assert _feed(StopStrings([], include_in_text=False), ["a", "", "b"]) == ["a", "", "b"]


def test_a_stop_string_across_pieces_cuts_the_text_before_it() -> None:
    stop = StopStrings(["STOP"], include_in_text=False)

    assert _feed(stop, ["hello S", "TO", "P and more", "later"]) == ["hello ", "", "", ""]
    assert stop.matched == "STOP"
    assert stop.flush() == ""


def test_the_stop_string_stays_in_the_text_if_asked() -> None:
    stop = StopStrings(["STOP"], include_in_text=True)

    assert _feed(stop, ["hello S", "TOP and more"]) == ["hello ", "STOP"]


def test_text_that_turns_out_not_to_be_a_stop_string_goes_out_late() -> None:
    stop = StopStrings(["aab"], include_in_text=False)

    assert _feed(stop, ["xa", "a", "a", "c"]) == ["x", "", "a", "aac"]
    assert stop.matched is None


def test_held_text_goes_out_at_the_end() -> None:
    stop = StopStrings(["STOP"], include_in_text=False)

    assert stop.push("to be ST") == "to be "
    assert stop.flush() == "ST"


def _reference(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """Character by character: what a reader of single characters would see."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_the_result_does_not_depend_on_where_text_is_cut(pieces: list[str], stops: list[str], include: bool) -> None:
    stop = StopStrings(stops, include_in_text=include)

    text = "".join(_feed(stop, pieces)) + stop.flush()

    assert (text, stop.matched) == _reference("".join(pieces), stops, include=include)
