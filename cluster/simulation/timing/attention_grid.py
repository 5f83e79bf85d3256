"""The time of attention in one layer, between the points where it was measured.

A point has four keys: the tokens of a prompt's chunk, the tokens before the chunk, the number of decoding requests, and
the tokens before each of these. Between points the time is linear in each key, as the work of attention is. The points
need not fill the grid of their keys (a GPU's memory has no room for many long contexts, and some profiles consist of a
coarse and a fine grid): what lies between measured points is interpolated, and what lies outside is extrapolated.
Predictions that rest on extrapolated points are counted (num_extrapolated).

A chunk, or a context of decodes, that is shorter than the shortest measured one takes as long as that one.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Final

import numpy as np

from actors.costs.step_shape import Floats
from cluster.simulation.timing.op_files import OpPoints, bad_file

ATTENTION_KEYS: Final = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
FAR: Final = float(1 << 24)
"""A key beyond all that engines compute. The last interval of each axis ends there."""
_CHUNK, _BEFORE, _DECODES, _CONTEXT = range(4)
_MAX_GRID: Final = 1 << 22


class AttentionGrid:
    """Predicts attention in one layer, in microseconds."""

    def __init__(self, path: Path, points: OpPoints) -> None:
        """Interpolate what was measured. Raises InvalidConfig if the points are too few to predict every step.

        path: the file of the points, which errors name
        """
        axes = [np.unique(points.keys[:, axis]) for axis in range(4)]
        for name, axis in zip(ATTENTION_KEYS, axes, strict=True):
            if axis[0] != 0 or len(axis) < 3:
                raise bad_file(path, f"column {name} needs 0 and at least two other values")
        if np.prod([len(axis) for axis in axes]) > _MAX_GRID:
            raise bad_file(path, f"the keys' values have more than {_MAX_GRID} combinations")
        grid = np.full([len(axis) for axis in axes], np.nan)
        indices = [np.searchsorted(axis, keys) for axis, keys in zip(axes, points.keys.T, strict=True)]
        grid[tuple(indices)] = points.times_us
        _say_what_is_absent(grid)
        for number in (_CONTEXT, _BEFORE, _CHUNK, _DECODES):
            _interpolate(grid, number, axes[number])
        is_measured = ~np.isnan(grid)
        _extrapolate_all(grid, axes)
        if np.isnan(grid).any():
            raise bad_file(path, "it has too few points to predict prompts, decodes, and both in one step")
        for number in range(4):
            grid = _with_far_end(grid, number, axes[number])
            is_measured = np.concatenate([is_measured, np.zeros_like(is_measured.take([0], number))], number)
        self._axes = [np.append(axis, FAR) for axis in axes]
        self._axis_lists: list[list[float]] = [axis.tolist() for axis in self._axes]
        self._grid, self._is_extrapolated = grid, ~is_measured
        self._decode_rows: dict[float, tuple[Floats, float]] = {}
        self.num_extrapolated = 0

    def step_us(self, chunk: float, before: float, num_decodes: float, context: float) -> float:
        """Return the time of a step. before: tokens before the chunk; context: tokens before each decode."""
        slices, parts = [], []
        chunk = max(chunk, self._axis_lists[_CHUNK][1]) if chunk else 0.0
        context = max(context, self._axis_lists[_CONTEXT][1]) if num_decodes else 0.0
        for axis, key in zip(self._axis_lists, (chunk, before, num_decodes, context), strict=True):
            low = min(bisect_right(axis, key) - 1, len(axis) - 2)
            part = (min(key, FAR) - axis[low]) / (axis[low + 1] - axis[low])
            slices.append(slice(low, low + 2 if part else low + 1))
            parts.append(part)
        corner = tuple(slices)
        if self._is_extrapolated[corner].any():
            self.num_extrapolated += 1
        values = self._grid[corner]
        for part in parts:
            values = values[0] + (values[1] - values[0]) * part if part else values[0]
        return float(values)

    def decodes_us(self, num_decodes: float, contexts: Floats) -> Floats:
        """Return the times of steps that only decode, [n]. contexts: tokens before each decode, [n]"""
        if num_decodes not in self._decode_rows:
            self._decode_rows[num_decodes] = self._decode_row(num_decodes)
        row, longest = self._decode_rows[num_decodes]
        self.num_extrapolated += int((contexts > longest).sum())
        times: Floats = np.interp(contexts, self._axes[_CONTEXT], row)
        return times

    def _decode_row(self, num_decodes: float) -> tuple[Floats, float]:
        """Return the times of so many decodes by their context, and the longest context that was measured."""
        axis = self._axis_lists[_DECODES]
        low = min(bisect_right(axis, num_decodes) - 1, len(axis) - 2)
        part = (num_decodes - axis[low]) / (axis[low + 1] - axis[low])
        lower, upper = self._grid[0, 0, low], self._grid[0, 0, low + 1]
        is_extrapolated = self._is_extrapolated[0, 0, low : low + (2 if part else 1)].any(axis=0)
        first = int(is_extrapolated.argmax())
        return lower + (upper - lower) * part, self._axis_lists[_CONTEXT][first - 1] if first else -1.0


def _say_what_is_absent(grid: Floats) -> None:
    """Fill the points whose keys say nothing: the context of no decode, and what comes before no chunk."""
    grid[0, 1:] = grid[0, :1]
    grid[:, :, 0, 1:] = grid[:, :, 0, :1]
    grid[0, :, 0, :] = 0.0
    grid[:, :, 1:, 0] = np.where(np.isnan(grid[:, :, 1:, 0]), grid[:, :, 1:, 1], grid[:, :, 1:, 0])


def _interpolate(grid: Floats, axis: int, keys: Floats) -> None:
    """Fill points between two known ones on an axis, in place."""
    lines = np.moveaxis(grid, axis, 0)
    shape = lines.shape[1:]
    below, below_key = np.full(lines.shape, np.nan), np.full(lines.shape, np.nan)
    last, last_key = np.full(shape, np.nan), np.full(shape, np.nan)
    for index, key in enumerate(keys):
        is_known = ~np.isnan(lines[index])
        last, last_key = np.where(is_known, lines[index], last), np.where(is_known, key, last_key)
        below[index], below_key[index] = last, last_key
    above, above_key = np.full(shape, np.nan), np.full(shape, np.nan)
    for index in reversed(range(len(keys))):
        is_known = ~np.isnan(lines[index])
        above, above_key = np.where(is_known, lines[index], above), np.where(is_known, keys[index], above_key)
        part = (keys[index] - below_key[index]) / np.where(is_known, 1.0, above_key - below_key[index])
        lines[index] = np.where(is_known, lines[index], below[index] + (above - below[index]) * part)


def _extrapolate_all(grid: Floats, axes: list[Floats]) -> None:
    """Fill points outside of the known ones, in place, as far as there are enough known ones."""
    for _ in range(len(axes)):
        _extrapolate_contexts(grid, axes)
        for axis in (_DECODES, _BEFORE, _CHUNK):
            lines, keys = np.moveaxis(grid, axis, 0), axes[axis]
            for index in range(2, len(keys)):
                _fill(lines[index], lines[index - 1] + _growth(lines, keys, index))


def _extrapolate_contexts(grid: Floats, axes: list[Floats]) -> None:
    """Continue each row of contexts as the row of fewer decodes grows: twice as many decodes grow twice as fast."""
    keys, decodes = axes[_CONTEXT], axes[_DECODES]
    for row in range(1, len(decodes)):
        lines = np.moveaxis(grid[:, :, row], -1, 0)
        for index in range(2, len(keys)):
            growth = _growth(lines, keys, index)
            if row > 1:
                fewer = grid[:, :, row - 1, index] - grid[:, :, row - 1, index - 1]
                fewer = np.maximum(fewer, 0.0) * (decodes[row] / decodes[row - 1])
                growth = np.where(np.isnan(fewer), growth, fewer)
            _fill(lines[index], lines[index - 1] + growth)


def _growth(lines: Floats, keys: Floats, index: int) -> Floats:
    """Return what a point adds to the one before it if the line goes on as it does before; never less than 0."""
    slope = (lines[index - 1] - lines[index - 2]) / (keys[index - 1] - keys[index - 2])
    growth: Floats = np.maximum(slope, 0.0) * (keys[index] - keys[index - 1])
    return growth


def _fill(target: Floats, values: Floats) -> None:
    np.copyto(target, values, where=np.isnan(target))


def _with_far_end(grid: Floats, axis: int, keys: Floats) -> Floats:
    """Append the point FAR to an axis."""
    lines = np.moveaxis(grid, axis, 0)
    end = lines[-1] + np.maximum(lines[-1] - lines[-2], 0.0) / (keys[-1] - keys[-2]) * (FAR - keys[-1])
    return np.concatenate([grid, np.expand_dims(end, axis)], axis)
