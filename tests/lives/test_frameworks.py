"""The table of lives for what wraps a model on a user's behalf: Lightning, Fabric, the Trainer, Accelerate, stock DDP
with our hooks, FSDP2 with codecs, gs.elastic, and an optimizer whose state is shared out.

A cell is right by one process that has all the data, as in test_lives.py.
"""

import importlib.util
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDDP
from torch.utils.data import DataLoader

import gossamer as gs
from tests.lives.every import fabric_of, trainer
from tests.lives.faces import LR, MOMENTUM, Wrapped
from tests.lives.reference import (
    FEW,
    LIVES,
    STEPS,
    alone,
    closed,
    from_rank_0,
    inputs,
    require_right,
    without_collector,
)
from tests.support.jobs import Job
from tests.support.models import batches, mlp, seeded

in_job = pytest.mark.usefixtures("job")
has_lightning = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
has_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)
has_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
ALGORITHMS: dict[str, dict[str, Any]] = {"gradient_allreduce": {}, "local_sgd": {"period": 1}}


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job(3) as job, job.within(gs.init, gs.shutdown):
        yield job


def twice(wrap: Callable[[nn.Module], Wrapped], life: Callable[..., Any]) -> None:
    """Trains a model by two wrappers, of which the first ends as `life` says."""
    model, expected = seeded(mlp), seeded(mlp)
    with without_collector():
        kept = life(lambda: wrap(model))
        alone(expected, "", "gradients", 1)
        require_right(model, expected)
        from_rank_0(expected)
        wrap(model).train(inputs(2, gs.rank()))
        alone(expected, "", "gradients", 2)
        require_right(model, expected)
    del kept


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)


# --- Lightning and Fabric ---


def strategy(algorithm: str) -> Any:
    from gossamer.lightning import GossamerStrategy

    return GossamerStrategy(algorithm, **ALGORITHMS[algorithm])


def module_of(model: nn.Module, **options: Any) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        """It keeps the losses of all steps, as a user may."""

        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = model, list[Tensor]()

        def training_step(self, batch: Tensor, _number: int) -> Tensor:
            self.losses.append(self.model(batch).square().mean())
            return self.losses[-1]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.model)

    return Module()


def loader(phase: int) -> DataLoader[Tensor]:
    return DataLoader(list(inputs(phase, gs.rank())), batch_size=None)  # type: ignore[arg-type]


@in_job
@has_lightning
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "second", ["the same trainer", "another trainer", "the first is kept", "another module"]
)
def test_lightning_fits_a_model_twice(second, algorithm):
    model, expected = seeded(mlp), seeded(mlp)
    with without_collector():
        module, first = module_of(model), trainer(strategy(algorithm))
        first.fit(module, loader(1))
        alone(expected, "", "gradients", 1)
        require_right(model, expected)
        kept = first if second == "the first is kept" else None
        if second == "the same trainer":
            first.fit_loop.epoch_progress.reset()
            first.fit_loop.max_epochs = 1
        else:
            first = trainer(strategy(algorithm))
        if second == "another module":
            module = module_of(model)
        first.fit(module, loader(2))
        alone(expected, "", "gradients", 2)
        require_right(model, expected)
    del kept


@in_job
@has_lightning
@pytest.mark.parametrize("life", LIVES)
def test_fabric_sets_a_model_up_twice(life):
    def wrap(model: nn.Module) -> Wrapped:
        wrapped, optimizer = fabric_of("gradient_allreduce").setup(model, sgd(model))
        return Wrapped(wrapped, optimizer, wrapped, lambda: None)

    twice(wrap, life)


# --- the Trainer ---


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor | None = None) -> dict[str, Tensor]:
        assert x is not None
        return {"loss": self.model(x).square().mean()}


