"""gossamer.lightning.distributed, DDPStrategy's arguments, and both namespaces. In the job of conftest.py."""

import functools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)

import gossamer as gs
from gossamer.lightning import DDPStrategy, distributed
from tests.lightning import loop
from tests.lightning.loop import Net, all_equal, fit, loader, trainer, weights
from tests.lightning.test_training import ByHand

pytestmark = pytest.mark.usefixtures("job")


@functools.cache
def groups() -> list[Any]:
    """All ranks, and the last two, on each backend; None where this rank is not in it."""
    made = [None]
    for backend in ("gossamer", "gloo"):
        made += [dist.new_group([0, 1, 2], backend=backend), dist.new_group([1, 2], backend=backend)]
    return [each for each in made if each is not dist.GroupMember.NON_GROUP_MEMBER]


def test_sync_ddp_reduces_as_lightning_1_7_says() -> None:
    for group in groups():
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        total = sum(range(1, size + 1))
        for op in ("mean", "avg", "AVG", "Mean", dist.ReduceOp.AVG):
            for dtype in (torch.int64, torch.float32, torch.bool):
                own = torch.tensor([rank + 1, 0]).to(dtype)
                kept = own.clone()
                mean = distributed.sync_ddp(own, group, op)
                first = 1.0 if dtype is torch.bool else total / size
                assert torch.equal(mean, torch.tensor([first, 0.0])), (op, dtype)
                assert torch.equal(own, kept)
        for op in (None, "sum", "SUM", dist.ReduceOp.SUM):
            own = torch.tensor([rank + 1, 0])
            assert distributed.sync_ddp(own, group, op) is own
            assert own.tolist() == [total, 0]
        assert distributed.sync_ddp(torch.tensor(rank), group, "max").item() == size - 1
        assert distributed.sync_ddp(torch.tensor(rank + 1), group, "bor").item() == 3
        assert distributed.sync_ddp(rank + 1, group).item() == total
        strided = torch.full((3, 2), float(rank + 1)).t()
        assert distributed.sync_ddp(strided, group, "mean", inplace=True) is strided
        assert torch.equal(strided, torch.full((2, 3), total / size))
        leaf = torch.ones(1, requires_grad=True)
        distributed.sync_ddp(leaf, group, "mean").backward()
        assert leaf.grad is not None
        assert leaf.grad.item() == pytest.approx(1 / size)
        with pytest.raises(gs.ConfigError, match="inplace=True needs a floating-point tensor"):
            distributed.sync_ddp(torch.tensor(1), group, "mean", inplace=True)
        with pytest.raises(gs.ConfigError, match="reduce_op must be one of mean, avg, sum"):
            distributed.sync_ddp(torch.tensor(1.0), group, "median")


def test_gathers_take_unlike_shapes_or_refuse_them_on_every_rank() -> None:
    for group in groups():
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        uneven = distributed.gather_all_tensors(torch.full((rank, 2), rank), group)
        assert [list(each.shape) for each in uneven] == [[other, 2] for other in range(size)]
        assert all((each == other).all() and each.is_contiguous() for other, each in enumerate(uneven))
        assert torch.stack(distributed.gather_all_tensors(torch.tensor(rank), group)).tolist() == list(
            range(size)
        )
        stacked = distributed.all_gather_ddp_if_available(torch.full((2,), rank).t(), group)
        assert stacked.tolist() == [[other] * 2 for other in range(size)]
        for call in (distributed.all_gather_ddp_if_available, distributed.gather_all_tensors):
            with pytest.raises(gs.ConfigError, match="one dtype and number of dimensions on all ranks"):
                call(torch.ones(1) if rank else torch.ones(1, 1), group)
            with pytest.raises(gs.ConfigError, match="one dtype and number of dimensions on all ranks"):
                call(torch.ones(1) if rank else torch.ones(1).int(), group)
        with pytest.raises(gs.ConfigError, match="one shape on all ranks"):
            distributed.all_gather_ddp_if_available(torch.ones(rank + 1), group)


def test_gradients_of_a_gather_are_of_the_sum_of_all_losses() -> None:
    for group in groups():
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        own = torch.ones(2, requires_grad=True)
        ((rank + 1) * distributed.all_gather_ddp_if_available(own, group, sync_grads=True).sum()).backward()
        assert own.grad is not None
        assert own.grad.tolist() == [sum(range(1, size + 1))] * 2
        own.grad = None
        distributed.AllGatherGrad.apply(own, group)[0].sum().backward()
        assert own.grad.tolist() == [size if rank == 0 else 0] * 2
        assert not distributed.all_gather_ddp_if_available(own, group).requires_grad


def test_a_group_without_this_rank_is_refused() -> None:
    everyone = [dist.new_group([0]), dist.new_group([1, 2])]
    foreign = everyone[1] if gs.rank() == 0 else everyone[0]
    if foreign is not dist.GroupMember.NON_GROUP_MEMBER:
        with pytest.raises(gs.ConfigError, match="is not in the group"):
            distributed.sync_ddp(torch.ones(1), foreign)


