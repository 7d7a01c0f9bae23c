# The figures of a report as Prometheus text: the right metrics and labels, from models that live, and what is refused.

import subprocess
import sys

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.ranks import run_ranks

prometheus_client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")

from gossamer.observe.prometheus import Exporter  # noqa: E402


def samples_of(text: str) -> dict[tuple[str, str, str], float]:
    """Values by metric, model and the label that only some metrics have."""
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            own = labels.get("direction", labels.get("bucket", ""))
            found[sample.name, labels["model"], own] = sample.value
    return found


def test_the_text_holds_the_figures_of_the_reports_and_counts_on() -> None:
    def body(*comms):
        algorithms = {"plain": "gradient_allreduce", "coded": "bytegrad"}
        models = {
            name: gs.DataParallel(nn.Linear(32, 32), algorithm=algorithm, process_group=comm, broadcast=False)
            for (name, algorithm), comm in zip(algorithms.items(), comms, strict=True)
        }
        exporter = Exporter(models, registry=prometheus_client.CollectorRegistry(), labels={"job": "test"})
        for _ in range(3):
            for model in models.values():
                model(torch.ones(2, 32)).sum().backward()
        text, reports = exporter.text(), {name: model.report() for name, model in models.items()}
        models["plain"].report(reset=True)
        models["plain"].close()
        after = exporter.text()
        exporter.close()
        assert exporter.text() == ""
        models["coded"].close()
        return text, reports, after

    text, reports, after = run_ranks(2, body, groups=2)[0]
    samples = samples_of(text)
    for name, report in reports.items():
        assert samples["gossamer_steps_total", name, ""] == 3
        assert samples["gossamer_bytes_total", name, "out"] == pytest.approx(3 * report["bytes_out"], rel=0.5)
        for metric in ("step", "compute", "communication", "exposed"):
            seconds = samples[f"gossamer_{metric}_seconds", name, ""]
            assert seconds == pytest.approx(report[f"{metric}_ms"] * 1e-3), metric
        assert samples["gossamer_bucket_communication_seconds", name, "0"] > 0
    assert samples["gossamer_bytes_total", "plain", "in"] > 0
    assert 'codec="none",job="test",model="plain",rank="0"' in text
    assert {name for _, name, _ in samples_of(after)} == {"coded"}


def test_what_is_no_wrapped_model_and_a_label_of_its_own_are_refused() -> None:
    with pytest.raises(gs.ConfigError, match=r"must be wrapped by Gossamer, got \['model'\]"):
        Exporter(nn.Linear(2, 2))
    with pytest.raises(gs.ConfigError, match=r"does not use itself, got \['rank'\]"):
        Exporter({}, labels={"rank": "3"})


WITHOUT = """
import sys
sys.modules["prometheus_client"] = None
try:
    import gossamer.observe.prometheus
except ImportError as error:
    print(error)
"""


def test_without_the_package_the_import_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert "pip install 'gossamer[metrics]'" in done.stdout, done.stdout + done.stderr
