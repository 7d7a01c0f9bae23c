"""Many calls at once: several groups a rank, from one thread and from several, mixed and in flight together.

The soak draws its calls from a seed, and a failure names the call's key: random_call(group, key) repeats it.
"""

import random
import threading

import pytest
import torch
import torch.distributed as dist

from tests.backend.jobs import TESTED, make_group, random_call, run_group, values
from tests.support.ranks import run_threads

SEEDS = [1, 2, 3]


def finish(call) -> None:
    works, check = call
    for work in works:
        work.wait()
    check()


def test_a_hundred_calls_in_flight_are_waited_for_in_any_order():
    def body(group):
        calls = [random_call(group, key) for key in range(100)]
        random.Random(group.rank()).shuffle(calls)
        for call in calls:
            finish(call)

    run_group(3, body)


def test_calls_on_one_group_run_in_the_order_given_even_on_one_tensor():
    """Each uses the result of the one before, and none is waited for."""
    if TESTED == "gloo":
        pytest.skip("Gloo runs calls in flight on two threads")

    def body(group):
        tensor = values(group.rank(), (20_000,)).double()
        gathered = torch.empty(60_000, dtype=torch.float64)
        works = []
        for _ in range(10):
            works.append(group.allreduce([tensor]))
            works.append(group._allgather_base(gathered, tensor))
        for work in works:
            work.wait()
        return gathered

    want = sum(values(rank, (20_000,)).double() for rank in range(3)) * 3.0**9
    for gathered in run_group(3, body):
        assert torch.equal(gathered, want.repeat(3))


def test_every_group_of_a_rank_may_have_its_own_thread():
    """Four groups of three ranks, twelve threads, no order between groups."""
    store = dist.HashStore()
    start = threading.Barrier(12)

    def body(thread: int) -> None:
        number, rank = divmod(thread, 3)
        group = make_group(TESTED, dist.PrefixStore(f"group{number}", store), rank, 3)
        start.wait(30)
        for key in range(60):
            finish(random_call(group, 1000 * number + key))

    run_threads(12, body)


def test_two_threads_of_a_rank_may_use_one_group_for_messages_with_their_own_tags():
    def body(group):
        rank = group.rank()

        def talk(thread: int) -> list[float]:
            got = []
            for i in range(50):
                output = torch.empty(1000)
                works = [
                    group.recv([output], 1 - rank, thread),
                    group.send([torch.full((1000,), float(i))], 1 - rank, thread),
                ]
                for work in works:
                    work.wait()
                got.append(output.unique().tolist())
            return got

        return run_threads(3, talk)

    for threads in run_group(2, body):
        assert threads == [[[float(i)] for i in range(50)]] * 3


def test_groups_in_flight_together_may_be_waited_for_in_another_order_on_every_rank():
    """All ranks begin their calls in one order, then wait for the groups in their own."""
    groups = 5
    store = dist.HashStore()

    def body(rank: int) -> None:
        mine = [make_group(TESTED, dist.PrefixStore(str(i), store), rank, 3) for i in range(groups)]
        for round_number in range(20):
            calls = [
                random_call(group, 50 * round_number + i, largest=60_000) for i, group in enumerate(mine)
            ]
            random.Random(100 * round_number + rank).shuffle(calls)
            for call in calls:
                finish(call)

    run_threads(3, body)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", SEEDS)
def test_soak_of_thousands_of_random_calls_over_random_groups(seed):
    """1,200 calls a seed, each made by two to four ranks; up to twenty in flight on a rank."""
    draw = random.Random(seed)
    ranks = 4
    members = [sorted(draw.sample(range(ranks), draw.choice([1, 2, 3, 4]))) for _ in range(7)] + [
        list(range(ranks))
    ]
    plan = [(draw.randrange(len(members)), 10_000 * seed + step) for step in range(1200)]
    store = dist.HashStore()

    def body(rank: int) -> int:
        groups = {
            i: make_group(TESTED, dist.PrefixStore(f"{seed}-{i}", store), of.index(rank), len(of))
            for i, of in enumerate(members)
            if rank in of
        }
        own = random.Random(1000 * seed + rank)  # which calls this rank waits for, and when
        pending = []
        done = 0
        for group, key in plan:
            if group not in groups:
                continue
            pending.append(random_call(groups[group], key))
            while len(pending) > 20 or (pending and own.random() < 0.4):
                finish(pending.pop(own.randrange(len(pending))))
                done += 1
        for call in pending:
            finish(call)
        return done + len(pending)

    try:
        counts = run_threads(ranks, body, timeout_s=100)
    except BaseException as error:
        raise AssertionError(f"seed {seed}, groups {members}: {error}") from error
    assert counts == [sum(rank in members[group] for group, _ in plan) for rank in range(ranks)]
