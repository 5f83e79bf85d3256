"""Packs the linear layers of a loaded model: their weights go into the order that oneDNN computes with, once.

It comes last at loading: after the weights were read or sliced, and after the checks, which read plain weights. One
layer is packed after the other, and its plain weight is freed before the next, so a model never is in memory twice.
Before a plain weight is freed its product is compared with the packed one, and the whole model is compared at the end.

An output layer that is tied to the embeddings keeps its plain weight, which the embeddings are looked up in, and
computes with it by the same operator: torch's own product would give a row other bits in batches of other sizes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from actors.config import ModelConfig
from actors.model.attention.probe import GeometryProbe
from actors.model.checks.self_check import error_limit, relative_error
from actors.model.dequantizing import is_quantized
from actors.model.errors import SelfCheckFailed, UnsupportedModel
from actors.model.forward import FlatForward
from actors.model.linears import onednn
from actors.model.linears.freed_memory import MappedPages, trim_heap
from actors.model.linears.onednn import RowResults
from actors.model.linears.packed_linear import FusedProduct, PackedLinear, PackedProduct, Product, TiedLinear
from actors.model.linears.watched_layers import FoundLayer, find_layers, find_tied_layers, replace_module
from actors.model.tensor_parallel.group import TensorParallelGroup
from kv_transfer.device_kind import is_accelerator

logger = logging.getLogger(__name__)

_NUM_TRIAL_TOKENS = 4
_NUM_COMPARED_ROWS = 4


@dataclass(slots=True)
class PackedLayers:
    """Counts what was done with a model's linear layers.

    num_packed:   layers that compute with a reordered weight, those of fused products included
    num_products: products that these layers take
    num_plain:    layers that were found and left as they are, since a row's result would depend on the batch, or since
        the packed product gave another result
    num_tied:     output layers that compute by oneDNN with the plain weight of the embeddings
    shapes:       (in_features, out_features) of products, by what a row's result depends on
    """

    num_packed: int = 0
    num_products: int = 0
    num_plain: int = 0
    num_tied: int = 0
    shapes: dict[RowResults, set[tuple[int, int]]] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the counts in words."""
        if not self.num_packed:
            return "plain: none of the layers can be packed"
        plain = f", and {self.num_plain} left plain (the log has the reasons)" if self.num_plain else ""
        return f"packed for oneDNN: {self.num_packed} layers as {self.num_products} products{plain}"


def prepare_linears(
    model_config: ModelConfig, forward: FlatForward, architecture: str, group: TensorParallelGroup | None
) -> str:
    """Pack the linear layers if the settings and this machine let it; the ranks of a group agree on it.

    Returns what was done and why, for the log and `raypd status`.
    Raises UnsupportedModel if the settings ask for what cannot be done, and SelfCheckFailed.
    """
    if model_config.weight_packing == "none":
        return "plain: model.weight_packing is none"
    is_on_cpu = not is_accelerator(forward.model.device)
    reason = onednn.reason_against(forward.model.dtype) if is_on_cpu else "the model is not on a CPU"
    if group is not None and not group.smallest(int(reason is None)):
        reason = reason or "another rank cannot"
    if reason is None:
        return pack_linears(forward, architecture).describe()
    if model_config.weight_packing == "onednn":
        raise UnsupportedModel(
            architecture,
            f"its linear layers cannot be packed (weight_packing: onednn; with auto they are left plain): {reason}",
        )
    if is_on_cpu:
        logger.info("the linear layers are not packed for oneDNN", extra={"reason": reason})
    return f"plain: {reason}"


def pack_linears(forward: FlatForward, architecture: str) -> PackedLayers:
    """Pack the linear layers of a model on the CPU whose data type passes onednn.reason_against().

    In a tensor-parallel engine all ranks call this together: it runs the model.

    Raises SelfCheckFailed if the packed model computes something else.
    """
    started, report = time.monotonic(), PackedLayers()
    outputs: list[Tensor] = []
    groups = find_layers(forward.model, lambda: outputs.append(_run(forward, architecture)))
    rows, pages = _RowTrials(report), MappedPages()
    while groups:
        # Taken out of the list, so that nothing here keeps a plain weight that has been packed.
        _pack_group(forward.model, groups.pop(0), rows, report, pages)
        # Freed weights are not reused by themselves: in bf16 the process grew by as much as the whole model has.
        trim_heap()
    for found in find_tied_layers(forward.model):
        _take_operator(forward.model, found, rows, report)
    with torch.inference_mode():
        is_rounded = is_quantized(forward.model)
        error = relative_error(_run(forward, architecture), outputs[0], is_rounded=is_rounded)
        limit = error_limit(forward.model.dtype, is_rounded=is_rounded)
    if not error <= limit:  # a NaN fails, too
        raise SelfCheckFailed(
            type(forward.model).__name__,
            f"its outputs differ by {error:.2g} (at most {limit:.2g}) once its linear layers are packed for oneDNN; "
            "weight_packing: none serves it without",
        )
    logger.info(
        "packed the linear layers for oneDNN",
        extra={
            "num_layers": report.num_packed,
            "num_products": report.num_products,
            "num_left_plain": report.num_plain,
            "num_tied": report.num_tied,
            "relative_error": error,
            "elapsed_s": round(time.monotonic() - started, 3),
        },
    )
    return report


