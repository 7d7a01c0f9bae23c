"""Exporter: the figures of model.report() as Prometheus metrics. Needs the package prometheus_client.

An Exporter is a collector: it asks the models for their reports when somebody asks the registry. The program decides
whether and where to serve the registry.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from gossamer.errors import ConfigError

try:
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError as _error:
    raise ImportError(
        f"gossamer.observe.prometheus: needs the package prometheus_client ({_error}); "
        f"run `pip install 'gossamer[metrics]'`"
    ) from _error

# metric, its key in a report, factor from the report's unit, help
_GAUGES = (
    ("step_seconds", "step_ms", 1e-3, "Median time of a step."),
    ("compute_seconds", "compute_ms", 1e-3, "Median time of a step without waiting for communication."),
    (
        "communication_seconds",
        "communication_ms",
        1e-3,
        "Median time of a step with communication under way.",
    ),
    ("exposed_seconds", "exposed_ms", 1e-3, "Median time of a step spent waiting for communication."),
    ("waits", "waits", 1, "Median number of waits for communication in a step."),
    ("bandwidth_bytes_per_second", "bandwidth_bytes_per_s", 1, "Bytes sent over the time of communication."),
)


class Exporter:
    """Adds the figures of wrapped models to a registry.

    Times are in seconds, over the last steps as in a report. `gossamer_steps_total` and `gossamer_bytes_total` count
    from the time of wrapping. The labels are model, rank and the given ones. A model that is closed or deleted has no
    figures.

    Args:
        models: a wrapped model, or a dict of wrapped models by the values of their label. They are not kept alive.
        registry: a prometheus_client.CollectorRegistry; None: the default one of prometheus_client.
        labels: further labels, equal for all models.

    Raises:
        ConfigError: A model has no report(), or a label has a name that the Exporter uses itself.
        ValueError: The registry has an Exporter already.
    """

    def __init__(self, models: Any, *, registry: Any = None, labels: Mapping[str, str] | None = None) -> None:
        named = models if isinstance(models, Mapping) else {"model": models}
        if strangers := [name for name, model in named.items() if not hasattr(model, "report")]:
            raise ConfigError(
                f"Exporter: models must be wrapped by Gossamer, got {strangers} without report(); give what "
                f"gs.DataParallel(...) or gs.DistributedDataParallel(...) returned"
            )
        if taken := {"model", "rank", "bucket", "codec", "direction"} & {*(labels or {})}:
            raise ConfigError(
                f"Exporter: labels must have names that it does not use itself, got {sorted(taken)}"
            )
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._labels = {**(labels or {}), "rank": str(rank)}
        self._models = {str(name): weakref.ref(model) for name, model in named.items()}
        self.registry: prometheus_client.CollectorRegistry = (
            prometheus_client.REGISTRY if registry is None else registry
        )
        self.registry.register(self)

    def close(self) -> None:
        """Remove the figures from the registry. Call it once."""
        self.registry.unregister(self)

    def text(self) -> str:
        """Return the current figures of the registry, in Prometheus' text format."""
        return str(prometheus_client.generate_latest(self.registry).decode())

    def describe(self) -> Iterable[Any]:
        """Return the metrics without figures. The registry calls this."""
        return self._families().values()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics with the current figures. The registry calls this."""
        families = self._families()
        for name, model in self._models.items():
            wrapped = model()
            if wrapped is not None and wrapped.engine.is_open:
                self._add(families, wrapped, {**self._labels, "model": name})
        yield from families.values()

    def _families(self) -> dict[str, Any]:
        names = [*self._labels, "model"]
        families: dict[str, Any] = {
            metric: GaugeMetricFamily(f"gossamer_{metric}", text, labels=names)
            for metric, _, _, text in _GAUGES
        }
        families["steps"] = CounterMetricFamily("gossamer_steps", "Synchronised backwards.", labels=names)
        families["bytes"] = CounterMetricFamily(
            "gossamer_bytes", "Payload bytes to and from other ranks.", labels=[*names, "direction"]
        )
        families["bucket"] = GaugeMetricFamily(
            "gossamer_bucket_communication_seconds",
            "Median time of a step with communication of this bucket under way.",
            labels=[*names, "bucket", "codec"],
        )
        return families

    def _add(self, families: dict[str, Any], model: Any, labels: dict[str, str]) -> None:
        report, engine, values = model.report(), model.engine, [*labels.values()]
        for metric, key, unit, _ in _GAUGES:
            if report[key] is not None:
                families[metric].add_metric(values, report[key] * unit)
        families["steps"].add_metric(values, engine.backward_count)
        families["bytes"].add_metric([*values, "out"], engine.bytes_sent)
        families["bytes"].add_metric([*values, "in"], engine.bytes_received)
        for bucket in report["buckets"]:
            if bucket["communication_ms"] is not None:
                place = [str(bucket["index"]), bucket["codec"] or "none"]
                families["bucket"].add_metric([*values, *place], bucket["communication_ms"] * 1e-3)
