# The figures of model.report() as Prometheus metrics, through the package prometheus_client, which is needed here
# alone. A collector: it asks the models when a registry is asked, and at no other time. Whether and where the registry
# is served is up to the program.
"""``Exporter``: reports for Prometheus."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from gossamer.errors import ConfigError

try:
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError as error:
    raise ImportError(
        f"gossamer.observe.prometheus: needs the package prometheus_client ({error}); "
        f"run `pip install 'gossamer[metrics]'`"
    ) from error

# metric, its key in a report, its unit in that of the report, help
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
    """Registers the figures of wrapped models, which stand in every text that the registry is asked for.

    Times are in seconds, over the last steps as in a report; `gossamer_steps_total` and `gossamer_bytes_total` count
    from the wrapping on. Labels: model, rank, and those given. A model that is closed or gone has no figures any more.

    Args:
        models: a wrapped model, or a dict of them by the names that their label gets; it keeps none alive.
        registry: a prometheus_client.CollectorRegistry; None: the one that prometheus_client serves by default.
        labels: further labels, the same for all.

    Raises:
        ConfigError: a model without report(), a label of its own; ValueError of prometheus_client: a second Exporter in
            the same registry.
    """

    def __init__(
        self,
        models: Any,
        *,
        registry: Any = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        named = models if isinstance(models, Mapping) else {"model": models}
        if strangers := [name for name, model in named.items() if not hasattr(model, "report")]:
            raise ConfigError(
                f"Exporter: models must be wrapped by Gossamer, got {strangers} without report(); give what "
                f"gs.DataParallel(...) or gs.DistributedDataParallel(...) returned"
            )
        if taken := {"model", "rank", "bucket", "codec", "direction"} & {*(labels or {})}:
            raise ConfigError(f"Exporter: labels must be further ones, got {sorted(taken)}")
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._labels = {**(labels or {}), "rank": str(rank)}
        self._models = {str(name): weakref.ref(model) for name, model in named.items()}
        self.registry = prometheus_client.REGISTRY if registry is None else registry
        self.registry.register(self)

    def close(self) -> None:
        """Takes the figures out of the registry. Once."""
        self.registry.unregister(self)

    def text(self) -> str:
        """What the registry holds now, in Prometheus' text format."""
        return str(prometheus_client.generate_latest(self.registry).decode())

    def describe(self) -> Iterable[Any]:
        """For the registry: the metrics without figures."""
        return self._families().values()

    def collect(self) -> Iterator[Any]:
        """For the registry: the metrics with the figures of now."""
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