def _run(forward: FlatForward, architecture: str) -> Tensor:
    tokens = torch.arange(_NUM_TRIAL_TOKENS, device=forward.model.device)
    return forward(tokens, tokens, GeometryProbe(architecture), tokens)


class _RowTrials:
    """Finds out what a row's result depends on, once for each shape."""

    def __init__(self, report: PackedLayers) -> None:
        self._tried: dict[tuple[int, int, torch.dtype, bool, bool], RowResults] = {}
        self._report = report

    def of(self, weight: Tensor, bias: Tensor | None, *, is_reordered: bool = True) -> RowResults:
        out_features, in_features = weight.shape
        key = (in_features, out_features, weight.dtype, bias is not None, is_reordered)
        if key not in self._tried:
            self._tried[key] = onednn.try_rows(
                in_features, out_features, weight.dtype, has_bias=bias is not None, is_reordered=is_reordered
            )
            self._report.shapes.setdefault(self._tried[key], set()).add((in_features, out_features))
            if self._tried[key] is RowResults.DEPENDENT:
                logger.warning(
                    "linear layers of this shape are not packed: a row's result would depend on the batch",
                    extra={"in_features": in_features, "out_features": out_features},
                )
        return self._tried[key]


@torch.inference_mode()
def _pack_group(
    model: nn.Module, group: list[FoundLayer], trials: _RowTrials, report: PackedLayers, pages: MappedPages
) -> None:
    """Pack layers that take the same inputs as one product; their plain weights are freed."""
    layers = [found.layer for found in group]
    sizes = [len(layer.weight) for layer in layers]
    weight, bias = _joined([layer.weight for layer in layers]), _joined_bias(group)
    results = trials.of(weight, bias)
    if results is RowResults.DEPENDENT:
        report.num_plain += len(group)
        return
    inputs = _drawn_inputs(weight)
    expected = functional.linear(inputs, weight, bias)
    product = PackedProduct(
        weight,
        bias,
        pairs_single_rows=results is RowResults.INDEPENDENT_FROM_TWO,
        most_rows=results.most_rows,
    )
    if not onednn.is_close(product(inputs), expected):
        logger.warning("a linear layer is not packed: its product was wrong", extra={"layer": group[0].names[0]})
        report.num_plain += len(group)
        return
    report.num_packed += len(group)
    report.num_products += 1
    for layer in layers:
        pages.release(layer.weight.detach())
    if len(group) == 1:
        _replace(model, group[0], product)
        return
    fused = FusedProduct(product, sizes)
    for index, found in enumerate(group):
        _replace(model, found, partial(fused.part, index=index))


@torch.inference_mode()
def _take_operator(model: nn.Module, found: FoundLayer, trials: _RowTrials, report: PackedLayers) -> None:
    """Let a tied layer compute with oneDNN's operator and its plain weight, if a row's bits do not depend on others."""
    layer = found.layer
    assert isinstance(layer, nn.Linear)
    results = trials.of(layer.weight, layer.bias, is_reordered=False)
    product = PackedProduct(
        layer.weight,
        layer.bias,
        pairs_single_rows=results is RowResults.INDEPENDENT_FROM_TWO,
        most_rows=results.most_rows,
        is_reordered=False,
    )
    inputs = _drawn_inputs(layer.weight)
    among = product(inputs)
    is_right = onednn.is_close(among, functional.linear(inputs, layer.weight, layer.bias))
    # The trial had fewer outputs than the layer may have.
    if results is RowResults.DEPENDENT or not is_right or not torch.equal(product(inputs[:1]), among[:1]):
        logger.warning("a tied output layer computes with torch's product", extra={"layer": found.names[0]})
        report.num_plain += 1
        return
    report.num_tied += 1
    replace_module(model, found.names, TiedLinear(layer, product))


def _drawn_inputs(weight: Tensor) -> Tensor:
    inputs = torch.randn(_NUM_COMPARED_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    return inputs.to(weight.dtype)


def _joined(weights: list[nn.Parameter] | list[Tensor]) -> Tensor:
    return weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])


def _joined_bias(group: list[FoundLayer]) -> Tensor | None:
    biases = [bias for found in group if (bias := found.product_bias) is not None]
    return _joined(biases) if biases else None


def _replace(model: nn.Module, found: FoundLayer, product: Product) -> None:
    """Let a layer compute with the product, and free its plain weight, whoever else holds the layer."""
    layer = found.layer
    layer.register_parameter("weight", None)
    if isinstance(layer, nn.Linear):
        replace_module(model, found.names, PackedLinear(layer.in_features, layer.out_features, product))
    else:
        layer.product = product
