"""Lightning's features around a training step, over Gossamer's strategies. In the job of conftest.py."""

import contextlib
import itertools
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn

import gossamer as gs
import gossamer.bagua.torch_api as bagua
from gossamer.bagua.torch_api.algorithms import Algorithm
from gossamer.lightning import BaguaStrategy, DDPStrategy, GossamerStrategy
from gossamer.lightning.bagua import ALGORITHMS
from tests.lightning import loop
from tests.lightning.loop import (
    Net,
    Plain,
    all_equal,
    batches,
    fit,
    gossamer_strategy,
    loader,
    optimizer_for,
    trainer,
    weights,
)

pytestmark = pytest.mark.usefixtures("job")


class ByHand(Net):
    """Manual optimization: two optimizers, and one of them twice, in each training step."""

    def __init__(self, algorithm: str = "gradient_allreduce", *, past_the_wrapper: bool = False) -> None:
        super().__init__(algorithm)
        self.automatic_optimization = False
        self.past_the_wrapper = past_the_wrapper

    def configure_optimizers(self) -> Any:
        return two_optimizers(self, self.algorithm)

    def training_step(self, batch: Tensor, index: int) -> None:
        given = self.optimizers()
        first, second = (given[0], given[-1]) if isinstance(given, list) else (given, given)
        for optimizer in (first, second, first):
            optimizer.zero_grad()
            output = self.net(batch) if self.past_the_wrapper else self(batch)
            self.manual_backward(output.square().mean())
            optimizer.step()


def two_optimizers(module: nn.Module, algorithm: str) -> list[torch.optim.Optimizer]:
    params = list(module.parameters())
    if algorithm == "qadam":  # qadam takes one optimizer
        return [optimizer_for(algorithm, params)]
    return [torch.optim.SGD(params[:2], 0.1), torch.optim.SGD(params[2:], 0.2, momentum=0.9)]


def manual_loop(name: str, model: Any, optimizers: list[torch.optim.Optimizer]) -> None:
    first, second = optimizers[0], optimizers[-1]
    for batch, optimizer in itertools.product(batches(8), (first, second, first)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def test_manual_optimization_leaves_the_bits_of_the_loop_by_hand() -> None:
    for name in ("gradient_allreduce", "decentralized", "low_precision_decentralized"):
        module = Plain()
        optimizers = two_optimizers(module, name)
        model = gs.DataParallel(module, optimizers, algorithm=name)
        manual_loop(name, model, optimizers)
        model.close()
        assert torch.equal(fit(gossamer_strategy(name), ByHand(name), steps=8), weights(module)), name


def test_manual_optimization_with_every_algorithm_of_bagua() -> None:
    if not bagua.is_initialized():
        bagua.init_process_group()
    for name in ALGORITHMS:
        options = {"warmup_steps": 3 * 8} if name == "async" else {}
        module: Any = Plain()
        optimizers = two_optimizers(module, name)
        own = {"q_adam_optimizer": optimizers[0]} if name == "qadam" else options
        module = bagua.with_bagua(module, optimizers, Algorithm.init(name, **own))
        manual_loop(name, module, optimizers)
        module.bagua_ddp.close()
        for past_the_wrapper in (False, True):
            mine = fit(
                BaguaStrategy(name, **options), ByHand(name, past_the_wrapper=past_the_wrapper), steps=8
            )
            assert torch.equal(mine, weights(module)), f"{name}, past the wrapper: {past_the_wrapper}"


def test_accumulation_and_clipping_leave_the_bits_of_the_loop_by_hand() -> None:
    module = Plain()
    optimizer = optimizer_for("", module.parameters())
    model = gs.DataParallel(module, optimizer, algorithm="bytegrad")
    every = batches(7)
    for number, batch in enumerate(every):
        syncs = number % 3 == 2 or number == len(every) - 1  # Lightning steps with the last batch too
        with contextlib.nullcontext() if syncs else model.no_sync():
            (model(batch).square().mean() / 3).backward()
        if syncs:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    model.close()
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}
    assert torch.equal(fit(GossamerStrategy("bytegrad"), Net(), steps=7, **options), weights(module))


def test_precisions_leave_the_bits_of_the_loop_by_hand() -> None:
    dtypes = {"16-true": torch.float16, "bf16-true": torch.bfloat16, "64-true": torch.float64}
    for precision in ("bf16-mixed", "16-mixed", *dtypes):
        dtype = dtypes.get(precision, torch.float32)
        module = Plain().to(dtype)
        optimizer = optimizer_for("", module.parameters())
        model = gs.DataParallel(module, optimizer)
        for batch in batches(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled="mixed" in precision, cache_enabled=False):
                loss = model(batch.to(dtype)).square().mean()
            loss.backward()
            optimizer.step()
        model.close()
        lightning = fit(GossamerStrategy(), Net(), steps=4, precision=precision)
        assert torch.equal(lightning, weights(module)), precision