def count(calls: list[int], state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    calls.append(bucket.index())
    return default_hooks.allreduce_hook(state, bucket)


def test_hooks_states_and_wrappers_of_ddp_work_on_cpus() -> None:
    plain = fit(DDPStrategy(), steps=5)
    calls: list[int] = []
    hook = functools.partial(count, calls)
    torch.testing.assert_close(fit(DDPStrategy(ddp_comm_hook=hook), steps=5), plain)
    assert len(calls) == 5
    wrapped = DDPStrategy(ddp_comm_hook=hook, ddp_comm_wrapper=default_hooks.fp16_compress_wrapper)
    halves = fit(wrapped, steps=5)
    assert not torch.equal(halves, plain)
    torch.testing.assert_close(halves, plain, rtol=1e-2, atol=1e-3)
    for options in (
        {"ddp_comm_hook": default_hooks.bf16_compress_hook},  # torch's DDP refuses it on CPUs, by its name
        {"ddp_comm_hook": functools.partial(default_hooks.bf16_compress_hook)},
        {"ddp_comm_hook": hook, "ddp_comm_wrapper": default_hooks.bf16_compress_wrapper},
    ):
        rounded = fit(DDPStrategy(**options), steps=5)
        assert all_equal(rounded)
        assert not torch.equal(rounded, plain)
        torch.testing.assert_close(rounded, plain, rtol=5e-2, atol=5e-3)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    assert not torch.equal(
        fit(DDPStrategy(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook.powerSGD_hook)), plain
    )
    assert state.iter > 2


class TwoLocal(ByHand):
    """Notes after each step whether ranks agree on the parameters of each of two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.equal: list[tuple[bool, bool]] = []

    def training_step(self, batch: Tensor, index: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self(batch).square().mean())
            optimizer.step()
        params = list(self.parameters())
        self.equal.append(
            tuple(
                all_equal(torch.cat([p.detach().view(-1) for p in part])) for part in (params[:2], params[2:])
            )
        )


def local(start: int, **options: Any) -> DDPStrategy:
    state = PostLocalSGDState(None, None, start, post_local_gradient_allreduce=False)
    return DDPStrategy(
        ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=4, **options
    )


def test_post_local_sgd_averages_the_parameters_of_every_optimizer() -> None:
    module = TwoLocal()
    trainer(local(4)).fit(module, loader(11))
    # Two backwards a step: from the third step on gradients are local, and averages come then, four steps later, ...
    expected = [step in (0, 1, 2, 6, 10) for step in range(11)]
    assert module.equal == [(each, each) for each in expected]


def test_post_local_sgd_resumes_where_it_was() -> None:
    class Saving(TwoLocal):
        def on_train_end(self) -> None:
            self.trainer.save_checkpoint(f"{loop.folder}/local.ckpt")

    trainer(local(4)).fit(Saving(), loader(5))
    module = TwoLocal()
    trainer(local(4), max_epochs=2).fit(module, loader(5), ckpt_path=f"{loop.folder}/local.ckpt")
    assert [first for first, _ in module.equal] == [False, True, False, False, False]  # steps 5 to 9


def test_a_backend_other_than_that_of_the_group_is_refused() -> None:
    with pytest.raises(
        gs.ConfigError, match="initialised with gossamer for cpu tensors, and process_group_backend"
    ):
        fit(DDPStrategy(process_group_backend="gloo"))
    assert torch.equal(
        fit(DDPStrategy(process_group_backend="gossamer"), steps=2), fit(DDPStrategy(), steps=2)
    )


def test_both_namespaces_have_strategies_that_the_other_refuses() -> None:
    import pytorch_lightning

    from gossamer.lightning import pytorch_lightning as other

    class Small(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = loop.network()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return loop.optimizer_for("", self.parameters())

    class Same(Net):
        training_step = Small.training_step

    options: dict[str, Any] = {
        "accelerator": "cpu", "devices": gs.size(), "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False,
    }  # fmt: skip
    for kind in ("GossamerStrategy", "BaguaStrategy", "DDPStrategy"):
        strategy = getattr(other, kind)()
        module = Small()
        pytorch_lightning.Trainer(strategy=strategy, **options).fit(module, loader(3))
        reference = fit(getattr(gs.lightning, kind)(), Same(), steps=3)
        assert torch.equal(weights(module), reference), kind
        with pytest.raises(ValueError, match="invalid strategy name"):
            pl.Trainer(strategy=strategy, **options)
    assert (
        pytorch_lightning.Trainer(strategy="gossamer_bytegrad_fork", **options).strategy._start_method
        == "fork"
    )


def test_lightning_cli_makes_strategies_from_class_paths() -> None:
    flags = [
        "--trainer.strategy=gossamer.lightning.GossamerStrategy",
        "--trainer.strategy.algorithm=bytegrad",
    ]
    more = ["--trainer.devices=3", "--trainer.accelerator=cpu", "--trainer.strategy.bucket_bytes=4096"]
    cli = LightningCLI(Net, args=[*flags, *more], run=False, save_config_callback=None)
    assert isinstance(cli.trainer.strategy, gs.lightning.GossamerStrategy)
    assert cli.trainer.strategy._algorithm == "bytegrad"
