"""Bits of the Trainer, Fabric and the Bagua strategy beside those of the loop by hand. In the job of conftest.py."""

from typing import Any

import lightning.fabric as lf
import pytest
import torch

import gossamer as gs
import gossamer.bagua.torch_api as bagua
from gossamer.algorithms import ALGORITHMS
from gossamer.bagua.torch_api.algorithms import Algorithm
from gossamer.lightning import BaguaStrategy
from gossamer.lightning import fabric as gossamer_fabric
from tests.lightning.loop import (
    STEPS,
    Net,
    Plain,
    batches,
    fit,
    gossamer_strategy,
    optimizer_for,
    settings,
    weights,
)

pytestmark = pytest.mark.usefixtures("job")


def step(model: Any, optimizer: Any, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def by_hand(name: str, wrapper: Any = gs.DataParallel) -> torch.Tensor:
    module: Any = Plain()
    optimizer = optimizer_for(name, module.parameters())
    model = wrapper(module, optimizer=optimizer, algorithm=ALGORITHMS[name](**settings(name)))
    for batch in batches():
        step(model, optimizer, batch)
    model.close()
    return weights(module)


def by_fabric(name: str, *, compiled: bool = False) -> torch.Tensor:
    strategy = gossamer_fabric.GossamerStrategy(name, **settings(name))
    fabric = lf.Fabric(strategy=strategy, accelerator="cpu", devices=gs.size())
    fabric.launch()
    module: Any = Plain()
    given = torch.compile(module, backend="eager") if compiled else module
    model, optimizer = fabric.setup(given, optimizer_for(name, module.parameters()))
    for batch in batches():
        optimizer.zero_grad()
        fabric.backward(model(batch).square().mean())
        optimizer.step()
    wrapper = model._forward_module
    getattr(wrapper, "_orig_mod", wrapper).close()
    return weights(module)


def test_trainer_fabric_and_ddp_leave_the_bits_of_the_loop_by_hand() -> None:
    for name in sorted(set(ALGORITHMS) - {"sharded"}):
        hand = by_hand(name)
        assert torch.equal(by_hand(name, gs.DistributedDataParallel), hand), (
            f"{name}: DistributedDataParallel"
        )
        assert torch.equal(fit(gossamer_strategy(name), Net(name)), hand), f"{name}: Trainer"
        assert torch.equal(by_fabric(name), hand), f"{name}: Fabric"
        if name == "decentralized":
            assert torch.equal(by_fabric(name, compiled=True), hand), f"{name}: Fabric, compiled"


def test_bagua_strategy_leaves_the_bits_of_with_bagua() -> None:
    if not bagua.is_initialized():
        bagua.init_process_group()
    for name in (
        "gradient_allreduce",
        "bytegrad",
        "decentralized",
        "low_precision_decentralized",
        "qadam",
        "async",
    ):
        options = {"warmup_steps": STEPS} if name == "async" else {}
        module: Any = Plain()
        optimizer = optimizer_for(name, module.parameters())
        declared = {"q_adam_optimizer": optimizer} if name == "qadam" else options
        module = bagua.with_bagua(module, [optimizer], Algorithm.init(name, **declared))
        for batch in batches():
            step(module, optimizer, batch)
        module.bagua_ddp.close()
        assert torch.equal(fit(BaguaStrategy(name, **options), Net(name)), weights(module)), name


def test_bagua_and_gossamer_leave_the_same_bits() -> None:
    flat = {"hierarchical": False}  # otherwise a single host sends nothing through the codec
    pairs: dict[str, tuple[gs.Algorithm, dict[str, Any]]] = {
        "gradient_allreduce": (gs.GradientAllReduce(), {}),
        "bytegrad": (gs.ByteGrad(codec=gs.MinMaxUInt8()), flat),
        "decentralized": (gs.Decentralized(), {}),
        "low_precision_decentralized": (gs.LowPrecisionDecentralized(gs.MinMaxUInt8()), {}),
        "qadam": (gs.QAdam(gs.MinMaxUInt8()), flat),
        "async": (gs.AsyncModelAverage(warmup_steps=STEPS), {"warmup_steps": STEPS}),
    }
    for name, (algorithm, options) in pairs.items():
        module: Any = Plain()
        optimizer = optimizer_for(name, module.parameters())
        model = gs.DataParallel(module, optimizer, algorithm=algorithm)
        for batch in batches():
            step(model, optimizer, batch)
        model.close()
        assert torch.equal(fit(BaguaStrategy(name, **options), Net(name)), weights(module)), name
