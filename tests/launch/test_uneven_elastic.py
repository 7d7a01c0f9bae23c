# gs.elastic with workers of different speed, which average by their clocks: who draws what, and what a death costs.

import signal
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader

import gossamer as gs
from gossamer.regroup.data import UnevenData
from gossamer.regroup.deadline import Deadline
from tests.launch.test_plain_elastic import (
    ALL_COME_AGAIN,
    EXACT,
    averages,
    begin,
    ends,
    lines_of,
    loop,
    parts,
    wait_until,
)
from tests.support.ranks import run_ranks

SECONDS = {"period_s": 0.3, "outer": True}
STREAMING = {"period_s": 0.4, "fragments": 2, "delay": 2, "merge": 0.5, "outer": True}
SLOW = {"sleep_s": 0.02, "slow": {"1": 4}}  # worker 1 makes a step in the time of four


def drawn(folder) -> list[dict]:
    """The lines of all batches of all workers."""
    return [line for own in loop.journals(folder).values() for line in own if "draw" in line]


def times_drawn(folder) -> Counter:
    return Counter(index for line in drawn(folder) for index in line["indices"])


@pytest.mark.parametrize("local", [SECONDS, STREAMING], ids=["diloco", "streaming"])
def test_workers_of_different_speed_draw_every_sample_once_in_an_epoch(fork, tmp_path, local) -> None:
    code, _, err = begin(
        fork, tmp_path, ["--min-np", "1", "-np", "3"], epochs=3, local=local, **SLOW
    ).finish()
    assert code == 0, err
    assert set(times_drawn(tmp_path).values()) == {3}
    assert len(times_drawn(tmp_path)) == loop.SAMPLES
    last = Counter(index for line in drawn(tmp_path) if line["epoch"] == 2 for index in line["indices"])
    assert set(last.values()) <= {1, 2}, "2: what made less than a batch a worker was left to it"
    averagings = averages.check_anchors(loop.journals(tmp_path))
    assert {end["rounds"] for end in ends(tmp_path).values()} == {averagings}
    steps = [lines_of(tmp_path, number, "step") for number in range(3)]
    assert steps[1] < min(steps[0], steps[2]) / 1.5, steps


@pytest.mark.parametrize(
    ("local", "more"),
    [(SECONDS, {}), (STREAMING, {"codec": "int8", "backend": "gloo"})],
    ids=["diloco", "streaming gloo codec"],
)
def test_what_the_dead_had_not_averaged_is_drawn_by_others(fork, tmp_path, local, more) -> None:
    kill = {"0": [30, "after"], "1": [12, "forward"]}
    flags = ["--min-np", "1", "-np", "4"]
    code, _, err = begin(fork, tmp_path, flags, epochs=3, kill=kill, local=local, **SLOW, **more).finish()
    assert code == 0, err
    assert err.count("was killed by signal 9 (SIGKILL)") == 2
    times = times_drawn(tmp_path)
    assert len(times) == loop.SAMPLES
    assert min(times.values()) == 3
    averagings = averages.check_anchors(loop.journals(tmp_path))
    assert {number: end["rounds"] for number, end in ends(tmp_path).items()} == {2: averagings, 3: averagings}


def test_a_newcomer_takes_part_at_its_own_speed_and_all_end_together(fork, tmp_path) -> None:
    flags = ["--min-np", "1", "--max-np", "3", *ALL_COME_AGAIN]
    plan = {"kill": {"2": [30, "after"], "0": [60, "backward"]}, "local": SECONDS, **SLOW}
    run = begin(fork, tmp_path, flags, epochs=10**6, **plan)
    for number in (3, 4):
        wait_until(lambda number=number: lines_of(tmp_path, number, "average") >= 3)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 0, err
    averagings = averages.check_anchors(loop.journals(tmp_path))
    saved = {number: end["rounds"] for number, end in ends(tmp_path).items()}
    assert saved == {1: averagings, 3: averagings, 4: averagings}
    first = loop.journals(tmp_path)[3][0]
    assert first["begin"] == first["total"] > 3, "the counter that the script gave comes along"


def test_a_worker_that_is_told_to_end_leaves_its_data_to_the_others(fork, tmp_path) -> None:
    flags = ["--min-np", "1", "-np", "3"]
    code, _, err = begin(fork, tmp_path, flags, epochs=3, term={"0": 20}, local=SECONDS, **SLOW).finish()
    assert code == 0, err
    assert "worker 0 (slot 0 of localhost) has gone, as it was told; 2 are left" in err
    assert set(times_drawn(tmp_path).values()) == {3}, "it left after an averaging"
    assert sorted(ends(tmp_path)) == [1, 2]