class Logging(Net):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.log("whole", torch.tensor(index + self.global_rank), sync_dist=True, on_epoch=True, batch_size=1)
        self.log("most", float(self.global_rank), sync_dist=True, reduce_fx="max", on_epoch=True)
        return super().training_step(batch, index)


def test_metrics_are_reduced_also_of_integers_and_by_maximum() -> None:
    for strategy in (GossamerStrategy(), BaguaStrategy(), DDPStrategy()):
        run = trainer(strategy)
        run.fit(Logging(), loader(4), loader(2))
        metrics = run.callback_metrics
        assert metrics["whole_epoch"].item() == 1.5 + (gs.size() - 1) / 2
        assert metrics["most"].item() == gs.size() - 1
        assert all_equal(metrics["val"].reshape(1))
        assert run.strategy.reduce(torch.tensor(gs.rank())).item() == (gs.size() - 1) / 2
        assert run.strategy.reduce("text") == "text"
        assert run.strategy.reduce_boolean_decision(gs.rank() == 0, all=False)
        assert not run.strategy.reduce_boolean_decision(gs.rank() == 0)
        assert run.strategy.broadcast([gs.rank()], src=1) == [1]


def test_one_trainer_and_strategy_fit_again_and_evaluate() -> None:
    strategy = GossamerStrategy("decentralized")
    run, module = trainer(strategy), Net("decentralized")
    run.fit(module, loader(3), loader(2))
    assert strategy.model is module
    assert strategy.wrapper is None
    before = weights(module)
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(3))
    assert not torch.equal(weights(module), before)
    (tested,) = run.test(module, loader(2), verbose=False)
    assert all_equal(torch.tensor([tested["val"]]))
    assert all_equal(weights(module))  # evaluation copies rank 0's weights
    assert [list(part.shape) for part in run.predict(module, loader(2))] == [[6, 5], [3 + gs.rank(), 5]]
    stock = trainer(DDPStrategy())  # in a group of another backend than its default
    stock.fit(module, loader(2))
    stock.test(module, loader(2), verbose=False)


class Consensus(Net):
    def on_train_end(self) -> None:
        self.trainer.strategy.consensus()


def test_consensus_gives_all_ranks_the_mean() -> None:
    for strategy in (GossamerStrategy("local_sgd", period=50), BaguaStrategy("decentralized")):
        assert all_equal(fit(strategy, Consensus(), steps=3))
    with pytest.raises(gs.ConfigError, match=r"during fit\(\) only"):
        GossamerStrategy().consensus()


class Batched(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(40))


def test_sync_batchnorm_leaves_what_one_process_makes_of_all_batches() -> None:
    alone = Batched()
    optimizer = optimizer_for("", alone.parameters())
    same = [[batch[:3] for batch in batches(4, rank)] for rank in range(gs.size())]
    for step in range(4):
        optimizer.zero_grad()
        alone(torch.cat([every[step] for every in same])).square().mean().backward()
        optimizer.step()
    for strategy in (GossamerStrategy(), BaguaStrategy(), DDPStrategy()):
        module = Batched()
        run = trainer(strategy, sync_batchnorm=True)
        run.fit(module, torch.utils.data.DataLoader(same[gs.rank()], batch_size=None))  # type: ignore[arg-type]
        torch.testing.assert_close(weights(module), weights(alone), rtol=1e-4, atol=1e-5)
        assert type(module.net[1]) is nn.BatchNorm1d
        torch.testing.assert_close(module.net[1].running_var, alone.net[1].running_var)


def test_weight_averaging_callbacks() -> None:
    plain = fit(GossamerStrategy())
    for callback in (EMAWeightAveraging(), StochasticWeightAveraging(1e-2, swa_epoch_start=1)):
        averaged = fit(GossamerStrategy("bytegrad"), Net(), max_epochs=2, callbacks=[callback])
        assert all_equal(averaged)
        assert not torch.equal(averaged, plain)


class WithBackbone(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = self.net[:2], self.net[2]
        del self.net

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.backbone(batch))

    def configure_optimizers(self) -> Any:
        return optimizer_for("", (param for param in self.parameters() if param.requires_grad))


