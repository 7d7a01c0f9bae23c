# gs.elastic with real workers: benchmarks/elastic_loop.py is what they run; it replays in one process what they did.

import importlib.util
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import gossamer as gs
import gossamer.bagua.torch_api.data_parallel as bagua
from tests import ROOT

LOOP = ROOT / "benchmarks" / "elastic_loop.py"


def benchmark(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, LOOP.parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


loop, averages = benchmark("elastic_loop"), benchmark("elastic_averages")
ALL_COME_AGAIN = ["--blacklist-cooldown-range", "0", "0"]
EXACT = 1e-9  # after some hundred steps of Adam, whose sums may be in another order


def begin(
    start, folder: Path, flags: list[str], *, epochs: int = 1, env=None, prefix=(), script=LOOP, **plan
):
    argv = ["-m", "gossamer.launch.cli", "run", *flags, str(script), str(folder), str(epochs)]
    argv.append(json.dumps(plan))
    return start(argv, env=env, prefix=prefix)


def ends(folder: Path) -> dict[int, dict]:
    last = {number: own[-1] for number, own in loop.journals(folder).items() if own}
    return {number: line for number, line in last.items() if {"end", "saved"} & set(line)}


def wait_until(found) -> None:
    until = time.monotonic() + 400
    while not found():
        assert time.monotonic() < until
        time.sleep(0.05)


def lines_of(folder: Path, number: int, key: str) -> int:
    return sum(key in line for line in loop.journals(folder).get(number, ()))


def wait_for(folder: Path, found) -> None:
    wait_until(lambda: any(found(line) for own in loop.journals(folder).values() for line in own))


def parts() -> tuple[DataLoader, torch.nn.Module, torch.optim.Optimizer]:
    """A loader, a network and an optimizer that gs.elastic() takes, after gs.init()."""
    data = torch.utils.data.TensorDataset(torch.zeros(4, 2))
    net = torch.nn.Linear(2, 1)
    return DataLoader(data, sampler=gs.ElasticSampler(data)), net, torch.optim.SGD(net.parameters(), lr=0.1)


PLANS = [{}, {"backend": "gloo"}, {"codec": "int8"}, {"rank": 1}]


@pytest.mark.parametrize("plan", PLANS, ids=["shm", "gloo", "codec", "powersgd"])
def test_backward_ends_without_the_dead_and_without_an_error(fork, tmp_path, plan) -> None:
    kill = {"1": [3, "backward"], "0": [6, "after"], "3": [9, "forward"]}
    code, _, err = begin(fork, tmp_path, ["--min-np", "1", "-np", "4"], kill=kill, **plan).finish()
    assert code == 0, err
    assert err.count("was killed by signal 9 (SIGKILL)") == 3
    result = loop.check(tmp_path, exact=not {"codec", "rank"} & set(plan))
    assert result["worst"] < EXACT
    assert result["steps"] > 30, "what the dead would have done of the epoch is done by the last one"
    assert list(ends(tmp_path)) == [2]


@pytest.mark.parametrize("plan", [{}, {"rank": 1}], ids=["exact", "powersgd"])
def test_a_newcomer_takes_everything_from_the_others(fork, tmp_path, plan) -> None:
    flags = ["--min-np", "1", "--max-np", "3", *ALL_COME_AGAIN]
    kill = {"1": [3, "backward"], "0": [8, "backward"]}
    run = begin(fork, tmp_path, flags, epochs=10**6, kill=kill, sleep_s=0.02, **plan)
    wait_for(tmp_path, lambda line: line.get("size") == 2)
    for number in (3, 4):
        wait_for(tmp_path, lambda line: line.get("size") == 3 and line["step"] > 9)
        wait_until(lambda number=number: lines_of(tmp_path, number, "step") > 0)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 0, err
    result = loop.check(tmp_path, exact=not plan)
    assert result["worst"] < EXACT
    assert {end["saved"] for end in ends(tmp_path).values()} == {result["steps"]}
    for number in (3, 4):
        first = loop.journals(tmp_path)[number][0]
        assert first["begin"] == first["total"] > 3, "the counter that the script gave comes along"


@pytest.mark.parametrize("later_s", [0.0, 0.3, 2.0])
def test_all_end_well_while_the_dead_are_replaced(fork, tmp_path, later_s) -> None:
    """The launcher is told to end after a kill: the others form a group, or one starts, comes or is taken in."""
    flags = ["--min-np", "3", "--max-np", "3", *ALL_COME_AGAIN]
    run = begin(fork, tmp_path, flags, epochs=10**6, kill={"1": [3, "backward"]}, sleep_s=0.02)
    wait_for(tmp_path, lambda line: line.get("draw") == 3)
    time.sleep(later_s)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 0, err
    result = loop.check(tmp_path)
    assert result["worst"] < EXACT
    saved = {number: end["saved"] for number, end in ends(tmp_path).items()}
    assert {0, 2} <= set(saved) <= {0, 2, 3}
    assert set(saved.values()) == {result["steps"]}


DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(os.path.join(sys.argv[1], os.environ["GOSSAMER_ELASTIC_WORKER"]), "w").close()
time.sleep(100)
"""


def test_a_second_signal_to_the_launcher_ends_workers_that_do_not_listen(fork, tmp_path) -> None:
    script = tmp_path / "deaf.py"
    script.write_text(DEAF)
    run = fork(["-m", "gossamer.launch.cli", "run", "--min-np", "1", "-np", "2", str(script), str(tmp_path)])
    wait_until(lambda: {"0", "1"} <= {each.name for each in tmp_path.iterdir()})
    run.process.send_signal(signal.SIGTERM)
    time.sleep(1)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish(20)  # --grace is 30 s
    assert code == 128 + signal.SIGTERM, err
    assert "stopped by SIGTERM" in err


def test_a_worker_that_is_told_to_end_leaves_between_two_steps(fork, tmp_path) -> None:
    code, _, err = begin(fork, tmp_path, ["--min-np", "1", "-np", "3"], term={"0": 4}, sleep_s=0.02).finish()
    assert code == 0, err
    assert "worker 0 (slot 0 of localhost) has gone, as it was told; 2 are left" in err
    assert loop.check(tmp_path)["worst"] < EXACT
    assert sum("step" in line for line in loop.journals(tmp_path)[0]) < 8
    assert sorted(ends(tmp_path)) == [1, 2]


DILOCO = {"period": 4, "outer": True}
STREAMING = {"period": 6, "fragments": 2, "delay": 2, "merge": 0.5, "outer": True}


@pytest.mark.parametrize(
    ("local", "more"),
    [
        ({"period": 4}, {}),
        (DILOCO, {}),
        (DILOCO, {"backend": "gloo"}),
        (DILOCO, {"codec": "int8"}),
        ({"period": 4, "fragments": 2}, {"codec": "int8", "backend": "gloo"}),
        (STREAMING, {}),
        (STREAMING, {"codec": "int8"}),
        ({"period": 4, "error_decay": 0.95}, {"codec": "sparse"}),
    ],
    ids=[
        "mean",
        "diloco",
        "diloco gloo",
        "diloco codec",
        "fragments",
        "streaming",
        "streaming codec",
        "sparse",
    ],
)
def test_a_death_costs_an_averaging_the_share_of_the_dead_and_nothing_else(
    fork, tmp_path, local, more
) -> None:
    kill = {"1": [6, "backward"], "0": [12, "after"], "3": [17, "forward"]}
    run = begin(fork, tmp_path, ["--min-np", "1", "-np", "4"], epochs=2, kill=kill, local=local, **more)
    code, _, err = run.finish()
    assert code == 0, err
    assert err.count("was killed by signal 9 (SIGKILL)") == 3
    exact = not more.get("codec") and local.get("fragments", 1) == 1
    result = averages.check(tmp_path, period=local["period"], outer=local.get("outer", False), exact=exact)
    assert result["worst"] < EXACT
    [(number, end)] = ends(tmp_path).items()
    assert number == 2
    assert result["averagings"] == end["rounds"] > 10


@pytest.mark.parametrize("local", [DILOCO, STREAMING], ids=["diloco", "streaming"])
def test_a_newcomer_begins_at_the_anchor_of_the_others(fork, tmp_path, local) -> None:
    flags = ["--min-np", "1", "--max-np", "3", *ALL_COME_AGAIN]
    kill = {"1": [6, "backward"], "0": [21, "after"]}
    run = begin(fork, tmp_path, flags, epochs=10**6, kill=kill, sleep_s=0.02, local=local)
    for number in (3, 4):
        wait_until(lambda number=number: lines_of(tmp_path, number, "average") >= 3)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 0, err
    exact = local is DILOCO
    result = averages.check(tmp_path, period=local["period"], outer=True, exact=exact)
    assert result["worst"] < EXACT
    assert {end["rounds"] for end in ends(tmp_path).values()} == {result["averagings"]}
    for number in (3, 4):
        first = loop.journals(tmp_path)[number][0]
        assert first["begin"] == first["total"] > 3, "the counter that the script gave comes along"


def test_a_worker_that_trains_alone_in_between_leaves_after_an_averaging(fork, tmp_path) -> None:
    flags = ["--min-np", "1", "-np", "3"]
    run = begin(fork, tmp_path, flags, epochs=2, term={"0": 5}, local=DILOCO, sleep_s=0.02)
    code, _, err = run.finish()
    assert code == 0, err
    assert "worker 0 (slot 0 of localhost) has gone, as it was told; 2 are left" in err
    assert averages.check(tmp_path, period=4, outer=True)["worst"] < EXACT
    assert sum("step" in line for line in loop.journals(tmp_path)[0]) == 8
    assert sorted(ends(tmp_path)) == [1, 2]


@pytest.mark.parametrize("topology", [{}, {"topology": "random_pairs"}], ids=["diloco", "noloco"])
def test_all_end_well_when_the_launcher_is_told_to_end_and_one_has_ended_its_training(
    fork, tmp_path, topology
) -> None:
    """Worker 1 makes its last but one step then. It averages at once, and worker 0 waits for its end."""
    plan = {"local": DILOCO | topology, "nap": {"1": [28, 2.0]}}
    run = begin(fork, tmp_path, ["--min-np", "1", "-np", "2"], **plan)
    wait_until(lambda: lines_of(tmp_path, 0, "step") == 30)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 0, err
    saved = ends(tmp_path)
    assert {number: "saved" in line for number, line in saved.items()} == {0: True, 1: True}
    assert len({line["rounds"] for line in saved.values()}) == 1


KINDS = pytest.mark.parametrize("local", [None, DILOCO], ids=["gradients", "diloco"])


def replayed(folder: Path, local: dict | None) -> dict[str, float]:
    """What the replay of a run says: elastic_loop.check() or elastic_averages.check()."""
    return averages.check(folder, period=4, outer=True) if local else loop.check(folder)


@pytest.mark.parametrize(
    ("local", "transport"), [(None, "gossamer"), (DILOCO, "gloo")], ids=["gradients", "diloco gloo"]
)
def test_a_worker_that_hangs_is_given_up_and_replaced(fork, tmp_path, monkeypatch, local, transport) -> None:
    monkeypatch.setenv("GOSSAMER_STALL_SHUTDOWN_S", "2")
    flags = ["--min-np", "1", "--max-np", "3", *ALL_COME_AGAIN, "--give-up-after", "1"]
    plan = {"hang": {"1": 9}, "sleep_s": 0.02, "local": local, "backend": transport}
    run = begin(fork, tmp_path, flags, epochs=10**6, **plan)
    wait_for(tmp_path, lambda line: line.get("draw") == 40 and line["group"] > 2)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 0, err
    assert "worker 1 (slot 1 of localhost) has not come back from group 1, which has failed, in 1 s" in err
    assert replayed(tmp_path, local)["worst"] < EXACT
    assert 3 in ends(tmp_path), "the worker that took its place"


@KINDS
def test_a_donor_that_dies_while_it_saves_is_replaced_by_another(fork, tmp_path, local) -> None:
    flags = ["--min-np", "1", "--max-np", "3", *ALL_COME_AGAIN]
    run = begin(
        fork, tmp_path, flags, epochs=10**6, kill={"2": [6, "after"]}, donors=[0], sleep_s=0.02, local=local
    )
    wait_until(lambda: all(lines_of(tmp_path, number, "step") > 0 for number in (3, 4)))
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 0, err
    assert "worker 0 (slot 0 of localhost) was killed by signal 9 (SIGKILL)" in err
    assert replayed(tmp_path, local)["worst"] < EXACT
    assert {1, 3, 4} == set(ends(tmp_path))


@KINDS
def test_workers_whose_launcher_is_killed_save_at_one_place_and_end(fork, tmp_path, local) -> None:
    run = begin(fork, tmp_path, ["--min-np", "1", "-np", "3"], epochs=10**6, sleep_s=0.02, local=local)
    wait_for(tmp_path, lambda line: line.get("step") == 10)
    run.process.kill()
    run.finish(30)
    saved = []
    for number, lines in loop.journals(tmp_path).items():
        until = time.monotonic() + 20
        while Path(f"/proc/{lines[0]['pid']}").exists():
            assert time.monotonic() < until, f"worker {number} has not ended"
            time.sleep(0.05)
        saved.append(loop.journals(tmp_path)[number][-1])
    assert all("saved" in line for line in saved), saved
    assert len({line["rounds" if local else "saved"] for line in saved}) == 1, saved
    assert replayed(tmp_path, local)["worst"] < EXACT


@pytest.mark.usefixtures("group_of_one")
def test_averagings_in_lockstep_are_refused() -> None:
    loader, net, optimizer = parts()
    model = gs.DataParallel(net, optimizer, algorithm=gs.LocalSGD(lockstep=True))
    with pytest.raises(gs.ConfigError, match=r"elastic: LocalSGD\(.*must have lockstep=False"):
        gs.elastic(loader, model, optimizer)
    model.close()


def test_what_cannot_be_elastic_is_refused() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(4, 2))
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(gs.ConfigError, match="elastic: model must be a gs.DataParallel, got Linear"):
        gs.elastic(DataLoader(data), net, optimizer)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("face", [gs.DistributedDataParallel, bagua.DistributedDataParallel])
def test_faces_whose_group_cannot_be_replaced_are_refused(face) -> None:
    loader, net, optimizer = parts()
    model = face(net)
    with pytest.raises(gs.ConfigError, match="must be a gs.DataParallel, got DistributedDataParallel"):
        gs.elastic(loader, model, optimizer)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("group", [gs.Flat(), gs.Hierarchical()], ids=["flat", "by hosts"])
def test_a_way_for_sums_may_be_given_if_it_names_no_ranks(group) -> None:
    loader, net, optimizer = parts()
    model = gs.DataParallel(net, optimizer, process_group=group)
    assert len(list(gs.elastic(loader, model, optimizer))) == 4
    model.close()
    fixed = gs.DataParallel(net, optimizer, process_group=gs.Hierarchical(hosts=[[0]]))
    with pytest.raises(
        gs.ConfigError, match=r"without a list of hosts, got process_group=Hierarchical\(.*\[\[0\]\]"
    ):
        gs.elastic(loader, fixed, optimizer)
    fixed.close()


@pytest.mark.usefixtures("group_of_one")
def test_an_elastic_model_neither_weights_its_ranks_nor_joins() -> None:
    loader, net, optimizer = parts()
    counting = gs.DataParallel(net, optimizer)
    counting.count(2)
    with pytest.raises(gs.ConfigError, match=r"elastic: count\(\) must not be used"):
        gs.elastic(loader, counting, optimizer)
    counting.close()
    model = gs.DataParallel(net, optimizer)
    model.engine.survive(lambda _error, _counted: False, lambda: None)  # as in an elastic run
    with pytest.raises(gs.ConfigError, match=r"gs.elastic\(\) cannot weight its gradients, got 2"):
        model.count(2)
    with pytest.raises(gs.ConfigError, match=r"join: not in a run of gs.elastic\(\)"), model.join():
        pytest.fail("the context was entered")
    model.close()


def test_lightnings_strategy_refuses_to_be_elastic() -> None:
    native = pytest.importorskip("gossamer.lightning.pytorch")
    with pytest.raises(gs.ConfigError, match="Lightning's loop draws the batches"):
        native.GossamerStrategy(elastic=True)
