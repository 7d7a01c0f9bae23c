# A newcomer under gs.elastic copies the state while the others train: what it takes, and what goes wrong.

import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gossamer as gs
from gossamer.regroup import donor
from gossamer.regroup.averaging import AveragingCopy
from gossamer.regroup.channel import Channel, Kind, Message
from gossamer.regroup.data import UnevenData
from gossamer.regroup.donor import Gift, copied
from gossamer.regroup.gradients import GradientCopy
from gossamer.sampler import ElasticSampler
from gossamer.topology import resolve
from tests.launch.test_peers_elastic import PAIRS, peers
from tests.launch.test_plain_elastic import (
    ALL_COME_AGAIN,
    DILOCO,
    EXACT,
    STREAMING,
    averages,
    begin,
    ends,
    lines_of,
    loop,
    wait_until,
)

FLAGS = ["--min-np", "1", "--max-np", "3", *ALL_COME_AGAIN]
SECONDS = {"period_s": 0.3, "outer": True}


def end(run: Any) -> str:
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 0, err
    return err


def check(folder, plan: dict) -> None:
    """Replay the run as far as it can be."""
    local = plan.get("local")
    if "rounds" in plan:
        assert averages.check_rounds(loop.journals(folder))["worst"] < EXACT
    elif not local:
        exact = plan.get("codec", "exact") == "exact" and "clamps" not in plan
        checked = loop.check(folder, exact=exact, adam=plan.get("adam"), clip=plan.get("clip"))
        assert checked["worst"] < EXACT
    elif "topology" in local:
        assert peers.check(folder, topology=resolve(local["topology"]), outer=True)["worst"] < EXACT
    elif "period_s" in local:
        averages.check_anchors(loop.journals(folder))
    else:
        exact = local.get("fragments", 1) == 1
        assert averages.check(folder, period=local["period"], outer=True, exact=exact)["worst"] < EXACT


def shares(folder) -> list[dict]:
    """The lines of the workers that had newcomers in their group, in order."""
    found = [line for own in loop.journals(folder).values() for line in own if "new" in line]
    return sorted(found, key=lambda line: line["time"])


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"backend": "gloo", "codec": "int8"},
        {"local": DILOCO},
        {"local": DILOCO, "backend": "gloo", "counts": True},
        {"local": STREAMING},
        {"local": {"period": 6, "fragments": 2, "delay": 5, "merge": 0.5, "outer": True}},
        {"local": SECONDS, "slow": {"0": 3}},
        {"rounds": {"sync_interval_ms": 50}},
    ],
    ids=["gradients", "gloo codec", "diloco", "counted", "streaming", "never quiet", "uneven", "async"],
)
def test_others_train_while_a_newcomer_copies_their_state(fork, tmp_path, plan) -> None:
    settings = {"kill": {"1": [6, "backward"]}, "patient": [0, 2], "sleep_s": 0.02}
    run = begin(fork, tmp_path, FLAGS, epochs=10**6, **settings, **plan)
    wait_until(lambda: lines_of(tmp_path, 3, "step") > 12)
    end(run)
    if plan.get("counts"):
        assert averages.check(tmp_path, period=4, outer=True, counts=True)["worst"] < EXACT
    else:
        check(tmp_path, plan)
    [share] = shares(tmp_path)
    assert share["new"] == [3]
    assert share["copied"], "the others had not to wait for it"
    assert set(ends(tmp_path)) == {0, 2, 3}
    given = min(line["time"] for own in loop.journals(tmp_path).values() for line in own if "gives" in line)
    for number in (0, 2):
        own = loop.journals(tmp_path)[number]
        assert any("step" in line and given < line["time"] < share["time"] for line in own), (
            "they have trained on"
        )


def test_a_newcomer_asks_another_worker_when_the_one_that_gives_dies(fork, tmp_path) -> None:
    givers, kill = [0], {"1": [6, "backward"]}  # worker 3 asks worker 0 first
    run = begin(fork, tmp_path, FLAGS, epochs=10**6, kill=kill, givers=givers, sleep_s=0.02)
    wait_until(lambda: all(lines_of(tmp_path, number, "step") > 8 for number in (3, 4)))
    end(run)
    check(tmp_path, {})
    assert any("gives" in line for line in loop.journals(tmp_path)[0])
    assert shares(tmp_path)[-1]["copied"]


