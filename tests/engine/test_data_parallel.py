"""gs.DataParallel as a module: state_dict, broadcasting, closing, and real process groups."""

import copy
import gc
import os
import pickle
import weakref

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.models import batches, flat_grads, mlp, seeded, shard, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("backend")


def alone(body):
    return run_ranks(1, body)[0]


def test_state_dict_is_the_wrapped_models_own_and_loads_both_ways():
    def body(comm):
        bare, other = seeded(mlp, 1), seeded(mlp, 2)
        wrapped = gs.DataParallel(bare, process_group=comm)
        assert list(wrapped.state_dict()) == list(bare.state_dict())
        wrapped.load_state_dict(other.state_dict())
        assert torch.equal(bare[0].weight, other[0].weight)
        seeded(mlp, 3).load_state_dict(wrapped.state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            wrapped.load_state_dict({"0.weight": other[0].weight})

    alone(body)


def test_state_dict_has_no_module_prefix_inside_a_larger_model():
    def body(comm):
        wrapped = gs.DataParallel(seeded(mlp), process_group=comm)
        outer = nn.ModuleDict({"net": wrapped, "head": nn.Linear(2, 2)})
        bare = nn.ModuleDict({"net": seeded(mlp, 5), "head": nn.Linear(2, 2)})
        assert sorted(outer.state_dict()) == sorted(bare.state_dict())
        outer.load_state_dict(bare.state_dict())
        assert torch.equal(outer["net"].module[0].weight, bare["net"][0].weight)

    alone(body)


class EveryDtype(nn.Module):
    DTYPES = (
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
    )

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.train_me = nn.Parameter(torch.full((3,), float(rank)))
        self.frozen = nn.Parameter(
            torch.full((3, 5), float(rank), dtype=torch.bfloat16).t(), requires_grad=False
        )
        for dtype in self.DTYPES:
            self.register_buffer(str(dtype).replace(".", "_"), torch.full((5,), rank).to(dtype))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("scalar", torch.tensor(rank), persistent=False)
        self.register_buffer("absent", None)
        self.register_buffer("large", torch.full((9 << 20,), float(rank)))  # more than one batch of 32 MiB


def test_parameters_and_buffers_of_every_dtype_come_from_rank_0_frozen_ones_too():
    def body(comm):
        model = EveryDtype(rank=comm.rank + 1)
        gs.DataParallel(model, process_group=comm)
        return [
            tensor.to(torch.complex128).mean()
            for tensor in [*model.parameters(), *model.buffers()]
            if tensor.numel()
        ]

    for means in run_ranks(3, body):
        assert all(mean == 1 for mean in means)


def test_broadcast_false_leaves_ranks_as_they_are():
    def body(comm):
        model = EveryDtype(rank=comm.rank)
        gs.DataParallel(model, process_group=comm, broadcast=False)
        return model.train_me[0].item(), model.frozen[0, 0].item(), model.scalar.item()

    assert run_ranks(2, body) == [(0, 0, 0), (1, 1, 1)]


def test_close_gives_the_model_back_and_frees_the_engine():
    def body(comm):
        model = seeded(mlp)
        wrapped = gs.DataParallel(model, process_group=comm)
        wrapped(batches(1)[0]).sum().backward()
        averaged = flat_grads(model)
        engine = weakref.ref(wrapped.engine)
        wrapped.close()
        assert torch.equal(flat_grads(model), averaged)
        model.zero_grad()
        model(shard(batches(1)[0], comm)).sum().backward()
        local = flat_grads(model)
        del wrapped
        gc.collect()
        assert engine() is None
        return local

    first, second = run_ranks(2, body)
    assert not torch.equal(first, second)


def test_a_wrapper_that_is_dropped_without_close_is_freed_too():
    def body(comm):
        model = seeded(mlp)
        wrapped = gs.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), process_group=comm)
        wrapped(batches(1)[0]).sum().backward()
        engine = weakref.ref(wrapped.engine)
        del wrapped
        gc.collect()
        assert engine() is None
        model(batches(1)[0]).sum().backward()

    alone(body)


