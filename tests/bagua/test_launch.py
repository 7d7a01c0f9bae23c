"""python -m gossamer.bagua.distributed.run and .launch: Bagua's flags over `gossamer run`."""

import os

import pytest

from gossamer.errors import ConfigError
from gossamer.launch import bagua, run

SCRIPT = """
import os, sys
import gossamer.bagua.torch_api as bagua
bagua.init_process_group()
print(bagua.get_rank(), bagua.get_world_size(), sys.argv[1:])
print(bagua.get_rank(), "has", bagua.env.get_default_bucket_size(), bagua.env.get_autotune())
"""


def test_a_script_is_started_with_bagua_flags(fork, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = "--nproc_per_node=2 --bagua_service_port 29501 --autotune_level 1 --default_bucket_size 4096"
    arguments = [*flags.split(), "train.py", "--host_list", "of the script"]
    jobs = [fork(["-m", f"gossamer.bagua.distributed.{name}", *arguments]) for name in ("run", "launch")]
    for code, out, err in [job.finish() for job in jobs]:
        assert code == 0, err
        for rank in (0, 1):
            assert f"[{rank}] {rank} 2 ['--host_list', 'of the script']" in out.replace(":", "")
            assert f"{rank} has 4096 True" in out
        assert "no effect, as there is no autotune service: --bagua_service_port" in err


# Programs for Bagua: its documentation's example, and a user's own algorithm.
UNCHANGED = """
import sys
from typing import List

try:
    import bagua.service
except ImportError as error:
    print("refused:", error)
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduce
from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from bagua.torch_api.tensor import BaguaTensor


class MineImpl(AlgorithmImpl):
    def init_tensors(self, bagua_ddp: BaguaDistributedDataParallel) -> List[BaguaTensor]:
        self.tensors = [
            param.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name, lambda p: p.grad, lambda p, t: None)
            for name, param in bagua_ddp.bagua_build_params()
            if param.bagua_ensure_grad() is param
        ]
        return self.tensors

    def init_operations(self, bagua_ddp, bucket):
        bucket.append_centralized_synchronous_op(group=self.process_group)


class Mine(Algorithm):
    def reify(self, process_group):
        return MineImpl(process_group)


def train(algorithm):
    torch.manual_seed(bagua.get_rank())
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = model.with_bagua([optimizer], algorithm, do_flatten=False)
    tensors = [isinstance(param, BaguaTensor) for param in model.parameters()]
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        assert model.bagua_train_step_counter == step + 1
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    group = bagua.communication._get_default_group().get_global_communicator()
    mean = weights.clone()
    bagua.allreduce_inplace(mean, bagua.ReduceOp.AVG, comm=group)
    return tensors, torch.equal(mean, weights)


if __name__ == "__main__":
    bagua.init_process_group()
    import gossamer.bagua.torch_api

    assert bagua is gossamer.bagua.torch_api
    print("trained", train(GradientAllReduce()), train(Mine()), sys.argv[1:])
"""


@pytest.mark.parametrize(
    "command", ["gossamer.launch.cli run -np 2", "gossamer.bagua.distributed.run --nproc_per_node 2"]
)
def test_an_unchanged_bagua_script_runs(command, fork, tmp_path):
    (tmp_path / "train.py").write_text(UNCHANGED)
    (tmp_path / "bagua.py").write_text("raise RuntimeError('the wrong bagua')")
    code, out, err = fork(["-m", *command.split(), "--as-bagua", "train.py", "--lr", "1"]).finish()
    assert code == 0, err
    for rank in (0, 1):
        assert f"[{rank}] trained ([False, False], True) ([True, True], True) ['--lr', '1']" in out
        assert (
            f"[{rank}] refused: bagua.service does not exist under `gossamer run --as-bagua`, which has "
            f"bagua.torch_api and bagua.distributed"
        ) in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host_list", "a,b"], "--host_list is not supported; start the same command on each host"),
        (["--ssh_port", "22"], "--ssh_port is not supported"),
        (["--enable_bagua_net"], "--enable_bagua_net is not supported; NCCL's own transports"),
        (["--set_additional_flag"], "--set_additional_flag is not supported; read LOCAL_RANK"),
        (["--autotune_level", "-1"], "--autotune_level must be at least 0, got -1"),
        (["--default_bucket_size", "0"], "--default_bucket_size must be at least 1 byte, got 0"),
    ],
)
def test_flags_that_cannot_be_met_are_refused(flags, message, monkeypatch, capsys):
    monkeypatch.setattr(run, "main", lambda args: 0)
    args = bagua.build_parser("bagua").parse_args([*flags, "train.py"])
    with pytest.raises(ConfigError, match=message):
        bagua.translate(args)
    assert bagua.main("run", [*flags, "train.py"]) == 1
    assert f"python -m gossamer.bagua.distributed.run: {message}" in capsys.readouterr().err


def test_flags_reach_gossamer_run(monkeypatch):
    seen = []
    monkeypatch.setattr(run, "main", lambda args: seen.append(args) or 7)
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "1")
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")
    places = "--nnodes 2 --node_rank 1 --master_addr host0 --logdir logs"
    flags = f"{places} --default_bucket_size 64 --report_metrics --autotune_level 0"
    assert bagua.main("launch", [*flags.split(), "-m", "train", "--lr", "1"]) == 7
    (args,) = seen
    assert (args.nnodes, args.node_rank, args.master_addr, args.log_dir) == ("2", 1, "host0", "logs")
    assert (args.module, args.training_script, args.training_script_args) == (True, "train", ["--lr", "1"])
    assert os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] == "64"
    assert os.environ["BAGUA_AUTOTUNE"] == "0"
    assert vars(args).keys() == vars(run.build_parser("x").parse_args(["-np", "1", "train"])).keys()