@pytest.mark.parametrize(
    ("plan", "dies"),
    [
        ({}, 0),
        ({}, 2),
        ({"local": DILOCO}, 0),
        ({"local": DILOCO}, 2),
        ({"local": PAIRS}, 0),
        ({"sharded": {"holders": 2}, "clip": 0.5}, 0),
        ({"adam": "qadam", "codec": "exact"}, 0),
    ],
    ids=["gradients giver", "gradients other", "diloco giver", "diloco other", "noloco", "sharded", "qadam"],
)
def test_a_member_may_die_when_the_group_of_a_newcomer_begins(fork, tmp_path, plan, dies) -> None:
    dead = {"kill": {"1": [6, "backward"]}, "enters": {str(dies): 3}}
    run = begin(fork, tmp_path, FLAGS, epochs=10**6, sleep_s=0.02, **dead, **plan)
    wait_until(lambda: all(lines_of(tmp_path, number, "step") > 8 for number in (3, 4)))
    end(run)
    check(tmp_path, plan)


def test_weights_that_change_outside_of_the_optimizer_are_copied_in_the_group(fork, tmp_path) -> None:
    plan = {"clamps": True, "kill": {"1": [6, "backward"]}}
    run = begin(fork, tmp_path, FLAGS, epochs=10**6, sleep_s=0.02, **plan)
    wait_until(lambda: lines_of(tmp_path, 3, "step") > 8)
    end(run)
    check(tmp_path, plan)
    assert [share["copied"] for share in shares(tmp_path)] == [False]


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "Adam": torch.optim.Adam,
    "AdamW fused": partial(torch.optim.AdamW, fused=True, amsgrad=True),
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "Adadelta": torch.optim.Adadelta,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copy_takes_each_step_of_every_optimizer_with_all_bits(name) -> None:
    def made(seed: int) -> tuple[torch.nn.Module, list[torch.optim.Optimizer], GradientCopy]:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
        first, *others = net
        groups = [{"params": other.parameters(), "lr": 0.01 * (1 + i)} for i, other in enumerate(others)]
        optimizers = [OPTIMIZERS[name](groups, lr=0.01), torch.optim.SGD(first.parameters(), lr=0.1)]
        return net, optimizers, GradientCopy(dict(net.named_parameters()), optimizers)

    net, optimizers, giver = made(0)
    _, _, taker = made(1)

    def step(*, watched: bool) -> None:
        net.zero_grad()
        net(torch.randn(4, 5)).square().mean().backward()
        net[2].bias.grad = None  # unused, as a frozen parameter's
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        for number, optimizer in enumerate(optimizers):
            optimizer.param_groups[0]["lr"] *= 0.9  # a schedule
            if watched:
                taker.change(copied(giver.step_of(number, optimizer)))
            optimizer.step()

    for _ in range(3):
        step(watched=False)
    taker.take(giver.state())
    for _ in range(3):
        step(watched=True)
    ours, theirs = taker.tensors(), giver.tensors()
    assert len(ours) == len(theirs) > 6
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


class Taken:
    """Takes messages, one each time that `go` is set."""

    def __init__(self, store: dist.Store) -> None:
        self.kinds: list[Kind] = []
        self.last: Any = None
        self.go = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(store,))
        self._thread.start()

    def _run(self, store: dist.Store) -> None:
        channel = Channel(store, gives=False)
        while not {Kind.WHOLE, Kind.END} & set(self.kinds):
            self.go.acquire()
            message = channel.receive()
            self.kinds.append(message.kind)
            self.last = message.content or self.last

    def all(self) -> list[Kind]:
        self.go.release(100)
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.kinds


def weights(value: float) -> dict:
    return {"weights": [torch.full((1 << 18,), value)], "step": value}


def test_changes_arrive_in_order_and_the_end_comes_last() -> None:
    store = dist.HashStore()
    taken = Taken(store)
    gift = Gift(1, weights(0), store)
    for number in (1, 2):
        gift.change({"step": number})
    gift.end()
    assert gift.over
    assert taken.all() == [Kind.STATE, Kind.STEP, Kind.STEP, Kind.WHOLE]
    assert taken.last == {"step": 2}
    assert not gift.miss()


