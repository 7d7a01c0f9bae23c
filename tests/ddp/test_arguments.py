"""gs.DistributedDataParallel: the effect of single arguments, refusals, and the attributes that programs look for.

Ranks are threads. Weights beside torch's are in test_weights.py.
"""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _MixedPrecision

import gossamer as gs
from tests.support.models import batches, flat_grads, flat_weights, mlp, relative_error, seeded, shard, square
from tests.support.ranks import run_ranks
from tests.support.stock import Net, loss_of, run_beside, wrap


def test_bucket_sizes_are_those_asked_for():
    def body(comm):
        sizes = []
        for options in ({"bucket_cap_mb": 0.0005}, {"bucket_cap_mb_list": [0.0001, 10]}, {}):
            model = gs.DistributedDataParallel(seeded(mlp), process_group=comm, **options)
            sizes.append([bucket.bytes for bucket in model.engine.buckets])
            model.close()
        return sizes

    small, listed, default = run_ranks(1, body)[0]
    assert len(small) == 2
    assert len(listed) == 2
    assert listed[0] < 1000
    assert len(default) == 1


def test_algorithms_by_name_and_their_optimizer_are_checked():
    def body(comm):
        with pytest.raises(gs.ConfigError, match=r"counts optimizer steps; give optimizer="):
            gs.DistributedDataParallel(mlp(), process_group=comm, algorithm="decentralized")
        with pytest.raises(gs.ConfigError, match="must be an Algorithm object or one of"):
            gs.DistributedDataParallel(mlp(), process_group=comm, algorithm="nonsense")
        with pytest.raises(gs.ConfigError, match="DistributedDataParallel: optimizer must be"):
            gs.DistributedDataParallel(mlp(), process_group=comm, optimizer=3)
        model = gs.DistributedDataParallel(seeded(mlp), process_group=comm, algorithm="bytegrad")
        assert model.algorithm.name == "bytegrad"
        model.close()

    run_ranks(1, body)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("options", "at_wrap", "before_forward"),
    [
        ({}, True, True),
        ({"forward_sync_buffers": False}, True, False),
        ({"broadcast_buffers": False}, False, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True, True),
        ({"init_sync": False}, False, True),
    ],
    ids=str,
)
def test_buffers_of_rank_0_are_taken_at_wrap_and_before_forwards(options, at_wrap, before_forward):
    def body(comm):
        inner = seeded(Net)
        inner.norm.running_mean.fill_(comm.rank)
        model = gs.DistributedDataParallel(inner, process_group=comm, **options)
        wrapped = inner.norm.running_mean.sum().item()
        inner.norm.running_mean.fill_(comm.rank)
        model.eval()
        model(shard(batches(1)[0], comm))
        return wrapped == 0, inner.norm.running_mean.sum().item() == 0

    assert run_ranks(2, body)[1] == (at_wrap, before_forward)


def test_both_names_of_the_buffers_argument_warn():
    def body(comm):
        with pytest.warns(
            FutureWarning, match="its value is ignored when `forward_sync_buffers` is provided"
        ):
            model = gs.DistributedDataParallel(
                mlp(), process_group=comm, broadcast_buffers=False, forward_sync_buffers=True
            )
        assert model.broadcast_buffers
        model.close()

    run_ranks(1, body)


def steps(model, comm):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(3):
        optimizer.zero_grad()
        square(model(shard(batch, comm)).float()).backward()
        optimizer.step()


def test_delayed_parameters_travel_after_all_others():
    def body(comm, other):
        results = []
        for group, delays in ((comm, False), (other, True)):
            inner = seeded(mlp)
            options = {
                "delay_all_reduce_named_params": [("4.weight", inner[4].weight), ("2.bias", inner[2].bias)],
                "param_to_hook_all_reduce": inner[0].weight,
            }
            model = gs.DistributedDataParallel(inner, process_group=group, **(options if delays else {}))
            for batch in batches(2):
                inner.zero_grad()
                square(model(shard(batch, comm))).backward()
            results.append((flat_grads(inner), [set(bucket.names) for bucket in model.engine.buckets]))
            model.close()
        return results

    for (plain, _), (delayed, buckets) in run_ranks(2, body, groups=2):
        assert torch.equal(plain, delayed)
        assert buckets[-1] == {"4.weight", "2.bias"}
        assert all(not first & second for first, second in pairwise(buckets))


def test_mixed_precision_computes_in_16_bits_and_keeps_weights_in_32():
    def body(comm):
        inner = seeded(lambda: nn.Sequential(mlp(), nn.BatchNorm1d(5)))
        settings = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
        model = gs.DistributedDataParallel(inner, process_group=comm, mixed_precision=settings)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        sent = model.engine.bytes_sent
        for batch in batches(3):
            optimizer.zero_grad()
            output = model(shard(batch, comm))
            assert output.dtype == torch.bfloat16
            square(output.float()).backward()
            optimizer.step()
        assert {param.dtype for param in inner.parameters()} == {torch.float32}
        assert all(param.grad.dtype == torch.float32 for param in inner.parameters())
        assert "BF16" in repr(model.algorithm)
        assert inner[1].num_batches_tracked == 3
        assert inner[1].running_mean.dtype == torch.bfloat16
        return flat_weights(inner), model.engine.bytes_sent - sent

    ranks = run_ranks(2, body)
    assert torch.equal(ranks[0][0], ranks[1][0])
    exact = run_ranks(
        2,
        lambda comm: flat_weights_of(
            comm, gs.DistributedDataParallel, lambda: nn.Sequential(mlp(), nn.BatchNorm1d(5))
        ),
    )
    assert 0 < relative_error(ranks[0][0], exact[0]) < 0.02