def finetune(strategy: Any, mine: list[Tensor]) -> WithBackbone:
    module = WithBackbone()
    thaw = BackboneFinetuning(
        1, lambda _: 1.0, backbone_initial_lr=0.05, should_align=False, initial_denom_lr=1.0
    )
    run = trainer(strategy, max_epochs=2, callbacks=[thaw])
    run.fit(module, torch.utils.data.DataLoader(mine, batch_size=None))  # type: ignore[arg-type]
    return module


def test_a_backbone_that_is_thawed_later_trains_as_in_one_process() -> None:
    """Torch's own DDP, and so DDPStrategy, leaves the gradients of what was frozen at wrap as they are."""
    alone = WithBackbone()
    optimizer = optimizer_for("", alone.head.parameters())
    same = [[batch[:3] for batch in batches(4, rank)] for rank in range(gs.size())]
    for epoch in range(2):
        if epoch == 1:
            optimizer.add_param_group({"params": [*alone.backbone.parameters()], "lr": 0.05})
        for step in range(4):
            alone.zero_grad()
            alone(torch.cat([every[step] for every in same])).square().mean().backward()
            optimizer.step()
    for strategy in (GossamerStrategy(), BaguaStrategy()):
        module = finetune(strategy, same[gs.rank()])
        torch.testing.assert_close(weights(module), weights(alone), rtol=1e-4, atol=1e-5)
    with pytest.raises(gs.ConfigError, match="has become trainable since the model was wrapped"):
        finetune(GossamerStrategy("local_sgd", period=1), same[gs.rank()])


class Compiled(Net):
    def training_step(self, batch: Tensor, index: int) -> Tensor:  # logging inside is broken on this torch
        return self(batch).square().mean()


def test_compiled_modules_leave_the_bits_of_others() -> None:
    plain = fit(GossamerStrategy("bytegrad"), Net(), steps=4)
    module = Compiled()
    trainer(GossamerStrategy("bytegrad")).fit(torch.compile(module, backend="eager"), loader(4))
    assert torch.equal(weights(module), plain)


class Failing(Net):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == 2 and self.global_rank == 1:
            raise KeyError("a mistake of the user")
        return self(batch).square().mean()


def test_an_exception_on_one_rank_is_raised_there_and_ends_the_others() -> None:
    for strategy in (GossamerStrategy(), GossamerStrategy("decentralized"), BaguaStrategy("bytegrad")):
        begin = time.monotonic()
        mine = gs.rank() == 1
        with pytest.raises(
            KeyError if mine else gs.CommError, match="a mistake of the user" if mine else "rank 1"
        ):
            fit(strategy, Failing())
        assert time.monotonic() - begin < 20


def test_a_checkpoint_of_an_exception_masks_it_not() -> None:
    checkpoints = ModelCheckpoint(dirpath=f"{loop.folder}/failed", save_on_exception=True)
    mine = gs.rank() == 1
    with pytest.raises(
        KeyError if mine else gs.CommError, match="a mistake of the user" if mine else "rank 1"
    ):
        fit(GossamerStrategy("powersgd"), Failing(), callbacks=[checkpoints], enable_checkpointing=True)


def test_an_exception_before_wrapping_is_the_one_that_is_raised() -> None:
    class NoOptimizer(Net):
        def configure_optimizers(self) -> Any:
            raise KeyError("no optimizer")

    for strategy in (GossamerStrategy("async"), BaguaStrategy("async")):
        with pytest.raises(KeyError, match="no optimizer"):
            fit(strategy, NoOptimizer())


def test_async_rests_during_validation_and_saving() -> None:
    calls: list[str] = []

    class Watched(GossamerStrategy):  # type: ignore[misc]
        def abort(self, wrapper: Any) -> None:
            calls.append("abort")
            super().abort(wrapper)

        def resume(self, wrapper: Any) -> None:
            calls.append("resume")
            super().resume(wrapper)

    class Saving(Net):
        def validation_step(self, batch: Tensor, index: int) -> None:
            calls.append("validate")

        def on_train_end(self) -> None:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/async.ckpt")

    run = trainer(Watched("async", sync_interval_ms=1), num_sanity_val_steps=0)
    run.fit(Saving(), loader(6), loader(1))
    assert calls == ["abort", "validate", "resume", "abort", "resume"]


def test_qadam_of_bagua_takes_one_optimizer_of_its_kind() -> None:
    error = pl.utilities.exceptions.MisconfigurationException
    with pytest.raises(error, match="one QAdamOptimizer and one LR Scheduler"):
        fit(BaguaStrategy("qadam"), Net(""))
