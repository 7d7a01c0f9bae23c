"""What the tests of this room's job run on, and the loop that they compare with.

train_by_hand() is the loop that a Trainer or Fabric must equal bit for bit: the same module, batches and algorithm.
"""

import logging
import tempfile
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import gossamer as gs
from gossamer.lightning import GossamerStrategy

STEPS = 20
folder = ""  # one for all ranks


def batches(steps: int = STEPS, rank: int | None = None) -> list[Tensor]:
    """This rank's batches, [6, 10] each; the last is smaller."""
    generator = torch.Generator().manual_seed(100 + (gs.rank() if rank is None else rank))
    sizes = [6] * (steps - 1) + [3 + (gs.rank() if rank is None else rank)]
    return [torch.randn(size, 10, generator=generator) for size in sizes]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 5))


class Plain(nn.Module):
    """Net without Lightning; parameters have the same names, by which PowerSGD draws its first factors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)


def optimizer_for(algorithm: str, params: Any) -> torch.optim.Optimizer:
    params = list(params)
    kinds: dict[str, Any] = {
        "qadam": gs.QAdamOptimizer,
        "onebit_adam": gs.QAdamOptimizer,
        "zero_one_adam": gs.ZeroOneAdamOptimizer,
    }
    if algorithm in kinds:
        return kinds[algorithm](params, 0.01, 3)  # type: ignore[no-any-return]
    return torch.optim.SGD(params, 0.1, momentum=0.9)


class Net(pl.LightningModule):
    def __init__(self, algorithm: str = "gradient_allreduce") -> None:
        super().__init__()
        self.net, self.algorithm = network(), algorithm

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self(batch).square().mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val", self(batch).square().mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return optimizer_for(self.algorithm, self.parameters())


def loader(steps: int = STEPS) -> Any:
    return DataLoader(batches(steps), batch_size=None)  # type: ignore[arg-type]


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": folder,
        "devices": dist.get_world_size(),
    }
    return pl.Trainer(strategy=strategy, accelerator="cpu", **{**defaults, **options})


def fit(strategy: Any, module: Any = None, *, steps: int = STEPS, **options: Any) -> Tensor:
    """This rank's weights after a fit."""
    module = module if module is not None else Net(getattr(strategy, "name", "gradient_allreduce"))
    trainer(strategy, **options).fit(module, loader(steps))
    return weights(module)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([param.detach().double().reshape(-1) for param in module.parameters()])


def gossamer_strategy(name: str, **options: Any) -> Any:
    return GossamerStrategy(name, **settings(name), **options)


def settings(name: str) -> dict[str, Any]:
    """Settings with which 20 steps show the algorithm's effect and depend on no clock."""
    return {
        "local_sgd": {"period": 4},
        "powersgd": {"rank": 1, "min_compression_rate": 1.0},
        "zero_one_adam": {"double_every": 1, "longest": 4},
        "async": {"warmup_steps": STEPS},
    }.get(name, {})


def all_equal(values: Tensor) -> bool:
    """Whether all ranks hold these bits."""
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values.contiguous())
    return all(torch.equal(each, values) for each in every)


def begin() -> None:
    """Joins, and makes the folder."""
    global folder
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    gs.init("gossamer", timeout_s=40)
    shared = [tempfile.mkdtemp() if gs.rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    folder = shared[0]