@in_job
@has_transformers
@pytest.mark.parametrize("second", ["train() again", "another Trainer", "the first is kept"])
def test_the_trainer_trains_a_model_twice(second, tmp_path):
    from transformers import Trainer, TrainingArguments

    class GossamerTrainer(Trainer):  # as docs/accelerate.md has it
        def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
            if not training or isinstance(model, gs.DataParallel):
                return model
            wrapped = gs.DataParallel(model, self.optimizer)
            return self.accelerator.prepare_model(wrapped, evaluation_mode=True)

    rows = batches(1, size=4 * gs.size())[0]  # an epoch is one step over all of them, in whatever order
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_train_epochs=STEPS,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )

    def made(model: nn.Module) -> Any:
        optimizers = (sgd(model), None)
        return GossamerTrainer(
            model, arguments, train_dataset=[{"x": row} for row in rows], optimizers=optimizers
        )

    model, expected = WithLoss(seeded(mlp)), seeded(mlp)
    with without_collector():
        first = made(model)
        first.train()
        optimizer = sgd(expected)
        Wrapped(expected, optimizer, None, lambda: None).train(rows.expand(STEPS, -1, -1))
        require_right(model.model, expected)
        kept = first if second == "the first is kept" else None
        again = first if second == "train() again" else made(model)
        if again is not first:
            del first
            optimizer = sgd(expected)
        again.train()
        Wrapped(expected, optimizer, None, lambda: None).train(rows.expand(STEPS, -1, -1))
        require_right(model.model, expected)
    del kept


# --- Accelerate ---


@in_job
@has_accelerate
@pytest.mark.parametrize("life", LIVES)
def test_accelerate_prepares_a_model_twice(life):
    """It moves the model to "cpu:0", which to torch is another device than "cpu"."""
    from accelerate import Accelerator

    def wrap(model: nn.Module) -> Wrapped:
        accelerator, optimizer = Accelerator(cpu=True), sgd(model)
        wrapped = accelerator.prepare_model(gs.DataParallel(model, optimizer), evaluation_mode=True)
        return Wrapped(wrapped, accelerator.prepare(optimizer), wrapped, wrapped.close)

    twice(wrap, life)


# --- stock DDP with our hooks, FSDP2 with codecs ---


@in_job
@pytest.mark.parametrize("hook", [gs.hooks.deterministic, gs.hooks.compress], ids=["exact", "codec"])
@pytest.mark.parametrize("native", [False, True], ids=["register_comm_hook", "hooks.register"])
@pytest.mark.parametrize("life", [*FEW, closed])
def test_stock_ddp_with_a_hook_is_made_twice(life, native, hook):
    def wrap(model: nn.Module) -> Wrapped:
        wrapped = StockDDP(model)
        state = gs.hooks.State(wrapped, codec=gs.Identity() if hook is gs.hooks.compress else None)
        if native:
            gs.hooks.register(wrapped, state, hook)
        else:
            wrapped.register_comm_hook(state, hook)
        return Wrapped(wrapped, sgd(model), wrapped, state.close if life is not closed else lambda: None)

    twice(wrap, life)


@in_job
@pytest.mark.parametrize("life", FEW)
@pytest.mark.parametrize("stock_first", [False, True])
def test_stock_ddp_with_a_hook_and_our_wrapper(stock_first, life):
    turn = iter([stock_first, not stock_first])

    def wrap(model: nn.Module) -> Wrapped:
        if not next(turn):
            wrapped: Any = gs.DataParallel(model)
        else:
            wrapped = StockDDP(model)
            wrapped.register_comm_hook(gs.hooks.State(wrapped), gs.hooks.deterministic)
        return Wrapped(wrapped, sgd(model), wrapped, lambda: None)

    twice(wrap, life)


