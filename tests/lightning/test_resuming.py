"""Checkpoints: a resumed run has the bits of an uninterrupted one. In the job of conftest.py."""

import copy
import functools
from typing import Any

import lightning.fabric as lf
import pytest
import torch
import torch.distributed as dist

import gossamer as gs
from gossamer.algorithms import ALGORITHMS
from gossamer.lightning import BaguaStrategy, DDPStrategy, checkpoint
from gossamer.lightning import fabric as gossamer_fabric
from tests.lightning import loop
from tests.lightning.loop import (
    Net,
    Plain,
    all_equal,
    batches,
    gossamer_strategy,
    loader,
    optimizer_for,
    settings,
    trainer,
    weights,
)

pytestmark = pytest.mark.usefixtures("job")


def path(name: str) -> str:
    return f"{loop.folder}/{name}.ckpt"


def resumed(make: Any, name: str) -> torch.Tensor:
    """Weights after three epochs of four steps in two fits, of new strategies, trainers and modules."""

    class Saving(Net):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 1:
                self.trainer.save_checkpoint(path(name))

    trainer(make(), max_epochs=2).fit(Saving(name), loader(4))
    second = Net(name)
    trainer(make(), max_epochs=3).fit(second, loader(4), ckpt_path=path(name))
    return weights(second)


def whole(make: Any, name: str) -> torch.Tensor:
    """Weights after three epochs in one."""
    module = Net(name)
    trainer(make(), max_epochs=3).fit(module, loader(4))
    return weights(module)


def test_trainer_resumes_every_algorithm_bit_for_bit() -> None:
    for name in sorted(set(ALGORITHMS) - {"sharded"}):
        if name == "async":
            continue  # depends on the clock
        make = functools.partial(gossamer_strategy, name)
        assert torch.equal(resumed(make, name), whole(make, name)), name
    for name in ("low_precision_decentralized", "qadam"):
        make = functools.partial(BaguaStrategy, name)
        assert torch.equal(resumed(make, name), whole(make, name)), f"Bagua {name}"


def test_a_checkpoint_saved_after_fit_is_as_one_saved_in_it() -> None:
    for name in ("powersgd", "decentralized"):
        first = trainer(gossamer_strategy(name), max_epochs=2)
        first.fit(Net(name), loader(4))
        first.save_checkpoint(path(name))
        second = Net(name)
        trainer(gossamer_strategy(name), max_epochs=3).fit(second, loader(4), ckpt_path=path(name))
        assert torch.equal(weights(second), whole(functools.partial(gossamer_strategy, name), name)), name


def test_fabric_resumes_bit_for_bit() -> None:
    for name in ("decentralized", "powersgd"):
        results = []
        for parts in ((range(8),), (range(4), range(4, 8))):
            for part in parts:
                strategy = gossamer_fabric.GossamerStrategy(name, **settings(name))
                fabric = lf.Fabric(strategy=strategy, accelerator="cpu", devices=gs.size())
                fabric.launch()
                module = Plain()
                model, optimizer = fabric.setup(module, optimizer_for(name, module.parameters()))
                state = {"net": model, "optimizer": optimizer, "step": part[-1]}
                if part[0]:
                    assert fabric.load(path("fabric"), state) == {}
                    assert state["step"] == 3
                for batch in [batches(8)[number] for number in part]:
                    with fabric.no_backward_sync(model):
                        fabric.backward(model(batch).square().mean())
                    fabric.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                fabric.save(path("fabric"), state)
                model._forward_module.close()
            results.append(weights(module))
        assert torch.equal(*results), name
    saved = torch.load(path("fabric"))
    assert list(saved["net"]) == list(Plain().state_dict())  # no prefix


def momentum_of(module: Any) -> torch.Tensor:
    state = module.optimizers().state_dict()["state"]
    return torch.cat([each["momentum_buffer"].reshape(-1) for each in state.values()])


def test_a_checkpoint_of_stock_ddp_loads_and_the_other_way_round() -> None:
    class Saving(Net):
        def on_train_end(self) -> None:
            self.trainer.save_checkpoint(path("stock"))
            self.kept = weights(self), momentum_of(self)

    class Loading(Net):
        def on_train_start(self) -> None:
            self.found = weights(self), momentum_of(self)

    ours, stock = (lambda: gossamer_strategy("powersgd")), DDPStrategy
    for saves, loads in ((ours, stock), (stock, ours)):
        first, second = Saving(), Loading()
        trainer(saves()).fit(first, loader(2))
        run = trainer(loads(), max_epochs=2)
        run.fit(second, loader(2), ckpt_path=path("stock"))
        for kept, found in zip(first.kept, second.found, strict=True):
            assert torch.equal(kept, found)
        assert run.global_step == 4
        assert not torch.equal(weights(second), first.kept[0])
        assert all_equal(weights(second))


def test_state_of_another_size_is_merged_and_that_of_another_algorithm_is_refused() -> None:
    model = gs.DataParallel(Plain(), algorithm="gradient_allreduce")
    saved: Any = [checkpoint.gather(checkpoint.own_state(model, {}))]
    dist.broadcast_object_list(saved)
    wider = {**saved[0], "ranks": [copy.deepcopy(state) for state in saved[0]["ranks"] * 2]}
    for rank, state in enumerate(wider["ranks"]):
        state["algorithm"]["saved_by"] = {"rank": rank, "size": 6, "largest_host": 1}
    wider["ranks"][0]["algorithm"]["fields"] = {"error": {"net.0.bias": torch.ones(40)}}
    checkpoint.restore(model, {}, wider)
    error = model.algorithm_state_dict()["fields"]["error"]["net.0.bias"]
    torch.testing.assert_close(error, torch.full((40,), 1 / 6))
    with pytest.raises(gs.ConfigError, match="must be given the states of all ranks"):
        checkpoint.restore(model, {}, {**wider, "ranks": wider["ranks"][:2]})
    with pytest.raises(
        gs.ConfigError, match="saved with the algorithm ByteGrad, and this run has GradientAllReduce"
    ):
        checkpoint.restore(model, {}, {**saved[0], "algorithm": "ByteGrad"})
    model.close()