def test_step_of_an_algorithm_counts_optimizer_steps():
    calls = []

    class Recorder(gs.GradientAllReduce):
        def before_forward(self, step):
            calls.append(("forward", step))

        def after_step(self, step):
            calls.append(("step", step))

    def body(comm):
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = gs.DataParallel(model, optimizer, process_group=comm, algorithm=Recorder())
        for micro in range(4):
            wrapped(batches(1)[0]).sum().backward()
            if micro % 2:
                optimizer.step()

    alone(body)
    assert calls == [
        ("forward", 0),
        ("forward", 0),
        ("step", 1),
        ("forward", 1),
        ("forward", 1),
        ("step", 2),
    ]


def test_sum_instead_of_mean():
    def body(comm):
        model = seeded(mlp)
        algorithm = gs.GradientAllReduce(average=False)
        wrapped = gs.DataParallel(model, process_group=comm, algorithm=algorithm)
        wrapped(shard(batches(1)[0], comm)).sum().backward()
        return flat_grads(model)

    model = seeded(mlp)
    model(batches(1)[0]).sum().backward()
    torch.testing.assert_close(run_ranks(3, body)[0], flat_grads(model), rtol=1e-5, atol=1e-5)


def test_optimizer_with_closure_and_grad_clipping_work_as_before():
    def body(comm):
        model = seeded(mlp)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        wrapped = gs.DataParallel(model, optimizer, process_group=comm, algorithm=gs.GradientAllReduce(True))

        def closure():
            optimizer.zero_grad()
            loss = wrapped(shard(batches(1)[0], comm)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
            return loss

        # every rank must see the same loss, or their line searches part
        optimizer.step(closure)
        return flat_grads(model)

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


@pytest.mark.parametrize("options", [{"bucket_bytes": 0}, {"first_bucket_bytes": -1}])
def test_bucket_sizes_must_be_positive(options):
    with pytest.raises(gs.ConfigError, match="must be positive, got"):
        alone(lambda comm: gs.DataParallel(mlp(), process_group=comm, **options))


def test_a_stock_ddp_checkpoint_loads_as_it_is():
    def body(comm):
        wrapped, other = gs.DataParallel(seeded(mlp, 1), process_group=comm), seeded(mlp, 2)
        wrapped.load_state_dict({f"module.{name}": value for name, value in other.state_dict().items()})
        assert torch.equal(wrapped.module[0].weight, other[0].weight)

    alone(body)


def test_copying_the_wrapper_is_an_error_that_says_what_to_copy():
    def body(comm):
        wrapped = gs.DataParallel(mlp(), process_group=comm)
        for call in (copy.deepcopy, pickle.dumps):
            with pytest.raises(gs.ConfigError, match=r"copy or pickle model\.module"):
                call(wrapped)

    alone(body)


def test_an_algorithm_or_codec_of_ones_own_needs_no_repr():
    class Own(gs.GradientAllReduce):
        pass

    assert (
        repr(Own(codec=gs.Int8(64)))
        == "Own(average=True, codec=Int8(block=64, seed=0, stochastic=False), deterministic=False)"
    )
    assert all(
        torch.isfinite(weights).all() for weights in run_ranks(2, lambda comm: train(comm, algorithm=Own()))
    )


def test_loading_that_replaces_the_parameters_is_an_error():
    def body(comm):
        wrapped = gs.DataParallel(seeded(mlp), process_group=comm)
        with pytest.raises(gs.ConfigError, match=r"'0\.weight' is another object .* load with assign=False"):
            wrapped.load_state_dict(seeded(mlp, 2).state_dict(), assign=True)

    alone(body)


class Versioned(nn.Module):
    """A module that migrates checkpoints of version 1, by multiplying with 100."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 100
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def forward(self, x):
        return x * self.weight


def test_a_checkpoint_keeps_its_modules_versions_between_wrapped_and_bare():
    def body(comm):
        build = lambda: nn.Sequential(Versioned())  # noqa: E731
        wrapped, bare = gs.DataParallel(build(), process_group=comm), build()
        bare.load_state_dict(wrapped.state_dict())
        wrapped.load_state_dict(build().state_dict())
        wrapped.load_state_dict(wrapped.state_dict())
        assert bare[0].weight.tolist() == wrapped.module[0].weight.tolist() == [1, 1]

    alone(body)


def test_a_forked_child_ends_without_its_parents_worker():
    def body(comm):
        wrapped = gs.DataParallel(seeded(mlp), process_group=comm)
        wrapped(batches(1)[0]).sum().backward()
        child = os.fork()
        if child == 0:
            wrapped.close()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    alone(body)
