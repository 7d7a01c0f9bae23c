# Figures about a model's steps: those of a report add up, and a waiting rank shows what it waits for. Ranks are
# threads. Timelines, which belong to a process, are in test_timeline.py.

import json
import threading
import time

import torch
from torch import nn

import gossamer as gs
from gossamer import _C
from gossamer.comm import from_backend
from tests.support.ranks import run_ranks


def train(model: nn.Module, batch: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        model(batch).square().mean().backward()


def test_the_figures_of_a_report_add_up() -> None:
    def body(comm):
        network = nn.Sequential(nn.Linear(32, 128), nn.Linear(128, 8))
        sizes = {"bucket_bytes": 10_000, "first_bucket_bytes": 1000}
        model = gs.DataParallel(network, algorithm=gs.ByteGrad(), process_group=comm, **sizes)
        batch = torch.randn(4, 32)
        train(model, batch, 2)
        first = model.report(reset=True, codec_error=True)
        assert first["codec_error"] is None  # from the next step on gradients are kept
        before, began = model.engine.bytes_sent, time.perf_counter()
        train(model, batch, 6)
        passed_ms = (time.perf_counter() - began) * 1e3
        sent = model.engine.bytes_sent - before
        report, again = model.report(codec_error=True), model.report(reset=True)
        empty = model.report()
        model.close()
        return report, again, empty, sent, passed_ms

    for report, again, empty, sent, passed_ms in run_ranks(2, body):
        assert report["steps"] == again["steps"] == 6
        assert report["bytes_out"] == report["bytes_in"] == sent / 6  # both hops are symmetric
        assert 0 <= report["exposed_ms"] <= report["step_ms"] <= passed_ms
        assert 0 < report["communication_ms"] <= report["step_ms"]
        assert 0 < report["compute_ms"] <= report["step_ms"]
        assert report["waits"] >= 1
        parts = [bucket["communication_ms"] for bucket in report["buckets"]]
        assert len(parts) > 1
        assert all(0 < part < report["step_ms"] for part in parts)
        assert 0 < report["codec_error"] < 0.02  # 8 bits
        assert again["codec_error"] is None
        assert all(0 < bucket["codec_error"] < 0.02 for bucket in report["buckets"])
        assert report["buckets"][0]["codec"].startswith("Int8(")
        table = str(report)
        assert all(text in table for text in ("communication", "Mbit/s", "Int8", "ByteGrad"))
        assert json.loads(json.dumps(report.as_dict())) == report.as_dict()
        assert empty["steps"] == 0
        assert empty["step_ms"] is None


def test_what_a_rank_waits_for_is_told_while_it_waits() -> None:
    apart = threading.Event()

    def body(comm):
        model = gs.DataParallel(nn.Linear(8, 8), process_group=comm)
        batch = torch.ones(1, 8)
        train(model, batch, 1)
        if comm.rank == 1:
            apart.wait(20)
        thread = threading.Thread(target=train, args=(model, batch, 1))
        thread.start()
        seen = []
        if comm.rank == 0:
            time.sleep(0.3)
            seen = model.engine.activity
            apart.set()
        thread.join()
        rest = model.engine.activity
        model.close()
        return seen, rest, time.time()

    (seen, rest, now), _ = run_ranks(2, body)
    assert rest == []
    waits = {what: (bucket, since) for what, bucket, since in seen}
    assert {"wait", "bucket", "all_reduce"} <= waits.keys()
    assert waits["all_reduce"][0] == 0
    assert all(0.1 < now - since < 20 for _, since in waits.values())


def test_without_counting_nothing_is_counted_and_bits_are_the_same() -> None:
    def gradients(counting: bool):
        def body(comm):
            numbers = torch.Generator().manual_seed(comm.rank)
            layer = nn.Linear(64, 64)
            nn.init.normal_(layer.weight, generator=numbers)
            nn.init.zeros_(layer.bias)
            model = gs.DataParallel(layer, algorithm=gs.ByteGrad(), process_group=comm)
            train(model, torch.randn(4, 64, generator=numbers), 3)
            result = [param.grad.clone() for param in model.parameters()], model.report()["steps"]
            model.close()
            return result

        _C.set_counting(counting)
        try:
            return run_ranks(2, body)
        finally:
            _C.set_counting(True)

    for (counted, steps), (bare, none) in zip(gradients(True), gradients(False), strict=True):
        assert (steps, none) == (2, 0)  # the begin of the first step is unknown
        assert all(torch.equal(one, other) for one, other in zip(counted, bare, strict=True))


def test_all_models_of_the_process_are_in_one_report() -> None:
    store = torch.distributed.HashStore()
    comms = [
        from_backend(torch.distributed.ProcessGroupGloo(store, 0, 1), store=store, name=name) for name in "ab"
    ]
    models = [gs.DataParallel(nn.Linear(40 * at, 1), process_group=comm) for at, comm in enumerate(comms, 1)]
    reports = gs.report()
    assert [report["buckets"][0]["bytes"] for report in reports][-2:] == [256, 384]  # with padding
    assert str(reports).count("GradientAllReduce") == len(reports)
    for model in models:
        model.close()
    assert len(gs.report()) == len(reports) - 2
