"""Gradients of the collectives, as Horovod defines them, against plain formulas; in the job of conftest.py."""

import pytest
import torch

import gossamer.horovod.torch as hvd
from tests.horovod.sets import mine, same, values

pytestmark = pytest.mark.usefixtures("job")


def weights(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return values(rank, shape, torch.float64, salt=7)


def leaf(rank: int, shape: tuple[int, ...] = (6, 2)) -> torch.Tensor:
    return values(rank, shape, torch.float64).requires_grad_()


def test_gradient_of_allreduce_is_reduced_in_the_same_way() -> None:
    for process_set, rank, size in mine():
        upstream = [weights(peer, (6, 2)) for peer in range(size)]
        total = sum(upstream[1:], upstream[0])
        for op, want in (
            (hvd.Sum, total),
            (hvd.Average, total * (1 / size)),
            (hvd.Max, torch.stack(upstream).amax(0)),
        ):
            for name in (None, "named"):
                x = leaf(rank)
                hvd.allreduce(x, op=op, name=name, process_set=process_set).backward(upstream[rank])
                torch.testing.assert_close(x.grad, want)
        x = leaf(rank)
        y = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0, process_set=process_set)
        y.backward(upstream[rank])
        same(x.grad, total * 1.5, "factors")


def test_gradient_of_grouped_allreduce() -> None:
    for process_set, rank, size in mine():
        x, y = leaf(rank), leaf(rank, (3,))
        out = hvd.grouped_allreduce([x, y], op=hvd.Sum, process_set=process_set)
        (out[0].sum() * (rank + 1) + out[1].sum() * 2).backward()
        same(x.grad, torch.full((6, 2), size * (size + 1) / 2, dtype=torch.float64), "first")
        same(y.grad, torch.full((3,), 2.0 * size, dtype=torch.float64), "second")


def test_gradient_of_allgather_is_the_average_of_the_own_rows() -> None:
    for process_set, rank, size in mine():
        rows = [peer + 1 for peer in range(size)]
        upstream = [weights(peer, (sum(rows), 2)) for peer in range(size)]
        mean = sum(upstream[1:], upstream[0]) * (1 / size)
        x = leaf(rank, (rows[rank], 2))
        hvd.allgather(x, process_set=process_set).backward(upstream[rank])
        torch.testing.assert_close(x.grad, mean.split(rows)[rank])
        first, second = leaf(rank, (rows[rank], 2)), leaf(rank, (rows[rank], 2))
        pair = hvd.grouped_allgather([first, second], name="pair", process_set=process_set)
        (pair[0] * upstream[rank] + 2 * pair[1] * upstream[rank]).sum().backward()
        torch.testing.assert_close(first.grad, mean.split(rows)[rank])
        torch.testing.assert_close(second.grad, 2 * mean.split(rows)[rank])


def test_gradient_of_broadcast_goes_to_the_root() -> None:
    for process_set, rank, size in mine():
        upstream = [weights(peer, (6, 2)) for peer in range(size)]
        mean = sum(upstream[1:], upstream[0]) * (1 / size)
        for index, root in enumerate(process_set.ranks):
            x = leaf(rank)
            hvd.broadcast(x, root, process_set=process_set).backward(upstream[rank])
            torch.testing.assert_close(x.grad, mean if index == rank else mean * 0)


def test_gradient_of_alltoall_goes_back_to_where_rows_came_from() -> None:
    for process_set, rank, size in mine():
        splits = [(rank + to) % 3 for to in range(size)]
        x = leaf(rank, (sum(splits) + 1, 2))
        y, rows = hvd.alltoall(x, splits, process_set=process_set)
        assert not rows.requires_grad
        (y * (rank + 1)).sum().backward()
        want = torch.cat(
            [torch.full((count, 2), to + 1.0) for to, count in enumerate([*splits])] + [torch.zeros(1, 2)]
        )
        same(x.grad, want.double(), "with splits")
        x = leaf(rank, (size, 2))
        (hvd.alltoall(x, process_set=process_set) * (rank + 1)).sum().backward()
        same(
            x.grad, torch.arange(1.0, size + 1, dtype=torch.float64).repeat(2, 1).t().contiguous(), "without"
        )


def test_gradient_of_reducescatter_is_gathered() -> None:
    for process_set, rank, size in mine():
        upstream = [weights(peer, (5, 2)) for peer in range(size)]
        whole = torch.cat([upstream[peer].tensor_split(size)[peer] for peer in range(size)])
        own = upstream[rank].tensor_split(size)[rank]
        for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
            x = leaf(rank, (5, 2))
            given = own.clone()
            hvd.reducescatter(x, op=op, prescale_factor=2.0, process_set=process_set).backward(given)
            same(x.grad, whole * (2 * factor), op)
            same(given, own, "the gradient that was given stays")
            x, y = leaf(rank, (5, 2)), leaf(rank, (5, 2))
            parts = hvd.grouped_reducescatter([x, y], op=op, process_set=process_set)
            (parts[0] * own + parts[1] * own * 3).sum().backward()
            same(x.grad, whole * factor, op)
            same(y.grad, whole * (3 * factor), op)


def test_gradient_of_a_gradient_too() -> None:
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad((hvd.allreduce(x, op=hvd.Sum) ** 2).sum(), x, create_graph=True)
    assert first.tolist() == [2 * 4 * 4 * 2, 2 * 4 * 4 * 3]
    first.sum().backward()
    assert x.grad.tolist() == [32 * 4 / 4, 32 * 4 / 4]


def test_nothing_needs_a_gradient_without_autograd() -> None:
    x = leaf(0)
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(x)).requires_grad
    with pytest.raises(RuntimeError):
        hvd.allgather(x.detach()).sum().backward()
    hvd.allreduce_(x)  # a leaf, in place, as broadcast_parameters does it
    assert x.requires_grad
    assert x.grad is None
