# Adasum as a collective, alone and as a named operation: ranks as threads on both backends, against the same tree of
# pairs in float64 NumPy. The arithmetic of one pair has tests of its own in tests/cpp/test_adasum.cpp.

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gossamer as gs
from gossamer import _C
from gossamer.comm import from_backend
from tests.comm.named import run_named
from tests.support.ranks import make_backend, run_threads

SIZES = (1, 2, 3, 4, 5, 8)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LENGTHS = (1, 0, 7, 100, 3, 0, 533)

pytestmark = pytest.mark.usefixtures("backend")


def run_adasum(
    inputs: Sequence[torch.Tensor], lengths: Sequence[int], *, torch_ops: bool = False
) -> list[torch.Tensor]:
    """Rank r gives inputs[r]; returns the result of each rank."""
    return run_each([inputs], lengths, torch_ops=torch_ops)[0]


def run_each(
    cases: Sequence[Sequence[torch.Tensor]], lengths: Sequence[int], *, torch_ops: bool = False
) -> list[list[torch.Tensor]]:
    """The same of several inputs of the same ranks, one after the other on one communicator."""

    def body(comm, rank: int) -> list[torch.Tensor]:
        return [adasum(comm, inputs[rank], lengths, torch_ops=torch_ops) for inputs in cases]

    results = on_ranks(len(cases[0]), body, device=cases[0][0].device)
    return [list(case) for case in zip(*results, strict=True)]


def on_ranks(
    size: int,
    body: Callable,
    *,
    device: torch.device | str = "cpu",
    timeout_s: float = 30,
    errors: bool = False,
) -> list:
    store = dist.HashStore()
    kept = []  # communicators; they end their backends without the GIL when all ranks are done

    def rank_body(rank: int):
        backend = make_backend(store, rank, size, timeout_s)
        comm = from_backend(backend, device=device, store=store, name="adasum")
        kept.append(comm)
        return body(comm, rank)

    return run_threads(size, rank_body, errors=errors)


def adasum(comm, x: torch.Tensor, lengths: Sequence[int], *, torch_ops: bool = False) -> torch.Tensor:
    x = x.clone()
    _C.adasum(comm, x, list(lengths), torch_ops=torch_ops)
    return x


def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot, aa, bb = a @ b, a @ a, b @ b
    factors = [1.0 if norm < 2.0**-511 else 1.0 - dot / (2 * norm) for norm in (aa, bb)]
    return factors[0] * a + factors[1] * b


