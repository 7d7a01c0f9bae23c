# The refusals of gossamer.lightning's strategies before any process starts, and their texts.

import importlib

import pytest

import gossamer as gs

pytest.importorskip("lightning.pytorch")
lightning = pytest.importorskip("gossamer.lightning")

TAKERS = {
    "pytorch": ("lightning.pytorch", "Trainer"),
    "fabric": ("lightning.fabric", "Fabric"),
    "pytorch_lightning": ("pytorch_lightning", "Trainer"),
    "lightning_fabric": ("lightning_fabric", "Fabric"),
}


def taken_by(module: str, strategy):
    package, name = TAKERS[module]
    return getattr(pytest.importorskip(package), name)(strategy=strategy, accelerator="cpu", devices=1)


@pytest.mark.parametrize("module", TAKERS)
def test_a_name_that_gossamer_does_not_have_is_refused_with_those_that_it_has(module) -> None:
    names = "gossamer, gossamer_async, gossamer_bytegrad, .*_zero_one_adam; and each with _spawn, _fork or _notebook"
    with pytest.raises(
        gs.ConfigError, match=f"'gossamer_bytegard'; did you mean 'gossamer_bytegrad'.*{names}"
    ):
        taken_by(module, "gossamer_bytegard")
    with pytest.raises(ValueError, match=f"invalid strategy name 'Gossamer_xyz'; Gossamer's are {names}"):
        taken_by(module, "Gossamer_xyz")
    with pytest.raises(ValueError, match=r"invalid strategy name: `strategy='no_such'`"):
        taken_by(module, "no_such")  # Lightning's own text
    taken_by(module, "Gossamer_ByteGrad_Spawn")


@pytest.mark.parametrize("mine", TAKERS)
@pytest.mark.parametrize("other", TAKERS)
def test_a_class_of_another_package_is_refused_with_the_import_of_the_right_one(mine, other) -> None:
    def strategy():
        kind = importlib.import_module(f"gossamer.lightning.{other}").GossamerStrategy
        return type("Mine", (kind,), {})()

    if mine == other:
        taken_by(mine, strategy())
        return
    text = f"got GossamerStrategy of gossamer.lightning.{other}; write `from gossamer.lightning.{mine} import Gossa"
    with pytest.raises(gs.ConfigError, match=text):
        taken_by(mine, strategy())


def test_fabric_names_the_one_class_that_it_has() -> None:
    with pytest.raises(gs.ConfigError, match=r"got BaguaStrategy .*fabric import GossamerStrategy`"):
        taken_by("fabric", lightning.BaguaStrategy())


def test_wrong_arguments_are_refused_before_any_process_starts() -> None:
    with pytest.raises(gs.ConfigError, match="must be an Algorithm object or one of"):
        lightning.GossamerStrategy("nonsense")
    with pytest.raises(gs.ConfigError, match="arguments of an algorithm need its name"):
        lightning.GossamerStrategy(gs.ByteGrad(), average=False)
    with pytest.raises(TypeError, match="unexpected"):
        lightning.GossamerStrategy("bytegrad", unexpected=1)
    with pytest.raises(gs.ConfigError, match="algorithm must be one of gradient_allreduce, bytegrad"):
        lightning.BaguaStrategy("powersgd")
    with pytest.raises(TypeError, match="unexpected"):
        lightning.BaguaStrategy("bytegrad", unexpected=1)
    with pytest.raises(TypeError, match="unexpected"):
        lightning.DDPStrategy(unexpected=1)
    with pytest.raises(gs.ConfigError, match="ddp_comm_state and ddp_comm_wrapper needs a ddp_comm_hook"):
        lightning.DDPStrategy(ddp_comm_state=object(), ddp_comm_wrapper=print)
    with pytest.raises(gs.ConfigError, match="need each other, got 4 and None"):
        lightning.DDPStrategy(model_averaging_period=4)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: lightning.DDPStrategy(find_unused_params=True),
            "DDPStrategy: other arguments must be those of DistributedDataParallel, got find_unused_params=True; "
            "did you mean find_unused_parameters",
        ),
        (lambda: lightning.DDPStrategy(time_out=3), "time_out=3; did you mean timeout"),
        (lambda: lightning.DDPStrategy(device_ids=[0]), "device_ids=.0.; the strategy gives that one itself"),
        (
            lambda: lightning.BaguaStrategy("qadam", foo=2),
            "BaguaStrategy: other arguments must be those of QAdamAlgorithm, got foo=2; it has hierarchical$",
        ),
        (lambda: lightning.BaguaStrategy("qadam", hierachical=True), "did you mean hierarchical"),
        (lambda: lightning.BaguaStrategy("async", warmup_step=3), "warmup_step=3; did you mean warmup_steps"),
        (lambda: lightning.BaguaStrategy(flaten=True), "did you mean flatten"),
    ],
)
def test_an_argument_that_nobody_has_is_a_type_error_with_the_nearest_one(make, text) -> None:
    with pytest.raises(TypeError, match=text):
        make()


def test_arguments_that_the_other_class_has_are_taken() -> None:
    lightning.BaguaStrategy("qadam", hierarchical=False)
    lightning.BaguaStrategy("async", warmup_steps=3)
    lightning.DDPStrategy(find_unused_parameters=True, static_graph=True)