def test_counted_samples_weigh_when_an_averaging_is_made_again(fork, tmp_path) -> None:
    kill = {"1": [6, "backward"], "0": [12, "after"], "3": [17, "forward"]}
    local = {"period": 4, "outer": True}
    run = begin(fork, tmp_path, ["--min-np", "1", "-np", "4"], epochs=2, kill=kill, local=local, counts=True)
    code, _, err = run.finish()
    assert code == 0, err
    assert averages.check(tmp_path, period=4, outer=True, counts=True)["worst"] < EXACT
    assert averages.check(tmp_path, period=4, outer=True, counts=False)["worst"] > 0.01


@pytest.mark.parametrize(
    ("local", "more"),
    [
        ({"period": 4, "outer": True}, {"counts": True, "backend": "gloo"}),
        ({"period": 6, "fragments": 2, "delay": 2, "merge": 0.5, "outer": True}, {"codec": "int8"}),
        (SECONDS, {}),
    ],
    ids=["counted diloco gloo", "streaming codec", "seconds"],
)
def test_who_is_late_is_left_out_once_and_counted_when_it_comes(fork, tmp_path, local, more) -> None:
    flags = ["--min-np", "1", "-np", "3"]
    plan = {"nap": {"1": [30, 2.5]}, "deadline": {"deadline_s": 0.6}, "sleep_s": 0.02, "local": local, **more}
    code, _, err = begin(fork, tmp_path, flags, epochs=6, **plan).finish()
    assert code == 0, err
    assert "worker 1 (slot 1 of localhost) is late; the others go on, and take it in when it comes" in err
    lines = loop.journals(tmp_path)
    assert averages.check_anchors(lines) == ends(tmp_path)[1]["rounds"] == ends(tmp_path)[0]["rounds"]
    [late] = [line for line in lines[1] if "late_after" in line]
    assert late["back_after"] > late["late_after"] + 1
    if "period" in local and not more.get("codec"):
        outer, counts = local.get("outer", False), more.get("counts", False)
        assert averages.check(tmp_path, period=4, outer=outer, counts=counts)["worst"] < EXACT


def test_a_late_worker_that_never_comes_is_given_up(fork, tmp_path) -> None:
    flags = ["--min-np", "1", "--max-np", "3", *ALL_COME_AGAIN, "--give-up-after", "2"]
    plan = {"hang": {"1": 9}, "deadline": {"deadline_s": 0.5}, "sleep_s": 0.02, "local": {"period": 4}}
    run = begin(fork, tmp_path, flags, epochs=10**6, **plan)
    wait_until(lambda: lines_of(tmp_path, 3, "average") >= 3)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 0, err
    assert "worker 1 (slot 1 of localhost) is late" in err
    assert "worker 1 (slot 1 of localhost) has not come back" in err
    assert averages.check(tmp_path, period=4)["worst"] < EXACT


def test_the_deadline_follows_the_waits() -> None:
    deadline = Deadline(None, 5)
    for wait in (1.0, 1.0, 1.2, 0.8):
        deadline.waited(wait)
    assert deadline.limit_s() is None
    deadline.waited(1.0)
    assert deadline.limit_s() == 2.0, "at least a second above the median"
    for wait in (10, 12, 8, 10, 11, 9, 10):
        deadline.waited(wait)
    assert deadline.limit_s() == pytest.approx(8.5 + 5 * 3.0)
    for _ in range(20):
        deadline.waited(10)
    assert deadline.limit_s() == 15, "at least half of the median above it"
    assert Deadline(30, None).limit_s() == 30
    assert Deadline(None, None).limit_s() is None


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"deadline_s": 0}, "deadline_s must be a number above 0, got 0"),
        ({"deadline_mads": "5"}, "deadline_mads must be a number above 0, got '5'"),
        ({"deadline_s": 1, "deadline_mads": 5}, "must not both be given, got 1 and 5"),
        ({"deadline_s": 1}, r"a deadline needs gs.LocalSGD without a topology, .* got GradientAllReduce"),
    ],
)
def test_a_deadline_that_cannot_be_kept_is_refused(settings, error) -> None:
    loader, net, optimizer = parts()
    model = gs.DataParallel(net, optimizer)
    with pytest.raises(gs.ConfigError, match=error):
        gs.elastic(loader, model, optimizer, **settings)
    model.close()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("drop_last", "expected"),
    [
        (False, [[4, 4, 3]] * 3),
        (True, [[4, 4], [4, 4, 4], [4, 4, 4]]),
    ],  # what is dropped is left to the next epoch
)
def test_one_process_alone_draws_all(drop_last, expected) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(11, 2))
    loader = DataLoader(data, 4, drop_last=drop_last, sampler=gs.ElasticSampler(data))
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = gs.DataParallel(net, optimizer, algorithm=gs.LocalSGD(period_s=0.01))
    run = gs.elastic(loader, model, optimizer)
    sizes: list[list[int]] = []
    for epoch in run.epochs(3):
        assert epoch == len(sizes)
        sizes.append([])
        for [rows] in run:
            sizes[-1].append(len(rows))
            optimizer.zero_grad()
            model(rows).sum().backward()
            optimizer.step()
    assert sizes == expected
    model.close()