def expected(inputs: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """The tree of adasum.h; values that a rank stores between two pairs are rounded to the dtype."""
    dtype = inputs[0].dtype

    def combined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = zip(a.double().split(list(lengths)), b.double().split(list(lengths)), strict=True)
        return torch.cat([torch.from_numpy(pair(x.numpy(), y.numpy())) for x, y in parts]).to(dtype)

    left = list(inputs)
    power = 1 << (len(left).bit_length() - 1)
    for extra in range(len(left) - power):
        left[extra] = combined(left[extra], left[power + extra])
    left = left[:power]
    while len(left) > 1:
        left = [combined(left[i], left[i + 1]) for i in range(0, len(left), 2)]
    return left[0]


def random_inputs(
    size: int, dtype: torch.dtype, lengths: Sequence[int] = LENGTHS, seed: int = 0
) -> list[torch.Tensor]:
    """Inputs with a common part, so that the products are far from zero."""
    random = torch.Generator().manual_seed(seed + 100 * size)
    shared = torch.randn(sum(lengths), generator=random)
    return [(shared + torch.randn(sum(lengths), generator=random)).to(dtype) for _ in range(size)]


def bits(x: torch.Tensor) -> bytes:
    return x.view(torch.uint8).numpy().tobytes()


def assert_equal_bits(results: Sequence[torch.Tensor]) -> None:
    for rank, result in enumerate(results):
        assert bits(result) == bits(results[0]), f"rank {rank} has other bits than rank 0"


@pytest.mark.parametrize("torch_ops", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_the_tree_of_pairs_in_equal_bits(size, torch_ops) -> None:
    cases = [random_inputs(size, dtype) for dtype in DTYPES]
    outputs = run_each(cases, LENGTHS, torch_ops=torch_ops)
    for dtype, inputs, results in zip(DTYPES, cases, outputs, strict=True):
        assert_equal_bits(results)
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(results[0], expected(inputs, LENGTHS), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", SIZES)
def test_orthogonal_vectors_are_added(size) -> None:
    vectors = [random_inputs(1, dtype, (101,))[0] for dtype in DTYPES]
    owners = torch.arange(101) % size
    cases = [[torch.where(owners == rank, whole, 0) for rank in range(size)] for whole in vectors]
    for whole, results in zip(vectors, run_each(cases, [101]), strict=True):
        for result in results:
            assert torch.equal(result, whole)


@pytest.mark.parametrize("size", SIZES)
def test_equal_vectors_are_their_own_mean(size) -> None:
    vectors = [random_inputs(1, dtype)[0] for dtype in DTYPES]
    for x, results in zip(vectors, run_each([[x] * size for x in vectors], LENGTHS), strict=True):
        for result in results:
            assert torch.equal(result, x)


@pytest.mark.parametrize("size", SIZES[1:])
def test_ranks_that_give_zeros_change_nothing(size) -> None:
    cases, rights = [], []
    for dtype in DTYPES:
        x, y = random_inputs(2, dtype)
        zeros = torch.zeros_like(x)
        cases += [[x if rank == one else zeros for rank in range(size)] for one in range(size)]
        rights += [x] * size
        cases.append([x, *[zeros] * (size - 2), y])
        rights.append(expected([x, y], LENGTHS))
    for number, (right, results) in enumerate(zip(rights, run_each(cases, LENGTHS), strict=True)):
        tolerance = 2 * torch.finfo(right.dtype).eps
        for result in results:
            if number % (size + 1) < size:
                assert torch.equal(result, right)
            else:
                torch.testing.assert_close(result, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("torch_ops", [False, True])
@pytest.mark.parametrize("size", [2, 5])
def test_a_vector_does_not_see_its_neighbours_in_the_buffer(size, torch_ops) -> None:
    first, last = LENGTHS[0], sum(LENGTHS[:-1])  # where the first vector ends and the last begins
    inputs = random_inputs(size, torch.float32)
    alone = run_adasum(inputs, LENGTHS, torch_ops=torch_ops)[0]
    inputs[size - 1][first:last] = float("nan")
    inputs[0][first:last] *= 1e30
    results = run_adasum(inputs, LENGTHS, torch_ops=torch_ops)
    assert_equal_bits(results)
    assert torch.equal(results[0][:first], alone[:first])
    assert torch.equal(results[0][last:], alone[last:])
    assert results[0][first:last].isnan().all()


def test_a_buffer_of_fewer_elements_than_ranks_is_combined_too() -> None:
    for lengths in ([], [0, 0], [1], [1, 0, 1, 1]):
        inputs = random_inputs(8, torch.float64, lengths)
        results = run_adasum(inputs, lengths)
        assert_equal_bits(results)
        if sum(lengths) > 0:
            torch.testing.assert_close(results[0], expected(inputs, lengths))


def test_long_vectors_agree_with_the_oracle() -> None:
    lengths = (300_001, 5, 99_999)  # more than one strip of torch's sums
    inputs = random_inputs(3, torch.float32, lengths)
    for torch_ops in (False, True):
        results = run_adasum(inputs, lengths, torch_ops=torch_ops)
        assert_equal_bits(results)
        torch.testing.assert_close(results[0], expected(inputs, lengths), rtol=1e-6, atol=1e-6)


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    def body(comm, rank):
        def refused(text: str, x: torch.Tensor, lengths: list[int]) -> None:
            with pytest.raises(gs.ConfigError, match=text):
                _C.adasum(comm, x, lengths)

        refused("dtype must be float16, bfloat16, float32 or float64, got Int", torch.ones(3).int(), [3])
        refused(r"contiguous, of one dimension.*got shape \[2, 2\] on cpu", torch.ones(2, 2), [4])
        refused("contiguous, of one dimension", torch.ones(8)[::2], [4])
        refused("lengths must add up to the tensor's 4 elements, got 3", torch.ones(4), [3])
        refused("must not be negative, got -1", torch.ones(3), [4, -1])
        return adasum(comm, torch.ones(4), [4])  # the group still works

    for result in on_ranks(2, body):
        assert torch.equal(result, torch.ones(4))


def test_a_rank_that_does_not_come_is_an_error_of_communication() -> None:
    def body(comm, rank):
        if rank == 0:
            with pytest.raises(gs.CommError):
                adasum(comm, torch.ones(4), [4])

    on_ranks(2, body, timeout_s=1)


@pytest.mark.parametrize("group", [None, ""])
def test_named_operations_take_adasum_for_each_tensor_of_a_burst(backend, group) -> None:
    inputs = random_inputs(3, torch.float32)
    oracle = expected(inputs, LENGTHS).split(list(LENGTHS))

    def body(named):
        tensors = list(inputs[named.rank].split(list(LENGTHS)))
        names = [f"g{i}" for i in range(len(tensors))]
        for _ in range(2):  # the second comes from the cache
            operations = named.submit("allreduce", tensors, names=names, op=2, group=group)
            for operation, right in zip(operations, oracle, strict=True):
                operation.wait()
                torch.testing.assert_close(operation.output, right, rtol=1e-6, atol=1e-6)

    run_named(3, body, data=backend)


def test_a_rank_that_has_joined_takes_part_in_adasum_with_zeros(backend) -> None:
    x, y = random_inputs(2, torch.float32)

    def body(named):
        if named.rank == 1:
            joined = named.join()
            joined.wait()
            return None
        (operation,) = named.submit("allreduce", [(x, None, y)[named.rank]], names=["x"], op=2)
        operation.wait()
        named.join().wait()
        return operation.output

    results = run_named(3, body, data=backend)
    right = expected([x, y], [x.numel()])
    torch.testing.assert_close(results[0], right, rtol=1e-6, atol=1e-6)
    assert bits(results[2]) == bits(results[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_tensors_are_combined_on_their_device() -> None:
    for size in (
        2,
        5,
    ):  # of one GPU, so that messages pass through host memory: NCCL refuses duplicate devices
        for dtype in DTYPES:
            inputs = random_inputs(size, dtype, (300_001, 0, 5))
            results = [x.cpu() for x in run_adasum([x.cuda() for x in inputs], (300_001, 0, 5))]
            assert_equal_bits(results)
            # The device sums dot products of 300,001 elements in an order of its own.
            tolerance = 32 * torch.finfo(dtype).eps
            torch.testing.assert_close(
                results[0], expected(inputs, (300_001, 0, 5)), rtol=tolerance, atol=tolerance
            )
