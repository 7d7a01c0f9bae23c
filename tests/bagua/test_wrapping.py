"""gossamer.bagua: what with_bagua() copies, ignores, replaces and refuses; patch(). Ranks are threads."""

import copy

import pytest
import torch
from torch import nn

import gossamer as gs
import gossamer.bagua
import gossamer.bagua.torch_api as bagua
from gossamer.bagua.torch_api.algorithms import bytegrad, decentralized, gradient_allreduce
from gossamer.bagua.torch_api.data_parallel import DistributedDataParallel
from tests.support.bagua_algorithms import MeanGradients, Of
from tests.support.models import batches, flat_weights, mlp, seeded, shard, square
from tests.support.ranks import run_ranks


def steps(model, optimizer, comm, count):
    for batch in batches(count):
        optimizer.zero_grad()
        square(model(shard(batch, comm))).backward()
        optimizer.step()


def test_buffers_and_optimizer_state_come_from_rank_0():
    def body(comm):
        model = nn.Sequential(seeded(lambda: nn.Linear(3, 2), seed=comm.rank), nn.BatchNorm1d(2))
        model[1].running_mean.fill_(comm.rank + 1.0)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.1 * (comm.rank + 1), betas=(0.5 + comm.rank / 10, 0.9)
        )
        for _ in range(comm.rank + 1):
            model(torch.randn(4, 3) + comm.rank).square().sum().backward()
            optimizer.step()
        algorithm = gradient_allreduce.GradientAllReduceAlgorithm()
        bagua.with_bagua(model, [optimizer], algorithm, process_group=comm)
        model.bagua_ddp.close()
        return copy.deepcopy(optimizer.state_dict()), model[1].running_mean.clone()

    results = run_ranks(3, body)
    reference, mean = results[0]
    assert reference["param_groups"][0]["betas"] == (0.5, 0.9)
    for state, other_mean in results:
        assert torch.equal(mean, other_mean)
        assert state["param_groups"] == reference["param_groups"]
        for index, values in reference["state"].items():
            assert all(torch.equal(values[key], state["state"][index][key]) for key in values)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.2),
        lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9, weight_decay=0.1),
        lambda params: torch.optim.Adam(params, lr=0.2, weight_decay=0.1),
        lambda params: torch.optim.Rprop(params, lr=0.2),
    ],
    ids=["SGD", "momentum", "Adam", "Rprop"],
)
def test_ranks_that_have_trained_alone_get_the_weights_and_optimizer_state_of_rank_0(make):
    def body(comm):
        module = seeded(mlp, seed=comm.rank)
        optimizer = make(module.parameters())
        for batch in batches(5):
            optimizer.zero_grad()
            square(module(batch + comm.rank)).backward()
            optimizer.step()
        own = copy.deepcopy([module.state_dict(), optimizer.state_dict()])
        algorithm = decentralized.DecentralizedAlgorithm()
        model = DistributedDataParallel(
            module, optimizers=[optimizer], algorithm=algorithm, process_group=comm
        )
        got = copy.deepcopy([module.state_dict(), optimizer.state_dict()])
        model.inner.close()
        return own, got

    results = run_ranks(4, body)
    for _, got in results:
        torch.testing.assert_close(got, results[0][0], rtol=0, atol=0)


def test_optimizer_state_on_one_rank_alone_is_refused_on_all():
    def body(comm):
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if comm.rank == 0:
            square(model(batches(1)[0])).backward()
            optimizer.step()
        bagua.with_bagua(
            model, [optimizer], gradient_allreduce.GradientAllReduceAlgorithm(), process_group=comm
        )

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert "the optimizers' state differs between ranks" in str(error)
        assert "momentum_buffer" in str(error)


def test_ignored_parameters_and_buffers_stay_the_ranks_own():
    def body(comm):
        model = seeded(
            lambda: nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), seed=comm.rank
        )
        model[1].running_mean.fill_(comm.rank)
        model._bagua_params_and_buffers_to_ignore = ["0.weight", "1.running_mean"]
        model._ddp_params_and_buffers_to_ignore = ["2.bias"]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (comm.rank + 1))
        own = model[0].weight.detach().clone()
        algorithm = gradient_allreduce.GradientAllReduceAlgorithm()
        bagua.with_bagua(model, [optimizer], algorithm, process_group=comm)
        assert torch.equal(model[0].weight, own)
        assert model[1].running_mean[0].item() == comm.rank
        assert [name for name, _ in model.bagua_ddp.bagua_build_params()] == [
            "0.bias",
            "1.weight",
            "1.bias",
            "2.weight",
        ]
        assert sorted(name for bucket in model.bagua_buckets for name in bucket.names) == [
            "0.bias",
            "1.bias",
            "1.weight",
            "2.weight",
        ]
        square(model(torch.randn(6, 10))).backward()
        model.bagua_ddp.close()
        return model[0].weight.grad, model[2].weight.grad

    first, second = run_ranks(2, body)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize(
    "algorithm", [gradient_allreduce.GradientAllReduceAlgorithm, lambda: Of(MeanGradients)]
)
def test_the_model_has_what_baguas_modules_had(algorithm):
    def body(comm):
        model = seeded(mlp, seed=comm.rank)
        model._bagua_params_and_buffers_to_ignore = ["0.weight", "2.bias"]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):  # wrapping again counts anew
            bagua.with_bagua(model, [optimizer], algorithm(), process_group=comm)
            assert model.bagua_train_step_counter == 0
            steps(model, optimizer, comm, 3)
            model.eval()(torch.randn(2, 10))
            model.train()
            assert model.bagua_train_step_counter == model.bagua_ddp.bagua_train_step_counter == 3
        assert model.parameters_to_ignore == ["0.weight", "2.bias"]
        left = [name for name, _ in model.named_parameters() if name not in model.parameters_to_ignore]
        assert [name for name, _ in model.bagua_build_params()] == left
        model.bagua_ddp.close()

    run_ranks(2, body)


