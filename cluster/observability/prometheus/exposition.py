"""Writes metrics as Prometheus reads them: in its text format, or in OpenMetrics' format with the traces of examples.

prometheus_client writes both as well, but its text format checks and escapes each name of each series. Here names are
those of declarations, which are valid, so a picker that reads metrics twenty times a second costs a fraction of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from cluster.observability.prometheus.declaration import DeclaredMetric, Kind, Labels

OPENMETRICS_TYPE: Final = openmetrics.CONTENT_TYPE_LATEST
_GIVEN: Final = "%s"
_OPENMETRICS: Final = "application/openmetrics-text"


def to_text(metrics: Iterable[Metric]) -> bytes:
    """Return metrics in Prometheus' text format. metrics: each name once, all of them with valid names"""
    lines: list[str] = []
    for metric in metrics:
        lines.append(_head(metric))
        if isinstance(metric, DeclaredMetric):
            lines += _lines_of(metric)
        else:
            lines += [f"{_series(sample)} {_value(sample.value)}\n" for sample in metric.samples]
    return "".join(lines).encode()


class TextTemplate:
    """Text of metrics whose series stay the same, so that only their values are written anew."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        """Keep all but the values. metrics: as for to_text()"""
        self._heads: list[str] = []
        """The text before each value."""
        head = ""
        for metric in metrics:
            head += _head(metric)
            for sample in metric.samples:
                self._heads.append(head + _series(sample))
                head = "\n"
        self._tail = head

    def text(self, values: Iterable[float]) -> bytes:
        """Return the text with these values, in the order of the metrics and of their samples."""
        lines = [f"{head} {_value(value)}" for head, value in zip(self._heads, values, strict=True)]
        return ("".join(lines) + self._tail).encode()


def to_openmetrics(metrics: Iterable[Metric]) -> bytes:
    """Return metrics in OpenMetrics' format, with their exemplars."""
    # With its other ways to escape, the library writes the colons of vLLM's names as underscores.
    text: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]  # it has no annotations
        _Collected(metrics), openmetrics.ALLOWUTF8
    )
    return text


def accepts_openmetrics(accept: str) -> bool:
    """Whether a reader asks for OpenMetrics' format. accept: the value of its header"""
    for one in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in one.split(";"))
        if kind == _OPENMETRICS and not any(_is_refusal(parameter) for parameter in parameters):
            return True
    return False


def _is_refusal(parameter: str) -> bool:
    name, _, weight = parameter.partition("=")
    return name == "q" and not weight.strip("0.")


def _head(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    return f"# HELP {name} {_without_breaks(metric.documentation)}\n# TYPE {name} {metric.type}\n"


def _lines_of(metric: DeclaredMetric) -> Iterator[str]:
    """Yield the line of each sample: text is made of a series' labels once, and none of the declaration's again."""
    declaration = metric.declaration
    if declaration.kind is not Kind.HISTOGRAM:
        form = _form(declaration.name, declaration.labels)
        for values, numbers, _ in metric.series:
            yield f"{form % _sorted(declaration.labels, values)} {_value(numbers[0])}\n"
        return
    bucket, count, total = declaration.names
    of_bucket = _form(bucket, (*declaration.labels, "le"), {"le": "BOUND"})
    forms = [of_bucket.replace("BOUND", bound) for bound in declaration.bounds]
    forms += [_form(name, declaration.labels) for name in (count, total)]
    for values, numbers, _ in metric.series:
        labels = _sorted(declaration.labels, values)
        for form, number in zip(forms, numbers, strict=True):
            yield f"{form % labels} {_value(number)}\n"


def _form(name: str, labels: Sequence[str], known: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a sample's name and its labels, sorted, with %s in place of those values that are not known."""
    named = ",".join([f'{label}="{known.get(label, _GIVEN)}"' for label in sorted(labels)])
    return f"{name}{{{named}}}" if labels else name


def _sorted(labels: Sequence[str], values: Labels) -> tuple[str, ...]:
    """Return the values in the order of their labels' names, with what Prometheus' format needs before quotes."""
    return tuple([_escaped(text) for _, text in sorted(zip(labels, values, strict=True))])


def _series(sample: Sample) -> str:
    if not sample.labels:
        return sample.name
    labels = ",".join([f'{name}="{_escaped(text)}"' for name, text in sorted(sample.labels.items())])
    return f"{sample.name}{{{labels}}}"


def _value(value: float) -> str:
    if type(value) is int and 0 <= value < 1_000_000:
        return f"{value}.0"
    text = repr(float(value))
    if text.endswith(".0") and len(text) <= len("123456.0"):
        return text
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]  # it has no annotations


def _escaped(text: str) -> str:
    return _without_breaks(text).replace('"', r"\"")


def _without_breaks(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


class _Collected(Collector):
    """Metrics that are made already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
