# gossamer.lightning in one process without a group: names, pickling, groups. Refusals:
# test_refusals.py.

import datetime
import os
import pickle
from unittest import mock

import pytest
import torch
from torch.testing._internal.distributed import fake_pg

import gossamer as gs
import gossamer.horovod.torch as hvd

pl = pytest.importorskip("lightning.pytorch")
lightning = pytest.importorskip("gossamer.lightning")
KINDS = ("GossamerStrategy", "BaguaStrategy", "DDPStrategy", "HorovodStrategy")

WITHOUT = """
import sys
for name in ("lightning", "pytorch_lightning"):
    sys.modules[name] = None
try:
    import gossamer.lightning
except ImportError as error:
    print(error)
"""


def test_without_lightning_the_import_says_what_to_install(start) -> None:
    code, out, err = start(["-c", WITHOUT]).finish()
    assert code == 0, err
    assert "pip install 'gossamer[lightning]'" in out


@pytest.mark.parametrize("module", ["pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("kind", KINDS)
def test_strategies_can_be_pickled_as_the_spawn_launcher_does(module, kind) -> None:
    strategy = getattr(getattr(lightning, module), kind)()
    again = pickle.loads(pickle.dumps(strategy))
    assert type(again) is type(strategy)


@pytest.mark.parametrize("registry", ["lightning.pytorch", "pytorch_lightning"])
def test_every_algorithm_has_names_with_every_start_method(registry) -> None:
    registered = pytest.importorskip(f"{registry}.strategies").StrategyRegistry
    ours = [name for name in registered.available_strategies() if name.startswith("gossamer")]
    assert len(ours) == 11 * 4 * 3
    assert registered.get("gossamer_local_sgd_notebook_find_unused_parameters_false")._start_method == "fork"
    assert registered.get("gossamer")._start_method == "popen"
    assert type(registered.get("bagua")).__name__ == "BaguaStrategy"
    assert type(registered.get("horovod")).__name__ == "HorovodStrategy"


def test_what_needs_all_gradients_on_each_rank_is_refused() -> None:
    with pytest.raises(gs.ConfigError, match="Sharded is refused, because Lightning clips gradients"):
        lightning.GossamerStrategy("sharded")


def test_fabric_has_the_same_names() -> None:
    registered = pytest.importorskip("lightning.fabric.strategies").STRATEGY_REGISTRY
    strategy = registered.get("gossamer_bytegrad_spawn")
    assert type(strategy).__module__ == "gossamer.lightning.fabric"


def test_arguments_reach_lightning_as_those_of_its_own_strategy() -> None:
    for strategy in (
        lightning.GossamerStrategy(timeout=datetime.timedelta(seconds=7), start_method="fork"),
        lightning.DDPStrategy(timeout=datetime.timedelta(seconds=7), start_method="fork", static_graph=True),
    ):
        assert strategy._timeout.total_seconds() == 7
        assert strategy._start_method == "fork"
    assert strategy._ddp_kwargs == {"static_graph": True}
    with pytest.raises(ValueError, match="start method .nonsense. is not available"):
        pl.Trainer(strategy=lightning.DDPStrategy(start_method="nonsense"), accelerator="cpu", devices=2)


def test_precision_has_the_name_that_each_of_lightnings_strategies_gives_it() -> None:
    plugin = pl.plugins.MixedPrecision("bf16-mixed", "cpu")
    assert lightning.GossamerStrategy("bytegrad", precision_plugin=plugin).precision_plugin is plugin
    fabric = pytest.importorskip("gossamer.lightning.fabric")
    plugin = pytest.importorskip("lightning.fabric.plugins").MixedPrecision("bf16-mixed", "cpu")
    assert fabric.GossamerStrategy("bytegrad", precision=plugin).precision is plugin


def test_before_setup_the_collectives_return_what_they_are_given() -> None:
    strategy = lightning.GossamerStrategy()
    for value in (3, "text", None, [1]):
        assert strategy.reduce(value) is value
        assert strategy.broadcast(value) is value
        assert lightning.distributed.sync_ddp_if_available(value) is value
        assert lightning.distributed.all_gather_ddp_if_available(value) is value
    strategy.barrier("name")
    with pytest.raises(gs.ConfigError, match="the default process group has not been initialized"):
        lightning.distributed.sync_ddp(gs.rank)


class Model:
    def register_comm_hook(self, state, hook) -> None:
        self.state, self.hook = state, hook


def test_register_ddp_comm_hook_takes_the_state_by_both_of_its_names() -> None:
    register, model, state = lightning.distributed.register_ddp_comm_hook, Model(), object()
    register(model, state=state, ddp_comm_hook=max, ddp_comm_wrapper=lambda hook: [hook])
    assert model.state is state
    assert model.hook.__name__ == "list"
    with pytest.raises(gs.ConfigError, match="give ddp_comm_state or state, got both"):
        register(model, state, max, state=state)
    with pytest.raises(gs.ConfigError, match="ddp_comm_wrapper needs a ddp_comm_hook"):
        register(model, ddp_comm_wrapper=print)
    del model.hook
    register(model)
    assert not hasattr(model, "hook")


@pytest.fixture
def alone():
    """Cleans up after a Trainer in this process: Lightning leaves its rank in the environment, and a group."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


STOCK = "its own"  # Lightning's own, to compare ours with


@pytest.mark.parametrize("kind", [STOCK, "DDPStrategy", "GossamerStrategy"])
@pytest.mark.parametrize("made", ["init_process_group", "is_initialized"])
@pytest.mark.usefixtures("alone")
def test_a_group_that_is_a_mock_is_not_asked_for_its_size_or_backend(kind, made) -> None:
    timeout = datetime.timedelta(seconds=30)
    strategy = (pl.strategies.DDPStrategy if kind == STOCK else getattr(lightning, kind))(timeout=timeout)
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy)
    with mock.patch(f"torch.distributed.{made}", return_value=True) as mocked:
        trainer.strategy.setup_environment()
    assert mocked.called
    if made == "init_process_group":
        backend = strategy._get_process_group_backend()
        mocked.assert_called_with(backend, rank=0, world_size=1, timeout=timeout, device_id=None)


@pytest.mark.parametrize("kind", [STOCK, "DDPStrategy"])
@pytest.mark.parametrize("asked", ["fake", None])
@pytest.mark.usefixtures("alone")
def test_a_group_that_exists_already_is_taken(kind, asked) -> None:
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=fake_pg.FakeStore())
    kind = pl.strategies.DDPStrategy if kind == STOCK else getattr(lightning, kind)
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=kind(process_group_backend=asked))
    trainer.strategy.setup_environment()
    assert torch.distributed.get_backend() == "fake"


@pytest.mark.usefixtures("alone")
def test_devices_without_a_launcher_are_told_what_starts_their_processes() -> None:
    text = r"got devices=4 and 1 process on .*`gossamer run --nproc-per-node 4`, or give devices=1$"
    try:
        with pytest.raises(gs.ConfigError, match=text):
            pl.Trainer(strategy="horovod", accelerator="cpu", devices=4)
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("module", ["pytorch", "pytorch_lightning"])
@pytest.mark.usefixtures("alone")
def test_the_callback_logs_where_the_steps_go_to_every_logger(module) -> None:
    names = {"pytorch": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
    package = pytest.importorskip(names[module])
    ReportCallback = getattr(lightning, module).ReportCallback  # noqa: N806

    class Keep(pytest.importorskip(f"{names[module]}.loggers").Logger):
        name = version = "kept"

        def __init__(self):
            super().__init__()
            self.points = []

        def log_metrics(self, metrics, step):
            self.points.append((step, metrics))

        def log_hyperparams(self, *_):
            pass

    class Net(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, _):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(strategy, logger, **settings):
        quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
        callback = ReportCallback(**settings)
        trainer = package.Trainer(
            strategy=strategy,
            logger=logger,
            callbacks=[callback],
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            **quiet,
        )
        trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(70, 8), batch_size=10))

    logger = Keep()
    fit("gossamer", logger, every_n_steps=3)
    assert [step for step, _ in logger.points] == [3, 6]
    for _, metrics in logger.points:
        assert {"gossamer/step_ms", "gossamer/exposed_ms", "gossamer/bytes_out"} <= set(metrics)
        assert metrics["gossamer/step_ms"] > 0
        assert metrics["gossamer/steps"] <= 3, "each point is of its own steps"
    with pytest.raises(gs.ConfigError, match="averages through Gossamer, got SingleDeviceStrategy"):
        fit("auto", Keep(), every_n_steps=3)
    with pytest.raises(gs.ConfigError, match="must have a logger"):
        fit("gossamer", False)
    with pytest.raises(gs.ConfigError, match="every_n_steps must be at least 1, got 0"):
        ReportCallback(every_n_steps=0)