class Placed(gs.ElasticSampler):
    """The sampler of a rank that is a thread."""

    here = (0, 1)

    def place(self) -> tuple[int, int]:
        return self.here


def uneven(rank: int, size: int, length: int = 100) -> UnevenData:
    sampler = Placed(range(length), shuffle=False)
    sampler.here = rank, size
    data = UnevenData(sampler, 2, drop_last=False)
    data.begin()
    return data


def test_parts_fit_the_speeds_once_they_are_known() -> None:
    def body(comm):
        data = uneven(comm.rank, comm.size)
        first = list(data._sampler)
        data.drew(0, [30, 10][comm.rank])
        data.divide(comm)
        return first, list(data._sampler)

    (fast, fast_next), (slow, slow_next) = run_ranks(2, body)
    assert (len(fast), len(slow)) == (50, 50)
    assert (len(fast_next), len(slow_next)) == (44, 16)
    assert sorted(fast_next + slow_next) == sorted(fast[30:] + slow[10:])


def test_a_rank_that_missed_the_end_of_a_division_takes_it_from_the_others() -> None:
    """Rank 2 dies in a division that rank 0 has ended, and rank 1 has not. Rank 0 has trained on since."""

    def body(comm):
        data = uneven(comm.rank, 3)
        data.drew(0, 4)
        numbers = [[0, 1, place, 4] for place in range(3)]
        data.heard(numbers)
        if comm.rank == 0:
            data._share(0, [*range(4, 34), *range(38, 66), *range(70, 100)], [1.0, 1.0, 1.0])
            data.drew(0, 2)
        data._sampler.here = comm.rank, 2
        data.divide(comm)
        return list(data._sampler), data.numbers()

    (first, numbers), (second, same) = run_ranks(2, body)
    assert numbers[:2] == same[:2] == [0, 3]
    assert not set(first) & set(second)
    assert len(first) + len(second) == 100 - 12 - 2, "what rank 2 drew until the last averaging is in a mean"


def test_what_a_dead_rank_drew_after_the_last_averaging_is_left() -> None:
    def body(comm):
        data = uneven(comm.rank, 3)
        data.drew(0, 6)
        if comm.rank == 0:  # rank 1 has missed the end of the averaging
            data.heard([[0, 1, place, 4] for place in range(3)])
        data._sampler.here = comm.rank, 2
        data.divide(comm)
        return list(data._sampler)

    first, second = run_ranks(2, body)
    assert sorted(first + second) == [*range(6, 34), *range(40, 66), *range(70, 100)]


def test_an_epoch_that_one_rank_leaves_early_is_left_by_all() -> None:
    def body(comm):
        data = uneven(comm.rank, comm.size)
        data.drew(0, 2)
        if comm.rank == 0:
            data.next_epoch(1)
            data.drew(0, 2)
        data.divide(comm)
        return data._sampler.epoch, list(data._sampler), data.is_beyond(0)

    (epoch, first, beyond), (same, second, too) = run_ranks(2, body)
    assert epoch == same == 1
    assert beyond
    assert too
    assert sorted(first + second) == list(range(2, 100))


def test_a_newcomer_has_the_same_division_where_an_epoch_left_samples_to_the_next() -> None:
    def body(comm):
        data = uneven(comm.rank, 3)
        data.last_epoch = 1
        data.drew(0, [33, 30][comm.rank])
        data.heard([[0, 1, 2, 34]])
        data.divide(comm)  # 3 samples, less than a batch for each of 3, are left to the next epoch
        state = data.state_dict()
        newcomer = uneven(2, 3)
        newcomer.load_state_dict(state)
        return [list(each._sampler) for each in (data, newcomer)]

    (first, third), (second, same) = run_ranks(2, body)
    assert third == same
    assert Counter(first + second + third) == Counter([*range(100), 33, 64, 65])


def test_a_checkpoint_of_the_sampler_has_what_is_left() -> None:
    def body(comm):
        data = uneven(comm.rank, comm.size)
        data.drew(0, [30, 10][comm.rank])
        data.divide(comm)
        return data._sampler.state_dict()

    state = run_ranks(2, body)[0]
    sampler = Placed(range(100), shuffle=False)
    sampler.load_state_dict(state)
    assert sampler.indices == [*range(30, 50), *range(60, 100)]
    sampler.record_batch(0, 20)
    assert sampler.state_dict()["processed_num"] == 60
    sampler.reset()
    assert sampler.indices == list(range(60, 100))
    sampler.set_epoch(1)
    assert sampler.indices == list(range(100))
    assert "left" not in sampler.state_dict()
