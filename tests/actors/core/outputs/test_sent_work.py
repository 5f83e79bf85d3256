import msgspec
import pytest

from actors.core.outputs.sent_work import SentWork


@pytest.mark.parametrize(
    ("work", "num_blocks"),
    [
        (SentWork(), 0),
        (SentWork(num_context_tokens=15), 1),
        (SentWork(num_context_tokens=16), 2),  # with the first new token
        (SentWork(num_computed_tokens=16.0), 1),
        (SentWork(num_computed_tokens=17.0, consumer="decode-0"), 2),
    ],
)
def test_a_request_takes_the_blocks_of_its_tokens_and_of_its_state(work: SentWork, num_blocks: int) -> None:
    assert work.num_blocks(16) == num_blocks
    assert work.num_blocks(16, 5) == (num_blocks + 5 if num_blocks else 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_computed_tokens": -1.0},
        {"prefill_s": float("nan")},
        {"prefill_s": float("inf")},
        {"num_context_tokens": 2**63},
        {"num_handoff_bytes": -1.0},
        {"num_output_tokens": -1.0},
        {"consumer": ""},
    ],
)
def test_what_no_ingress_would_predict_is_refused(wrong: dict[str, object]) -> None:
    packed = msgspec.msgpack.encode(wrong)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(packed, type=SentWork)
