"""torch.compile around and inside gs.DataParallel trains as the uncompiled model does, and our operations are traced.

Backends that compile nothing but keep all of torch.compile's tracing ("eager", "aot_eager") show what matters here
and cost little. test_mixed_precision.py has the default backend, on a GPU.

Ranks are processes here. Torch 2.11 crashes at times if ranks are threads that compile.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import gossamer as gs
from gossamer import _ops
from gossamer.comm import from_group
from tests.support.jobs import Job
from tests.support.models import batches, flat_weights, mlp, relative_error, seeded, shard
from tests.support.optimizers import assert_same


@pytest.fixture(scope="module")
def job():
    with Job(2) as job, job.within(gs.init, gs.shutdown, backend="gloo"):
        yield job


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train_compiled(order, algorithm, *, compiler, steps=6):
    """Weights after some steps. `order`: what is compiled; None for nothing."""
    torch._dynamo.reset()
    comm, inner = from_group(None), seeded(mlp)
    if algorithm == "qadam":
        optimizer = gs.QAdamOptimizer(inner.parameters(), lr=0.01, warmup_steps=3)
    else:
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    module = torch.compile(inner, backend=compiler) if order == "model" else inner
    wrapped = gs.DataParallel(
        module, optimizer, algorithm=algorithm, process_group=comm, bucket_bytes=500, first_bucket_bytes=100
    )
    called = torch.compile(wrapped, backend=compiler) if order == "wrapper" else wrapped
    for step, batch in enumerate(batches(steps)):
        optimizer.zero_grad()
        if step % 3 == 2:
            with wrapped.no_sync():
                called(shard(batch, comm) + 1).square().mean().backward()
        called(shard(batch, comm)).square().mean().backward()
        optimizer.step()
    wrapped.close()
    return flat_weights(inner)


@pytest.mark.parametrize(
    ("algorithm", "compiler"),
    [("gradient_allreduce", "aot_eager"), ("bytegrad", "eager"), ("qadam", "eager"), ("decentralized", "eager")],
)  # fmt: skip
@pytest.mark.parametrize("order", ["model", "wrapper"])
@pytest.mark.usefixtures("job")
def test_a_compiled_model_trains_as_the_model(order, algorithm, compiler) -> None:
    expected = train_compiled(None, algorithm, compiler=compiler)
    weights = train_compiled(order, algorithm, compiler=compiler)
    assert relative_error(weights, expected) < 1e-6


@pytest.mark.parametrize("order", ["model", "wrapper"])
@pytest.mark.usefixtures("job")
def test_the_model_is_one_graph_that_is_compiled_once_whatever_the_step(order) -> None:
    counter = CompileCounterWithBackend("eager")
    train_compiled(order, "gradient_allreduce", compiler=counter, steps=12)
    modules_of_the_model = 5
    assert (counter.frame_count, counter.op_count) == (1, modules_of_the_model)


class Asking(gs.GradientAllReduce):
    """Notes whether its Python is run, or traced into a graph."""

    def __init__(self) -> None:
        super().__init__()
        self._traced: list[bool] = []

    def before_forward(self, step) -> None:
        self._traced.append(torch.compiler.is_compiling())


@pytest.mark.usefixtures("job")
def test_an_algorithms_own_python_is_not_traced() -> None:
    algorithm = Asking()
    train_compiled("wrapper", algorithm, compiler="eager")
    assert algorithm._traced == [False] * len(algorithm._traced) != []


ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": True, "maximize": False}


def tensors(dtype, *, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.rand(numel, generator=generator, dtype=torch.float64).to(dtype) for numel in (0, 1, 33, 257)
    ]


def arguments_of(operation, dtype):
    """The arguments of adam_step or sgd_step, equal in every call."""
    states = torch.float64 if dtype == torch.float64 else torch.float32
    params, grads = tensors(dtype, seed=0), tensors(dtype, seed=1)
    if operation == "sgd_step":
        return (params, grads, tensors(states, seed=2)), SGD | {"first": False}
    steps = [torch.tensor(3.0) for _ in params]
    moments = tensors(states, seed=2), tensors(states, seed=3)
    return (params, grads, *moments, steps), ADAM | {"decoupled_weight_decay": True}


@pytest.mark.parametrize("operation", ["adam_step", "sgd_step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_an_optimizers_operation_passes_torchs_checks_and_leaves_its_bits_in_compiled_code(operation, dtype):
    native = getattr(torch.ops.gossamer, f"{operation}_").default
    lists, options = arguments_of(operation, dtype)
    ordered = [options[argument.name] for argument in native._schema.arguments[len(lists) :]]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(native, (*lists, *ordered), test_utils=checks)

    def call(*tensors):
        native(*tensors, *ordered)

    call(*lists)
    compiled_lists, _ = arguments_of(operation, dtype)
    torch.compile(call, backend="aot_eager", fullgraph=True)(*compiled_lists)
    for mine, expected in zip(compiled_lists, lists, strict=True):
        assert all(map(torch.equal, mine, expected))


@pytest.mark.parametrize(("name", "options"), [("SGD", {"momentum": 0.9}), ("AdamW", {})])
def test_a_compiled_optimizer_step_leaves_the_bits_of_the_plain_one(name, options) -> None:
    ends = []
    for compiled in (False, True):
        params = [torch.nn.Parameter(values) for values in tensors(torch.float32, seed=0)]
        optimizer = getattr(gs.optim, name)(params, lr=0.1, **options)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for seed in range(3):
            for param, gradient in zip(params, tensors(torch.float32, seed=seed + 1), strict=True):
                param.grad = gradient
            step()
        ends.append((params, optimizer))
    assert_same(*ends)


@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_moves_to_and_from_flat_memory_pass_torchs_checks_and_leave_their_bits_in_compiled_code(operation):
    def both():
        parts = tensors(torch.float32, seed=0)
        return parts, torch.cat(tensors(torch.float32, seed=1))

    native = getattr(torch.ops.gossamer, f"{operation}_").default
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(native, (*both(), 0.5), test_utils=checks)
    call = getattr(_ops, operation)
    (parts, flat), (compiled_parts, compiled_flat) = both(), both()
    call(parts, flat, scale=0.5)
    torch.compile(call, backend="aot_eager", fullgraph=True)(compiled_parts, compiled_flat, scale=0.5)
    assert torch.equal(compiled_flat, flat)
    assert all(map(torch.equal, compiled_parts, parts))
    start, values = both()
    expected = (torch.cat(start), flat) if operation == "gather" else (values, torch.cat(parts))
    assert torch.equal(expected[1], 0.5 * expected[0])


@pytest.mark.parametrize(
    ("parts", "flat", "message"),
    [
        (
            [torch.ones(2, 3).t()],
            torch.ones(6),
            "gather: tensors must be contiguous Float on cpu, as flat is",
        ),
        ([torch.ones(3).double()], torch.ones(3), "got Double [3]"),
        ([torch.ones(3)], torch.ones(6), "flat must hold as many elements as the tensors, 3, got 6"),
        ([torch.ones(6)], torch.ones(2, 3), "flat must be a contiguous vector, got [2, 3]"),
    ],
)
def test_tensors_that_do_not_fit_into_flat_memory_are_refused_with_their_values(parts, flat, message) -> None:
    with pytest.raises(gs.ConfigError) as caught:
        _ops.gather(parts, flat)
    assert message in str(caught.value)
