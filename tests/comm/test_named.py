# The named operations of csrc/named/: their results, over every carrier of the data and of the negotiation. The
# negotiation itself has C++ tests; the face that users see has tests/horovod/.

import random
import threading
import time

import pytest
import torch

import gossamer as gs
from tests.comm.named import PLACES, result, run_named

EVERY_DTYPE = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
REDUCIBLE = [dtype for dtype in EVERY_DTYPE if "float8" not in str(dtype)]
every_place = pytest.mark.parametrize(("data", "control"), PLACES)


def numbers(rank, shape, dtype):
    """Small numbers, different on every rank, that every dtype holds."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def as_sums(tensor):
    """The tensor in a type that torch can add; bool stays bool."""
    kind = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor if tensor.dtype == torch.bool else tensor.to(kind)


@every_place
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_operation_and_dtype_gives_what_its_definition_says(size, data, control) -> None:
    def body(named):
        rank = named.rank
        for dtype in EVERY_DTYPE:
            inputs = [numbers(peer, (peer + 2, 3), dtype) for peer in range(size)]
            gathered = result(named, "allgather", inputs[rank], "gather")
            assert torch.equal(gathered.view(torch.uint8), torch.cat(inputs).view(torch.uint8)), dtype
            root = size - 1
            alike = [numbers(peer, (7,), dtype) for peer in range(size)]
            sent = result(named, "broadcast", alike[rank], "broadcast", root=root)
            assert torch.equal(sent.view(torch.uint8), alike[root].view(torch.uint8)), dtype
            splits = [[(a + b) % 3 for b in range(size)] for a in range(size)]
            rows = [numbers(peer, (sum(splits[peer]), 2), dtype) for peer in range(size)]
            (swap,) = named.submit("alltoall", [rows[rank]], names=["swap"], splits=splits[rank])
            swap.wait()
            parts = [rows[peer].split(splits[peer])[rank] for peer in range(size)]
            assert torch.equal(swap.output.view(torch.uint8), torch.cat(parts).view(torch.uint8)), dtype
            assert swap.received_splits == [splits[peer][rank] for peer in range(size)]
        for dtype in REDUCIBLE:
            inputs = [numbers(peer, (7, 3), dtype) for peer in range(size)]
            stacked = torch.stack([as_sums(tensor) for tensor in inputs])
            total = stacked.any(0) if dtype == torch.bool else stacked.sum(0)
            assert torch.equal(as_sums(result(named, "allreduce", inputs[rank], "sum")), total), dtype
            mine = total.split([7 // size + (peer < 7 % size) for peer in range(size)])[rank]
            assert torch.equal(as_sums(result(named, "reducescatter", inputs[rank], "part")), mine), dtype
            if dtype == torch.bool or dtype.is_complex:
                continue
            product = as_sums(result(named, "allreduce", inputs[rank], "product", op=5))
            assert torch.equal(product, stacked.prod(0)), dtype
            if dtype == torch.uint64:
                continue
            assert torch.equal(
                as_sums(result(named, "allreduce", inputs[rank], "min", op=3)), stacked.amin(0)
            )
            assert torch.equal(
                as_sums(result(named, "allreduce", inputs[rank], "max", op=4)), stacked.amax(0)
            )

    run_named(size, body, data=data, control=control)


@every_place
def test_ranks_may_submit_in_any_order(data, control) -> None:
    size, count = 3, 400

    def body(named):
        order = random.Random(named.rank)
        names = list(range(count))
        for _ in range(3):  # the second time they are cached
            order.shuffle(names)
            open_operations = {
                number: named.submit(
                    "allreduce",
                    [torch.full((number % 7 + 1,), float(named.rank + number))],
                    names=[f"x{number}"],
                )[0]
                for number in names
            }
            for number, operation in open_operations.items():
                operation.wait()
                assert operation.output.tolist() == [size * number + 3.0] * (number % 7 + 1)
        return named.statistics()

    for counted in run_named(size, body, data=data, control=control):
        assert counted["submitted"] == 3 * count
        assert counted["cached"] >= 2 * count - 10
        assert counted["batches"] < 3 * count / 2  # bursts were fused


@pytest.mark.parametrize("packed", [False, True])
def test_factors_round_as_horovods_do(packed) -> None:
    """One factor before the sum and one after it, each rounded to the type; integers in float64, truncated."""
    before, after, size = 0.3, 0.7, 2
    kinds = [torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    values = {dtype: [torch.arange(-5, 6).mul(rank + 3).to(dtype) for rank in range(size)] for dtype in kinds}

    def scaled(tensor, factor):
        if tensor.is_floating_point():
            wide = tensor.double() if tensor.dtype == torch.float64 else tensor.float()
            return (wide * torch.tensor(factor, dtype=wide.dtype)).to(tensor.dtype)
        return (tensor.double() * factor).trunc().to(tensor.dtype)

    def body(named):
        for dtype in kinds:
            mine = values[dtype][named.rank]
            tensors = [mine, mine.clone()] if packed else [mine]
            names = [f"{dtype}{number}" for number in range(len(tensors))]
            operations = named.submit(
                "allreduce", tensors, names=names, op=0, prescale=before, postscale=after, group=""
            )
            total = scaled(values[dtype][0], before) + scaled(values[dtype][1], before)
            for operation in operations:
                operation.wait()
                assert torch.equal(operation.output, scaled(total, after / size)), dtype

    run_named(size, body)


@every_place
def test_strided_tensors_keep_their_strides_and_empty_ones_work(data, control) -> None:
    def body(named):
        image = torch.full((2, 3, 4, 5), float(named.rank)).to(memory_format=torch.channels_last)
        out = result(named, "allreduce", image, "image")
        assert out.stride() == image.stride()
        assert torch.equal(out, torch.ones(2, 3, 4, 5))
        result(named, "allreduce", image, "image", in_place=True)
        assert torch.equal(image, torch.ones(2, 3, 4, 5))
        columns = torch.arange(6.0).view(2, 3)
        result(named, "broadcast", columns[:, 1], "column", in_place=True)
        assert result(named, "allreduce", torch.zeros(0, 3), "none").shape == (0, 3)
        assert result(named, "allgather", torch.zeros(0, 3), "none").shape == (0, 3)
        assert result(named, "allreduce", torch.tensor(2.0), "scalar").item() == 4.0

    run_named(2, body, data=data, control=control)


@every_place
def test_a_mismatch_is_an_error_on_all_ranks_and_the_next_operation_works(data, control) -> None:
    def body(named):
        for kind, tensor in (
            ("allreduce", torch.ones(3 + named.rank)),
            ("allreduce", torch.ones(3, dtype=[torch.float32, torch.float64][named.rank])),
            ("allgather", torch.ones(3, 2 + named.rank)),
        ):
            with pytest.raises(gs.ConfigError, match=r"on rank 0 .*and .* on rank 1"):
                result(named, kind, tensor, "uneven", call_site=f"train.py:{named.rank}")
            assert result(named, "allreduce", torch.ones(2), "after").tolist() == [2.0, 2.0]

    run_named(2, body, data=data, control=control)


def test_a_name_is_refused_until_this_rank_has_waited_however_fast_the_first_was() -> None:
    def body(named):
        first = named.submit("allreduce", [torch.ones(2)], names=["x"], call_site="a.py:1")[0]
        named.submit("allreduce", [torch.ones(2)], names=["y"])
        time.sleep(0.3)  # both have been complete for long
        with pytest.raises(
            gs.ConfigError, match=r"twice without a wait in between, got b.py:2 and before that a.py:1"
        ):
            named.submit("allreduce", [torch.ones(2)], names=["x"], call_site="b.py:2")
        assert first.done()
        for name in ("x", "y"):
            assert result(named, "allreduce", torch.ones(2), name).tolist() == [2.0, 2.0]

    run_named(2, body)


def test_what_one_rank_alone_gets_wrong_fails_on_the_others_too() -> None:
    def body(named):
        bad = torch.ones(2).to(torch.float8_e4m3fn) if named.rank == 1 else torch.ones(2)
        with pytest.raises(gs.ConfigError, match="float8_e4m3fn cannot be reduced"):
            result(named, "allreduce", bad, "bad")
        twice = torch.ones(2)
        if named.rank == 0:
            first = named.submit("allreduce", [twice], names=["twice"])
            with pytest.raises(gs.ConfigError, match=r"twice.*must not be submitted again"):
                named.submit("allreduce", [twice], names=["twice"])
            named.barrier().wait()
        else:
            named.barrier().wait()
            first = named.submit("allreduce", [twice], names=["twice"])
        first[0].wait()
        assert first[0].output.tolist() == [2.0, 2.0]

    run_named(2, body)


def test_a_rank_that_has_joined_takes_part_with_zeros() -> None:
    def body(named):
        if named.rank < 2:
            both = result(named, "allreduce", torch.ones(3), "sum")
            assert both.tolist() == [2.0] * 3
            assert result(named, "allreduce", torch.full((3,), 3.0), "mean", op=0).tolist() == [2.0] * 3
        if named.rank == 1:
            time.sleep(0.1)
        last = named.join()
        last.wait()
        return last.value

    assert run_named(3, body) == [1, 1, 1]


@every_place
def test_a_refused_join_fails_on_every_rank_and_leaves_nobody_joined(data, control) -> None:
    def body(named):
        if named.rank == 1:
            refused = named.refuse_join("no such place", "train.py:3")
        else:
            assert result(named, "allreduce", torch.ones(3), "sum").tolist() == [2.0] * 3
            refused = named.join()
        with pytest.raises(gs.ConfigError, match=r"was refused by rank 1 \(train.py:3\): no such place"):
            refused.wait()
        assert result(named, "allgather", torch.ones(1), "all").tolist() == [1.0] * 3
        named.join().wait()

    run_named(3, body, data=data, control=control)


@every_place
def test_shutting_down_on_one_rank_fails_what_waits_on_the_others(data, control) -> None:
    def body(named):
        if named.rank == 1:
            time.sleep(0.1)
            named.shutdown()
            return
        with pytest.raises(gs.CommError, match="rank 1 has shut down"):
            result(named, "allreduce", torch.ones(3), "alone")
        with pytest.raises(gs.CommError, match="rank 1 has shut down"):
            named.submit("allreduce", [torch.ones(3)], names=["later"])

    run_named(2, body, data=data, control=control)


def test_what_waits_too_long_is_reported_with_the_ranks_that_are_missing() -> None:
    reports = []
    reported = threading.Event()

    def on_stall(stalled):
        reports.extend((one.name, one.submitted, one.missing, one.call_site) for one in stalled)
        reported.set()

    def body(named):
        if named.rank != 1:
            waiting = named.submit("allreduce", [torch.ones(3)], names=["slow"], call_site="train.py:7")
        assert reported.wait(20)
        if named.rank == 1:
            waiting = named.submit("allreduce", [torch.ones(3)], names=["slow"])
        waiting[0].wait()

    run_named(3, body, stall_warning_s=0.2, on_stall=on_stall)
    assert reports[0] == ("slow", [0, 2], [1], "train.py:7")


def test_events_tell_the_way_of_an_operation() -> None:
    events = []

    def body(named):
        result(named, "allreduce", torch.ones(3), "watched")

    run_named(
        2, body, on_event=lambda phase, name, rank, seconds: events.append((phase, name, rank, seconds))
    )
    phases = [phase for phase, name, _, _ in events if name == "watched"]
    assert phases.count("submitted") == 2
    assert phases.count("rank_ready") == 2
    assert phases.count("executing") == 2
    assert phases.count("done") == 2
    assert all(seconds > 0 for *_, seconds in events)
