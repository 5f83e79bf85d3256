"""The durations of steps, summed from tables of measured operators.

    a step = layers * (dense operators + attention [+ experts]) + what runs once

A directory has `attention.csv`, `dense.csv`, `per_sequence.csv` and, for a mixture of experts, `moe.csv`, as
LLMServingSim profiles them. Of the dense operators the token embedding and the last norm run once a step, and a layer
has two norms; the operators of per_sequence.csv run once, for as many sequences as the step has requests.

The tables have the kernels of one rank and nothing else. What ranks exchange is estimated (rank_exchange.py) if the
bandwidth between them is given. A factor that is fitted to a run of the same engine (OpTables.slower_by) makes up for
the launches of kernels and for errors of that estimate. Two further errors follow from StepShape, which has only the
sum of the decodes' contexts: attention over unequal contexts takes a few percent longer than over equal ones
(`skew.csv` measures this, and is not read), and several chunks of prompts are taken for chunks of one length.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from actors.costs.step_shape import Floats, StepShape
from cluster.simulation.timing.attention_grid import ATTENTION_KEYS, FAR, AttentionGrid
from cluster.simulation.timing.expert_table import EXPERT_KEYS, RANK_COLUMN, ExpertTable
from cluster.simulation.timing.model_shape import ModelShape
from cluster.simulation.timing.op_files import OpPoints, bad_file, read_op_points
from cluster.simulation.timing.rank_exchange import RankExchange, RankLayout, estimate_hidden_size

_ONCE: Final = frozenset({"embedding", "final_layernorm"})
_LAYER_OPERATORS: Final = {
    "layernorm": 2,
    "qkv_proj": 1,
    "qk_norm": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
"""How often a layer runs each dense operator."""
_NEEDED: Final = ("qkv_proj", "o_proj")
_US: Final = 1e-6
_END_PART: Final = 0.25
"""Beyond its last point a curve goes on as it does on average over this part of its keys."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpTables:
    """Predicts steps (StepTimes). read_op_tables() makes one.

    num_layers: the model's
    dense:      seconds of the dense operators of all layers, and those that run once, by tokens
    sequences:  seconds of what runs once for each sequence, by sequences
    attention:  one layer's
    experts:    one layer's; None: the MLP is in `dense`
    layout:     the ranks
    exchange:   what ranks exchange; None: there is one rank, or it is left out
    slowness:   a factor on every step
    """

    num_layers: int
    dense: _Curve
    sequences: _Curve
    attention: AttentionGrid
    experts: ExpertTable | None
    layout: RankLayout
    exchange: RankExchange | None = None
    slowness: float = 1.0

    def slower_by(self, factor: float) -> OpTables:
        """Return tables whose steps take this many times as long."""
        return replace(self, slowness=self.slowness * factor)

    @property
    def num_extrapolated(self) -> int:
        """How many predictions so far were, in part, not between measured points."""
        return self.attention.num_extrapolated + self.dense.num_extrapolated + self.sequences.num_extrapolated

    def step_s(self, shape: StepShape) -> float:
        """Return the seconds of a step. Other engines of the layout are taken to have steps of the same shape."""
        if not shape.num_prefills:
            return float(self.decode_run_s(shape, 1)[0])
        return self.slowness * (self._own_s(shape) + self._common_s([shape] * self._num_engines))

    def decode_run_s(self, shape: StepShape, num_steps: int) -> Floats:
        """Return the seconds of each of num_steps steps that only decode, [num_steps]."""
        num_decodes = max(shape.num_decodes, 1)
        contexts = shape.num_decode_context + shape.num_decodes * np.arange(num_steps, dtype=np.float64)
        attention_us = self.attention.decodes_us(num_decodes, contexts / num_decodes)
        fixed_s = self._fixed_s(shape) + self._common_s([shape] * self._num_engines)
        times: Floats = self.slowness * (fixed_s + self.num_layers * _US * attention_us)
        return times

    def lockstep_s(self, shapes: Sequence[StepShape]) -> float:
        """Return the seconds of a step that engines with common experts take together, each with a shape of its own.

        Every layer ends for all of them at once, so the slowest one counts.
        """
        return self.slowness * (max(self._own_s(shape) for shape in shapes) + self._common_s(shapes))

    def _own_s(self, shape: StepShape) -> float:
        """Return the seconds of everything but experts."""
        return self._fixed_s(shape) + self.num_layers * _US * self._attention_us(shape)

    def _fixed_s(self, shape: StepShape) -> float:
        return self.dense(shape.num_tokens) + self.sequences(shape.num_decodes + shape.num_prefills)

    @property
    def _num_engines(self) -> int:
        """How many engines take part in a step."""
        return 1 if self.experts is None else self.layout.data_parallel_size

    def _common_s(self, shapes: Sequence[StepShape]) -> float:
        """Return the seconds of experts and exchanges in a step of these engines."""
        num_tokens = sum(shape.num_tokens for shape in shapes)
        seconds = 0.0 if self.experts is None else self.num_layers * _US * self.experts.layer_us(num_tokens)
        if self.exchange is not None:
            seconds += self.exchange.seconds(max(shape.num_tokens for shape in shapes), num_tokens)
        return seconds

    def _attention_us(self, shape: StepShape) -> float:
        num_decodes = shape.num_decodes
        context = shape.num_decode_context / num_decodes if num_decodes else 0.0
        chunk = shape.num_tokens - num_decodes
        if chunk <= 0 or not shape.num_prefills:
            return self.attention.step_us(0.0, 0.0, num_decodes, context)
        triangle = chunk * chunk / 2
        if shape.num_prefill_pairs >= triangle:
            before = shape.num_prefill_pairs / chunk - chunk / 2
            return self.attention.step_us(chunk, before, num_decodes, context)
        # Several prompts: less work than one prompt of as many tokens, and more than the longest of them alone.
        part = shape.num_prefill_pairs / triangle
        whole_us = self.attention.step_us(chunk, 0.0, num_decodes, context)
        decodes_us = self.attention.step_us(0.0, 0.0, num_decodes, context)
        one_us = self.attention.step_us(chunk * part, 0.0, num_decodes, context)
        return max(one_us, decodes_us + (whole_us - decodes_us) * part)