def test_ignoring_what_the_model_does_not_have_is_refused():
    def body(comm):
        model = mlp()
        model._bagua_params_and_buffers_to_ignore = ["0.weihgt"]
        bagua.with_bagua(model, [], gradient_allreduce.GradientAllReduceAlgorithm(), process_group=comm)

    with pytest.raises(
        gs.ConfigError, match=r"must name parameters or buffers of the model, got \['0.weihgt'\]"
    ):
        run_ranks(1, body)


def test_calling_again_switches_the_algorithm():
    def body(comm):
        model = seeded(mlp, seed=comm.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.bagua_module_name = "mine"
        bagua.with_bagua(model, [optimizer], decentralized.DecentralizedAlgorithm(), process_group=comm)
        steps(model, optimizer, comm, 3)
        first = model.bagua_ddp
        bagua.with_bagua(
            model, [optimizer], gradient_allreduce.GradientAllReduceAlgorithm(), process_group=comm
        )
        steps(model, optimizer, comm, 3)
        assert model.bagua_ddp is not first
        assert first.bagua_train_step_counter == 3
        assert model.bagua_module_name == model.bagua_ddp.bagua_module_name == "mine"
        model.bagua_ddp.close()
        return flat_weights(model)

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


@pytest.mark.parametrize("asked", ["argument", "environment"])
def test_a_model_is_tuned_if_asked(asked, monkeypatch):
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1" if asked == "environment" else "0")
    options = {} if asked == "environment" else {"autotune": gs.Autotune(bucket_bytes=[1000])}

    def body(comm):
        model = seeded(mlp, seed=comm.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        algorithm = bytegrad.ByteGradAlgorithm(hierarchical=False)
        bagua.with_bagua(model, [optimizer], algorithm, process_group=comm, bucket_bytes=100, **options)
        assert model.bagua_ddp.tuned is None
        for _ in range(10):
            steps(model, optimizer, comm, 20)
        tuned = model.bagua_ddp.tuned
        assert {100} < {size for size, _, _ in tuned.tried}
        model.bagua_ddp.close()
        return flat_weights(model), tuned

    (first, tuned), (second, same) = run_ranks(2, body)
    assert torch.equal(first, second)
    assert tuned == same


def test_algorithms_in_hooks_are_not_tuned(monkeypatch):
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")

    def body(comm):
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(gs.ConfigError, match="got MeanGradients; unset BAGUA_AUTOTUNE"):
            bagua.with_bagua(model, [optimizer], Of(MeanGradients), process_group=comm)
        bagua.with_bagua(model, [optimizer], Of(MeanGradients), process_group=comm, autotune=False)
        model.bagua_ddp.close()

    run_ranks(2, body)


def test_communication_hooks_are_not_tuned(monkeypatch):
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")

    def body(comm):
        model = DistributedDataParallel(seeded(mlp), process_group=comm)
        with pytest.raises(gs.ConfigError, match="got CommHook; unset BAGUA_AUTOTUNE"):
            model.register_comm_hook(None, lambda state, bucket: None)
        model.inner.close()

    run_ranks(2, body)


def test_a_model_with_an_algorithm_is_not_copied_with_it():
    def body(comm):
        model = mlp()
        bagua.with_bagua(model, [], gradient_allreduce.GradientAllReduceAlgorithm(), process_group=comm)
        with pytest.raises(gs.ConfigError, match="cannot be copied or pickled as a whole"):
            copy.deepcopy(model)
        model.bagua_ddp.close()

    run_ranks(1, body)


def test_patch_adds_methods_until_unpatch():
    before = {kind: set(vars(kind)) for kind in (nn.Module, torch.Tensor)}
    gossamer.bagua.patch()
    gossamer.bagua.patch()
    try:

        def body(comm):
            model = mlp()
            algorithm = gradient_allreduce.GradientAllReduceAlgorithm()
            assert model.with_bagua([], algorithm, process_group=comm) is model
            model.bagua_ddp.close()

        run_ranks(1, body)
        x = torch.ones(3)
        assert not x.is_bagua_tensor()
        assert not hasattr(x, "bagua_tensor_name")
        assert x.ensure_bagua_tensor("x", "m") is x
        assert (x.bagua_tensor_name, x.bagua_module_name) == ("x", "m")
        assert x.bagua_getter_closure() is x
    finally:
        gossamer.bagua.unpatch()
        gossamer.bagua.unpatch()
    assert {kind: set(vars(kind)) for kind in before} == before
    nn.Module.with_bagua = "of somebody else"
    try:
        with pytest.raises(gs.ConfigError, match="Module has a with_bagua already"):
            gossamer.bagua.patch()
        assert set(vars(torch.Tensor)) == before[torch.Tensor]
    finally:
        del nn.Module.with_bagua