def test_a_reduce_dtype_that_the_algorithm_would_not_send_by_is_refused():
    half = _MixedPrecision(reduce_dtype=torch.bfloat16)

    def body(comm):
        for algorithm in (
            "bytegrad",
            "decentralized",
            gs.GradientAllReduce(),
            gs.GradientAllReduce(codec=gs.FP16()),
        ):
            with pytest.raises(gs.ConfigError, match="must be what the algorithm sends, got torch.bfloat"):
                gs.DistributedDataParallel(
                    mlp(), process_group=comm, mixed_precision=half, algorithm=algorithm
                )
        for algorithm in ("gradient_allreduce", gs.GradientAllReduce(codec=gs.BF16())):
            model = gs.DistributedDataParallel(
                mlp(), process_group=comm, mixed_precision=half, algorithm=algorithm
            )
            assert "BF16" in repr(model.algorithm)
            with pytest.raises(gs.UsageError, match=r"a hook decides what travels.*bfloat16"):
                model.register_comm_hook(None, print)
            model.close()
        computes = _MixedPrecision(param_dtype=torch.bfloat16)  # the algorithm's own way to send stays
        model = gs.DistributedDataParallel(
            mlp(), process_group=comm, mixed_precision=computes, algorithm="bytegrad"
        )
        assert model.algorithm.name == "bytegrad"
        model.close()

    run_ranks(1, body)


def flat_weights_of(comm, wrapper, make):
    inner = seeded(make)
    steps(wrapper(inner, process_group=comm), comm)
    return flat_weights(inner)


def test_it_passes_for_one_of_torchs():
    def body(comm):
        model = gs.DistributedDataParallel(seeded(Net), process_group=comm, find_unused_parameters=True)
        assert isinstance(model, Stock)
        assert issubclass(gs.DistributedDataParallel, Stock)
        assert not isinstance(model.module, Stock)
        facts = model._get_ddp_logging_data()
        assert (facts["world_size"], facts["rank"], facts["module_name"]) == (1, 0, "Net")
        assert (facts["find_unused_parameters"], facts["iteration"]) == (1, 0)
        assert model.device == torch.device("cpu")
        assert model.device_type == "cpu"
        assert model.bucket_bytes_cap == 25 * 2**20
        # Accelerate does this so that a backward communicates whose forward was under no_sync()
        with model.no_sync():
            loss = loss_of(model(batches(1)[0]))
        model.reducer.prepare_for_forward()
        assert not model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])
        loss.backward()
        model.reducer._delay_all_reduce()
        assert model.engine.backward_count == 1
        model.close()

    run_ranks(1, body)


def test_lightning_and_accelerate_take_it_for_one_of_torchs():
    types = pytest.importorskip("lightning.pytorch.utilities.types")
    other = pytest.importorskip("accelerate.utils.other")

    def body(comm):
        model = gs.DistributedDataParallel(mlp(), process_group=comm)
        assert isinstance(model, types.DistributedDataParallel)
        assert isinstance(model, Stock)
        assert other.extract_model_from_parallel(model) is model.module
        assert other.extract_model_from_parallel(torch.nn.Sequential(model))[0] is model
        model.close()

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("make", "options", "kind", "text"),
    [
        (nn.ReLU, {}, RuntimeError, "doesn't have any parameter that requires a gradient"),
        (mlp, {"device_ids": [0, 1]}, ValueError, "device_ids can only be None or contain a single element"),
        (mlp, {"device_ids": [0]}, ValueError, "arguments only work with single-device"),
        (mlp, {"output_device": "cpu"}, ValueError, "got device_ids None, output_device cpu"),
        (mlp, {"param_to_hook_all_reduce": 1}, ValueError, "need to be set at the same time"),
    ],
    ids=lambda value: "" if callable(value) else str(value)[:30],
)
def test_what_torch_refuses_is_refused_with_its_text(make, options, kind, text):
    def body(comm, group):
        for wrapper, error in ((Stock, kind), (gs.DistributedDataParallel, gs.ConfigError)):
            with pytest.raises(error, match=text) as raised:
                wrap(wrapper, make(), comm, group, options)
            assert isinstance(raised.value, kind)

    run_beside(1, body)


class Mesh:
    ndim = 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be positive, got"),
        ({"bucket_cap_mb_list": [1, -1]}, "bucket_cap_mb must be positive, got"),
        ({"device_mesh": Mesh()}, "Cannot specify both process_group and device_mesh"),
        ({"device_mesh": Mesh(), "process_group": None}, "Only 1D device mesh is supported"),
        (
            {"process_group": 3},
            "process_group must be a ProcessGroup, a communicator, Flat, Hierarchical, HostMemory, Symmetric or None",
        ),
        (
            {
                "delay_all_reduce_named_params": [("x", nn.Parameter(torch.ones(1)))],
                "param_to_hook_all_reduce": nn.Parameter(torch.ones(1)),
            },
            "must be parameters of the module",
        ),
        (
            {"mixed_precision": torch.nn.parallel.distributed._MixedPrecision(torch.float64)},
            "must reduce in float32",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_arguments_that_cannot_be_met_are_refused(options, text):
    def body(comm):
        with pytest.raises(gs.ConfigError, match=text):
            gs.DistributedDataParallel(mlp(), **{"process_group": comm, **options})

    run_ranks(1, body)


def test_a_model_that_is_none_and_a_deprecated_argument():
    with pytest.raises(gs.ConfigError, match=r"module must be a torch.nn.Module, got int"):
        gs.DistributedDataParallel(3)

    def body(comm):
        with pytest.warns(FutureWarning, match="`check_reduction` argument"):
            gs.DistributedDataParallel(mlp(), process_group=comm, check_reduction=True).close()

    run_ranks(1, body)
