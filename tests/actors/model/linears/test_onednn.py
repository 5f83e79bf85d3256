"""oneDNN's products: which data types work, and what a row's result depends on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from actors.model.linears import onednn
from actors.model.linears.onednn import RowResults, is_close, multiply, reason_against, reorder_weight, try_rows
from actors.model.linears.packed_linear import PackedProduct

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((48, 64), (50, 30), (768, 1280), (2048, 768), (4864, 128))
"""(in_features, out_features); one row alone is summed in another order where there are many inputs."""


def skip_without(dtype: torch.dtype) -> None:
    if (reason := reason_against(dtype)) is not None:
        pytest.skip(reason)


def raising(error: Exception) -> Callable[..., Tensor]:
    def fail(*arguments: object) -> Tensor:
        raise error

    return fail


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_with_a_reordered_weight_is_the_plain_one(dtype: torch.dtype, *, has_bias: bool) -> None:
    skip_without(dtype)
    torch.manual_seed(1)
    weight, bias = torch.randn(64, 48).to(dtype), torch.randn(64).to(dtype) if has_bias else None
    reordered = reorder_weight(weight)

    for shape in ((0, 48), (1, 48), (1, 7, 48), (48,)):
        inputs = torch.randn(shape).to(dtype)
        expected = functional.linear(inputs, weight, bias)
        assert multiply(inputs, reordered, bias).shape == expected.shape
        assert not expected.numel() or is_close(multiply(inputs, reordered, bias), expected)


def test_float32_works_wherever_torch_has_onednn() -> None:
    assert (reason_against(torch.float32) is None) == torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'"),
            "no attribute '_linear_pointwise'",
        ),
        (RuntimeError("fp16 path needs the cpu support avx_ne_convert\nat line 3"), "avx_ne_convert"),
        (TypeError("missing an argument"), "says: missing an argument"),
    ],
)
def test_operators_that_are_gone_or_refuse_are_a_reason(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "reorder_weight", raising(error))

    assert str(reason_against(torch.float32)).endswith(reason)


def test_an_operator_that_computes_something_else_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "multiply", lambda inputs, weight, bias: torch.zeros(len(inputs), len(bias)))

    assert reason_against(torch.float32) == "torch's operator gives other results than a plain product"


def test_other_data_types_are_refused_by_name() -> None:
    assert "not with torch.float64" in str(reason_against(torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_reordered", [False, True])
def test_a_row_alone_and_among_others_has_the_same_bits(
    dtype: torch.dtype, shape: tuple[int, int], *, is_reordered: bool, has_bias: bool
) -> None:
    skip_without(dtype)
    torch.manual_seed(2)
    in_features, out_features = shape
    weight, bias = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features).to(dtype)
    results = try_rows(in_features, out_features, dtype, has_bias=has_bias, is_reordered=is_reordered)
    assert results is not RowResults.DEPENDENT
    product = PackedProduct(
        weight,
        bias if has_bias else None,
        pairs_single_rows=results is RowResults.INDEPENDENT_FROM_TWO,
        most_rows=results.most_rows,
        is_reordered=is_reordered,
    )
    inputs = torch.randn(256, in_features).to(dtype)

    alone = torch.cat([product(inputs[row : row + 1]) for row in range(64)])

    for num_rows in (2, 4, 64, 256):
        among = product(inputs[:num_rows])[:64]
        assert torch.equal(among, alone[: len(among)]), num_rows


@pytest.mark.parametrize(
    ("is_other", "expected"),
    [
        (lambda num_rows: False, RowResults.INDEPENDENT),
        (lambda num_rows: num_rows == 1, RowResults.INDEPENDENT_FROM_TWO),
        (lambda num_rows: num_rows > 32, RowResults.INDEPENDENT_IN_BLOCKS),
        (lambda num_rows: num_rows >= 32, RowResults.DEPENDENT),
        (lambda num_rows: num_rows in (1, 64), RowResults.DEPENDENT),
    ],
    ids=["never", "one row", "many rows", "a block of rows", "one row and many"],
)
def test_a_sum_in_another_order_is_seen(
    is_other: Callable[[int], bool], expected: RowResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_by_one(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        columns = range(weight.shape[1])
        total = torch.zeros(len(inputs), len(weight))
        for column in reversed(columns) if is_other(len(inputs)) else columns:
            total += inputs[:, column, None] * weight[:, column]
        return total

    monkeypatch.setattr(onednn, "reorder_weight", lambda weight: weight)
    monkeypatch.setattr(onednn, "multiply", one_by_one)

    assert try_rows(96, 32, torch.float32, has_bias=False) is expected
