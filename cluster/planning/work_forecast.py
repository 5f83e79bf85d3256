"""Forecasts a series of measurements by the method that has been off least lately.

The methods are the last value, an exponentially weighted mean, and Holt's linear trend with damping (Gardner and
McKenzie, 1985). Each forecasts the whole series from its begin, so that its errors at the wanted distance are known;
the errors of the chosen method are the forecast's uncertainty, without an assumption about their distribution. A series
that nobody can forecast thus gets a wide range, and is planned for by its high end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec

_EWMA_RATE: Final = 0.3
_HOLT_LEVEL_RATE: Final = 0.5
_HOLT_TREND_RATE: Final = 0.2
_HOLT_DAMPING: Final = 0.9
_NUM_JUDGED: Final = 60
"""The newest forecasts by which methods are chosen and ranges are made."""
_MIN_ERRORS: Final = 3
_UNKNOWN_ERROR: Final = 0.5
"""The relative error of a method while there are too few forecasts to judge it by."""

Method: TypeAlias = Callable[[Sequence[float], int], list[float]]
"""Returns for each value of a series the forecast, made once that value is known, for so many steps later."""


class Forecast(msgspec.Struct, frozen=True):
    """A forecast, in the unit of the series.

    low, high: the quantiles that were asked for, from the errors of earlier forecasts
    method:    last_value, ewma or holt
    error:     the sum of the method's absolute errors lately over the sum of the values; None with too few of them
    """

    value: float = 0.0
    low: float = 0.0
    high: float = 0.0
    method: str = "last_value"
    error: float | None = None


def forecast(series: Sequence[float], num_steps: int, quantile: float) -> Forecast:
    """Forecast a series of values that are not negative. Returns 0 for an empty one.

    num_steps: so many values after the last one are meant: the forecast is for the mean of them
    quantile:  above 0.5; `high` is this quantile, and `low` is as far on the other side
    """
    if not series:
        return Forecast()
    errors = {name: _errors(method(series, num_steps), series, num_steps) for name, method in METHODS.items()}
    name = min(METHODS, key=lambda one: sum(map(abs, errors[one])))
    value = max(METHODS[name](series, num_steps)[-1], 0.0)
    judged = series[-len(errors[name]) :] if errors[name] else ()
    if len(judged) < _MIN_ERRORS:
        return Forecast(value, (1 - _UNKNOWN_ERROR) * value, (1 + _UNKNOWN_ERROR) * value, name)
    scale = sum(judged)
    error = sum(map(abs, errors[name])) / scale if scale > 0 else None
    low, high = (max(value + _quantile(errors[name], one), 0.0) for one in (1 - quantile, quantile))
    return Forecast(value, min(low, value), max(high, value), name, error)


def last_values(series: Sequence[float], num_steps: int) -> list[float]:
    """Forecast that everything stays as it is."""
    return list(series)


def ewma(series: Sequence[float], num_steps: int) -> list[float]:
    """Forecast the exponentially weighted mean."""
    made, level = [], series[0]
    for value in series:
        level += _EWMA_RATE * (value - level)
        made.append(level)
    return made


def damped_holt(series: Sequence[float], num_steps: int) -> list[float]:
    """Forecast a level and a trend that fades, as the mean of the next num_steps values."""
    # The sum over h = 1..num_steps of damping + ... + damping**h, divided by num_steps.
    reach = sum(sum(_HOLT_DAMPING**i for i in range(1, h + 1)) for h in range(1, num_steps + 1)) / num_steps
    made, level, trend = [], series[0], 0.0
    for value in series:
        before = level
        level = _HOLT_LEVEL_RATE * value + (1 - _HOLT_LEVEL_RATE) * (level + _HOLT_DAMPING * trend)
        trend = _HOLT_TREND_RATE * (level - before) + (1 - _HOLT_TREND_RATE) * _HOLT_DAMPING * trend
        made.append(max(level + reach * trend, 0.0))
    return made


METHODS: Final[dict[str, Method]] = {"ewma": ewma, "holt": damped_holt, "last_value": last_values}


def _errors(made: Sequence[float], series: Sequence[float], num_steps: int) -> list[float]:
    """Return measured - forecast of the newest forecasts whose time has come."""
    first = max(len(series) - num_steps - _NUM_JUDGED, 0)
    return [
        sum(series[at + 1 : at + 1 + num_steps]) / num_steps - made[at] for at in range(first, len(series) - num_steps)
    ]


def _quantile(errors: Sequence[float], part: float) -> float:
    """Return a quantile of the errors, between the two nearest ones."""
    ordered = sorted(errors)
    at = part * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
