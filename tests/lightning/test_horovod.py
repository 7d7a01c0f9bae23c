"""HorovodStrategy: a Trainer with it gives the weights of loops by hand. In the job of conftest.py."""

import contextlib
import itertools
import time
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

import gossamer as gs
import gossamer.horovod.torch as hvd
from gossamer.lightning import HorovodStrategy
from tests.lightning.loop import Net, Plain, all_equal, batches, fit, loader, trainer, weights
from tests.lightning.test_training import ByHand, Failing, Logging

pytestmark = pytest.mark.usefixtures("job")


def close(mine: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def by_hand(steps: int, window: int = 1, clip: float = 1e9) -> Tensor:
    """The loop: the mean of gradients, and a learning rate for all ranks."""
    module = Plain()
    optimizer = torch.optim.SGD(module.parameters(), 0.1 * gs.size(), momentum=0.9)
    model = gs.DataParallel(module, optimizer)
    for number, batch in enumerate(batches(steps)):
        last = number % window == window - 1 or number == steps - 1
        with contextlib.nullcontext() if last else model.no_sync():
            (model(batch).square().mean() / window).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    model.close()
    return weights(module)


class Unlike(Net):
    """Ranks begin with weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        if gs.rank():
            for param in self.parameters():
                torch.nn.init.constant_(param, float(gs.rank()))


def test_a_fit_is_the_loop_by_hand_with_rank_0s_weights_and_a_rate_for_all_ranks() -> None:
    for strategy in (HorovodStrategy(), "horovod"):
        module = Unlike()
        trainer(strategy).fit(module, loader(8))
        close(weights(module), by_hand(8))
        assert all_equal(weights(module))


def test_accumulation_steps_once_a_window_also_in_a_last_one_that_is_short() -> None:
    for windows, options in (
        ([3, 3, 2], {"accumulate_grad_batches": 3}),
        ([1] * 8 + [2] * 4, {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})], "max_epochs": 2}),
    ):
        module, run = Net(), trainer(HorovodStrategy(), gradient_clip_val=0.5, **options)
        run.fit(module, loader(8))
        assert run.global_step == len(windows)
        if "max_epochs" not in options:
            # Lightning divides the loss by the full length in a short window too.
            close(weights(module), by_hand(8, 3, 0.5))
        assert all_equal(weights(module))


def test_it_handles_accumulation_as_in_lightning_1_9_and_lightning_asks_it_in_every_batch() -> None:
    class Asking(Net):
        def __init__(self) -> None:
            super().__init__()
            self.asked, self.stepped = list[int](), list[int]()

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            self.asked.append(batch_idx)
            super().optimizer_step(epoch, batch_idx, optimizer, closure)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.stepped.append(len(self.asked) - 1)

    assert HorovodStrategy().handles_gradient_accumulation
    module, run = Asking(), trainer(HorovodStrategy(), accumulate_grad_batches=3)
    run.fit(module, loader(8))
    assert module.asked == list(range(8))
    assert module.stepped == [2, 5, 7]
    assert run.strategy.handles_gradient_accumulation


class Scheduled(Net):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make, self.rates = make, list[float]()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [{"scheduler": self.make(optimizer), "interval": "step"}]

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def test_schedulers_go_by_rates_for_all_ranks() -> None:
    kinds: list[Any] = [
        lambda each: torch.optim.lr_scheduler.StepLR(each, 2),
        lambda each: torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)),
        lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 6),
        lambda each: torch.optim.lr_scheduler.OneCycleLR(each, 0.5, total_steps=8),
        lambda each: torch.optim.lr_scheduler.SequentialLR(
            each,
            [
                torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1.0),
                torch.optim.lr_scheduler.StepLR(each, 1),
            ],
            [3],
        ),
    ]
    for make in kinds:
        module = Scheduled(make)
        trainer(HorovodStrategy()).fit(module, loader(6))
        optimizer = torch.optim.SGD(Plain().parameters(), 0.1)
        scheduler, expected = make(optimizer), []
        for _ in range(6):
            expected.append(optimizer.param_groups[0]["lr"] * gs.size())
            optimizer.step()
            scheduler.step()
        assert module.rates == pytest.approx(expected)


def test_reductions_and_gathers_are_horovods() -> None:
    rank, size = gs.rank(), gs.size()
    strategy = trainer(HorovodStrategy()).strategy
    given = torch.tensor([rank, 2 * rank])
    for op in ("mean", "AVG", None):
        assert strategy.reduce(given, reduce_op=op).tolist() == [(size - 1) / 2, size - 1.0]
    assert strategy.reduce(given, reduce_op="sum").tolist() == [size * (size - 1) // 2, size * (size - 1)]
    assert strategy.reduce(given, reduce_op=torch.distributed.ReduceOp.MAX).tolist() == [
        size - 1,
        2 * size - 2,
    ]
    assert strategy.reduce(given.double()).dtype == torch.float64
    assert given.tolist() == [rank, 2 * rank]
    assert strategy.reduce("text") == "text"
    for call in (lambda: strategy.reduce(given, reduce_op="median"), lambda: strategy.reduce(given, group=3)):
        with pytest.raises(gs.ConfigError, match=r"unrecognized `reduce_op`|group must be None"):
            call()
    assert strategy.all_gather(torch.tensor(float(rank))).tolist() == [float(each) for each in range(size)]
    for name in ("result", "tensor"):  # of Lightning 1.9, and of Lightning 2
        assert len(strategy.all_gather(**{name: given})) == 2 * size
    for wrong in ({}, {"result": given, "tensor": given}):
        with pytest.raises(TypeError, match="give result or tensor, got (both|neither)"):
            strategy.all_gather(**wrong)
    rows = torch.full((rank + 1, 3), float(rank), requires_grad=True)
    gathered = strategy.all_gather(rows)
    assert gathered.shape == (size * (size + 1) // 2, 3)
    (gathered * (rank + 1)).sum().backward()
    assert rows.grad is not None
    assert rows.grad.unique().tolist() == [(size + 1) / 2]  # the mean of 1, 2, ...
    assert strategy.broadcast({"from": rank}, src=1) == {"from": 1}
    assert strategy.reduce_boolean_decision(rank == 0, all=False)
    assert not strategy.reduce_boolean_decision(rank == 0)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": size, "rank": rank}


def test_metrics_and_evaluation() -> None:
    run, module = trainer(HorovodStrategy()), Logging()
    run.fit(module, loader(4), loader(2))
    assert run.callback_metrics["whole_epoch"].item() == 1.5 + (gs.size() - 1) / 2
    assert run.callback_metrics["most"].item() == gs.size() - 1
    (tested,) = run.test(module, loader(2), verbose=False)
    assert all_equal(torch.tensor([tested["val"]]))
    before = weights(module)
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(3))  # with new optimizers over the same parameters
    assert all_equal(weights(module))
    assert not torch.equal(weights(module), before)


def test_manual_optimization() -> None:
    module = Plain()
    params = list(module.parameters())
    first = torch.optim.SGD(params[:2], 0.1 * gs.size())
    second = torch.optim.SGD(params[2:], 0.2 * gs.size(), momentum=0.9)
    model = gs.DataParallel(module, [first, second])
    for batch, optimizer in itertools.product(batches(8), (first, second, first)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    model.close()
    close(fit(HorovodStrategy(), ByHand(), steps=8), weights(module))


def test_a_resumed_run_has_the_bits_of_one_that_went_on() -> None:
    path = f"{trainer('auto').default_root_dir}/horovod.ckpt"

    class Saving(Net):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 1:
                self.trainer.save_checkpoint(path)

    trainer(HorovodStrategy(), max_epochs=2).fit(Saving(), loader(4))
    whole, second = Net(), Net()
    trainer(HorovodStrategy(), max_epochs=3).fit(whole, loader(4))
    trainer(HorovodStrategy(), max_epochs=3).fit(second, loader(4), ckpt_path=path)
    assert torch.equal(weights(second), weights(whole))


def test_mixed_precision() -> None:
    for precision in ("bf16-mixed", "16-mixed"):
        assert all_equal(fit(HorovodStrategy(), Net(), steps=4, precision=precision))


def test_wrong_numbers_of_devices_are_refused() -> None:
    for options, text in (
        ({"devices": 2}, "got devices=2 and 3 processes on this host.* or give devices=1 or devices=3"),
        ({"num_nodes": 2}, "leave it out"),
    ):
        with pytest.raises(gs.ConfigError, match=text):
            trainer(HorovodStrategy(), **options)
    assert trainer(HorovodStrategy(), devices=1).world_size == gs.size()


def test_an_exception_on_one_rank_of_horovods_is_raised_there_and_ends_the_others() -> None:
    begin = time.monotonic()
    mine = gs.rank() == 1
    with pytest.raises(KeyError if mine else hvd.HorovodInternalError, match="a mistake" if mine else ""):
        fit(HorovodStrategy(), Failing())
    assert time.monotonic() - begin < 20
    assert all_equal(fit(HorovodStrategy(), Net(), steps=2))  # and another run may follow