class _Curve:
    """Seconds by one key, linear between measured points."""

    def __init__(self, keys: Floats, seconds: Floats) -> None:
        first = int(np.searchsorted(keys, keys[-1] * (1 - _END_PART)))
        first = min(first, len(keys) - 2)
        slope = max(0.0, float(seconds[-1] - seconds[first])) / float(keys[-1] - keys[first])
        self._last = float(keys[-1])
        self._keys = np.append(keys, FAR)
        self._seconds = np.append(seconds, seconds[-1] + slope * (FAR - keys[-1]))
        self.num_extrapolated = 0

    def __call__(self, key: float) -> float:
        """Return the seconds at a key; before the first point, those of the first point."""
        if key > self._last:
            self.num_extrapolated += 1
        return float(np.interp(key, self._keys, self._seconds))


def read_op_tables(
    directory: Path, shape: ModelShape, layout: RankLayout | None = None, link_bytes_per_s: float | None = None
) -> OpTables:
    """Read the tables of a directory. Raises InvalidConfig, which names the file, the line and the column.

    layout: the ranks of the engines to simulate; the directory has the operators of one rank of that layout. Experts
        are measured without tensor parallelism only: those of a directory `tp2` are also looked for in `tp1` beside it
    link_bytes_per_s: of a rank's link to the other ranks, in one direction; None: what they exchange is left out
    """
    layout = layout or RankLayout()
    attention_file, dense_file = directory / "attention.csv", directory / "dense.csv"
    attention = read_op_points(attention_file, ATTENTION_KEYS, {"decode_q_len": 1.0}, has_layers=False)[""]
    is_plain = attention.keys[:, 4] == 1  # Other points are of decodes with draft tokens.
    attention = OpPoints(attention.keys[is_plain, :4], attention.times_us[is_plain])
    dense_layers = read_op_points(dense_file, ["tokens"], has_layers=True)
    sequence_layers = read_op_points(directory / "per_sequence.csv", ["sequences"], has_layers=True)
    missing = [name for name in _NEEDED if name not in dense_layers]
    if missing:
        raise bad_file(dense_file, f"there is no operator {', '.join(missing)}")
    unknown = sorted(dense_layers.keys() - _LAYER_OPERATORS.keys() - _ONCE)
    if unknown:
        _log.warning("unknown operators are taken to run once a layer: %s", ", ".join(unknown))
    num_runs = {name: shape.num_layers * _LAYER_OPERATORS.get(name, 1) for name in dense_layers}
    num_runs |= dict.fromkeys(_ONCE, 1)
    experts = _read_experts(directory, layout)
    if experts is None and "down_proj" not in dense_layers:
        raise bad_file(dense_file, f"there is no operator down_proj, and {directory} has no moe.csv either")
    exchange = None
    if link_bytes_per_s is not None and max(layout.data_parallel_size, layout.tensor_parallel_size) > 1:
        projections = dense_layers["qkv_proj"], dense_layers["o_proj"]
        hidden_size = estimate_hidden_size(*projections, attention, shape, layout.tensor_parallel_size)
        if hidden_size is None:
            _log.warning("what ranks exchange is left out: the tables do not say how large the hidden states are")
        else:
            exchange = RankExchange(layout, shape.num_layers, hidden_size, experts is not None, link_bytes_per_s)
    return OpTables(
        num_layers=shape.num_layers,
        dense=_sum_of(dense_file, dense_layers, num_runs),
        sequences=_sum_of(directory / "per_sequence.csv", sequence_layers, dict.fromkeys(sequence_layers, 1)),
        attention=AttentionGrid(attention_file, attention),
        experts=experts,
        layout=layout,
        exchange=exchange,
    )


def _read_experts(directory: Path, layout: RankLayout) -> ExpertTable | None:
    for path in (directory / "moe.csv", directory.parent / "tp1" / "moe.csv"):
        if path.exists():
            points = read_op_points(path, EXPERT_KEYS, {RANK_COLUMN: 1.0}, has_layers=False)[""]
            num_ranks = layout.data_parallel_size * layout.tensor_parallel_size
            return ExpertTable(path, points, num_ranks, is_expert_parallel=layout.is_expert_parallel)
    return None


def _sum_of(path: Path, layers: dict[str, OpPoints], num_runs: dict[str, int]) -> _Curve:
    """Return the seconds of all operators of a file, each as often as it runs in a step."""
    keys = np.unique(np.concatenate([points.keys[:, 0] for points in layers.values()]))
    if len(keys) < 2:
        raise bad_file(path, "it needs points with at least two different keys")
    seconds = np.zeros(len(keys))
    for name, points in layers.items():
        seconds += num_runs[name] * _US * np.interp(keys, points.keys[:, 0], points.times_us)
    return _Curve(keys, seconds)