@in_job
def test_fsdp_is_compressed_twice():
    """The codec that was given last is the one that is used."""
    from torch.distributed.fsdp import fully_shard

    model, expected = seeded(mlp), seeded(mlp)
    fully_shard(model)
    gs.fsdp.compress(model, gs.OneBit(), weights=gs.Int8())
    gs.fsdp.compress(model, gs.Identity(), weights=gs.Identity())
    optimizer = sgd(model)
    Wrapped(model, optimizer, None, lambda: None).train(inputs(1, gs.rank()))
    alone(expected, "", "gradients", 1)
    for param, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), right, rtol=1e-4, atol=1e-6)  # type: ignore[attr-defined]


# --- gs.ShardedOptimizer ---


@in_job
@pytest.mark.parametrize("life", [*FEW, closed])
@pytest.mark.parametrize("same", [True, False], ids=["the same optimizer", "another optimizer"])
def test_a_sharded_optimizer_goes_on_with_the_next_wrapper(same, life):
    model, expected = seeded(mlp), seeded(mlp)
    made: list[Any] = []

    def wrap() -> Wrapped:
        if not made or not same:
            made.append(gs.ShardedOptimizer(torch.optim.SGD, model.parameters(), lr=LR, momentum=MOMENTUM))
        wrapped = gs.DataParallel(model, made[-1], algorithm="sharded")
        return Wrapped(wrapped, made[-1], wrapped, wrapped.close)

    with without_collector():
        kept = life(wrap)
        if same and life is closed:
            with pytest.raises(gs.ConfigError, match="its state has ended with the model that was closed"):
                wrap()
            return
        optimizer = sgd(expected)
        Wrapped(expected, optimizer, None, lambda: None).train(inputs(1))
        require_right(model, expected)
        wrap().train(inputs(2, gs.rank()))
        Wrapped(expected, optimizer if same else sgd(expected), None, lambda: None).train(inputs(2))
        require_right(model, expected)
    del kept


@in_job
def test_a_sharded_optimizer_whose_wrapper_was_deleted_takes_no_step():
    model = seeded(mlp)
    optimizer = gs.ShardedOptimizer(torch.optim.SGD, model.parameters(), lr=LR)
    wrapped = gs.DataParallel(model, optimizer, algorithm="sharded")
    Wrapped(wrapped, optimizer, None, lambda: None).train(inputs(1, gs.rank()))
    del wrapped
    with pytest.raises(gs.ConfigError, match="wrap the model first"):
        optimizer.step()


# --- gs.elastic ---

ELASTIC = """
    import gc, torch, gossamer as gs
    from torch import nn
    gs.init()
    gc.disable()
    torch.manual_seed(0)
    rows = torch.randn(12, 4)
    data = torch.utils.data.TensorDataset(rows)
    torch.manual_seed(1)
    net, expected = nn.Linear(4, 2), nn.Linear(4, 2)
    expected.load_state_dict(net.state_dict())
    kept = []
    for fold in range(3):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = gs.DataParallel(net, optimizer)
        loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=gs.ElasticSampler(data))
        run = gs.elastic(loader, model, optimizer)
        for epoch in run.epochs(2):  # an epoch is one step over all rows
            for (batch,) in run:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                kept.append((loss, model) if LIVES else loss)
        own = torch.optim.SGD(expected.parameters(), lr=0.1)
        for _ in range(2):
            own.zero_grad()
            expected(rows).square().mean().backward()
            own.step()
        torch.testing.assert_close(net.weight, expected.weight)
    print("right", flush=True)
    gs.shutdown()
"""


@pytest.mark.parametrize("flags", [["-np", "3"], ["-np", "3", "--min-np", "2"]], ids=["fixed", "elastic"])
@pytest.mark.parametrize("lives_on", [False, True], ids=["kept losses", "lives"])
def test_an_elastic_loop_runs_for_each_fold(start, tmp_path, lives_on, flags):
    (tmp_path / "train.py").write_text(f"LIVES = {lives_on}\n{textwrap.dedent(ELASTIC)}")
    code, out, err = start(["-m", "gossamer.launch.cli", "run", *flags, "train.py"]).finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] right" for rank in range(3)]