def test_a_copy_that_falls_behind_by_more_than_the_state_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(donor, "LEAST_BYTES", 0)
    store = dist.HashStore()
    taken = Taken(store)
    gift = Gift(1, weights(0), store)
    for number in range(10):
        gift.change(weights(number))
    assert gift.over
    assert taken.all()[-1] is Kind.END
    assert len(taken.kinds) <= 3


def test_a_newer_state_replaces_what_waits_and_a_copy_that_is_late_three_times_is_given_up() -> None:
    def large(value: float) -> dict:  # more than a connection holds
        return {"weights": [torch.full((1 << 24,), value)], "step": value}

    store = dist.HashStore()
    taken = Taken(store)
    gift = Gift(1, weights(0), store)
    taken.go.release(1)
    wait_until(lambda: len(taken.kinds) == 1)
    gift.renew(large(1))
    time.sleep(0.2)  # it is under way
    assert gift.miss()
    for number in (2, 3):
        gift.renew(large(number))
    assert gift.miss()
    taken.go.release(2)
    wait_until(lambda: taken.last["step"] == 3)
    time.sleep(0.2)
    assert not gift.miss(), "it has all"
    assert not gift.over
    gift.renew(large(4))
    assert gift.miss()
    assert gift.over
    assert taken.all()[-1] is Kind.END
    assert set(taken.kinds) == {Kind.STATE, Kind.END}


@pytest.mark.parametrize("ends", ["giver", "taker"])
def test_either_end_can_end_the_wait_of_both(ends) -> None:
    store = dist.HashStore()
    made: list[Channel] = []
    errors: list[BaseException] = []

    def take() -> None:
        channel = Channel(store, gives=False)
        made.append(channel)
        try:
            channel.receive()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    giver = Channel(store, gives=True)
    time.sleep(0.3)
    (giver if ends == "giver" else made[0]).end()
    thread.join(30)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_a_message_carries_trees_of_any_dtype_and_shape() -> None:
    store = dist.HashStore()
    content = {
        "a": [
            torch.arange(6.0).view(2, 3).t(),
            torch.tensor(3),
            torch.zeros(0),
            torch.ones(3, dtype=torch.bfloat16),
        ],
        "b": (1, None, "text", 0.5, True),
        "c": torch.tensor([True, False]),
    }
    got: list[Message] = []
    thread = threading.Thread(target=lambda: got.append(Channel(store, gives=False).receive()))
    thread.start()
    Channel(store, gives=True).send(Message(Kind.STATE, 7, content))
    thread.join(30)
    [message] = got
    assert (message.kind, message.left, message.content["b"]) == (Kind.STATE, 7, content["b"])
    for ours, theirs in zip(
        [*message.content["a"], message.content["c"]], [*content["a"], content["c"]], strict=True
    ):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


def test_a_copy_of_averagings_keeps_the_newest_state() -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    other = torch.optim.Adam(torch.nn.Linear(2, 1).parameters())
    copy = AveragingCopy([other])
    for rounds in (3, 4):
        anchors = {"weight": torch.full((1, 2), float(rounds))}
        copy.take({"anchors": anchors, "shared": {"rounds": rounds}, "optimizers": [optimizer.state_dict()]})
    assert copy.shared == {"rounds": 4}
    assert torch.equal(copy.anchors["weight"], torch.full((1, 2), 4.0))
    assert other.state_dict()["state"][0]["step"] == 1


def test_a_newcomer_without_a_part_waits_for_the_next_division() -> None:
    gs.init()
    try:
        sampler = ElasticSampler(range(40))
    finally:
        gs.shutdown()
    sampler.divide(2, 3)
    data = UnevenData(sampler, 4, drop_last=False)
    old = {
        "epoch": 1,
        "processed_num": 8,
        "left": list(range(32)),
        "number": 5,
        "speeds": [8.0, 8.0],
        "seen": [4, 0],
    }
    data.load_state_dict(old | {"has_all": False})
    assert data.is_dry
    assert list(sampler) == []
    assert data.numbers()[2] < 0
    data.load_state_dict(old | {"speeds": [8.0] * 3, "seen": [0] * 3, "has_all": True})
    assert not data.is_dry
    assert len(list(sampler)) > 0
