"""What docs/security.md says of torch and of pickles: statements that a new torch, or a new way of sending, would make
wrong."""

import contextlib
import os
import pickle
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
)

from tests import ROOT

RUN = ["-m", "gossamer.launch.cli", "run"]
TLS = """
import os, torch.distributed as dist
try:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
except RuntimeError as error:
    print(error)
"""
TRAIN = """
import pickle, torch, torch.distributed.distributed_c10d as c10d, gossamer as gs

class Refusing:
    def __init__(self, *arguments, **keywords):
        raise AssertionError("something was unpickled")

pickle.loads = pickle.load = pickle.Unpickler = c10d._unpickler = Refusing
gs.init()
gs.all_reduce(torch.ones(100), codec=gs.Int8())
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
model = gs.DataParallel(model, optimizer, algorithm=gs.ByteGrad())
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
model.consensus()
model.close()
try:
    torch.distributed.all_gather_object([None, None], 1)
except AssertionError as error:
    print("the control:", error)
gs.shutdown()
"""


def test_torchs_gloo_has_no_tls(fork, tmp_path) -> None:
    (tmp_path / "tls.py").write_text(TLS)
    keys = {
        f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{name}": str(tmp_path / name) for name in ("PKEY", "CERT", "CA_FILE")
    }
    code, out, err = fork(["tls.py"], env={"GLOO_DEVICE_TRANSPORT": "TCP_TLS", **keys}).finish()
    assert code == 0, err
    message = "makeDeviceForHostname(): unsupported gloo device"
    assert message in out
    assert message in (ROOT / "docs" / "security.md").read_text()


def test_init_training_and_collectives_unpickle_nothing(fork, tmp_path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    code, out, err = fork([*RUN, "-np", "2", "train.py"]).finish()
    assert code == 0, out + err
    assert out.count("the control: something was unpickled") == 2


class Program:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_the_metadata_of_a_distributed_checkpoint_can_run_code(tmp_path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Program(tmp_path / "made")))
    with contextlib.suppress(Exception):
        FileSystemReader(tmp_path).read_metadata()
    assert (tmp_path / "made").is_dir()


def test_who_writes_into_the_store_of_torchruns_c10d_rendezvous_can_run_code_in_its_agents(tmp_path) -> None:
    store = dist.HashStore()
    backend = C10dRendezvousBackend(store, "run")
    backend.set_state(pickle.dumps(Program(tmp_path / "made")))
    settings = RendezvousSettings("run", 1, 1, RendezvousTimeout(), timedelta(seconds=1), 1)
    with contextlib.suppress(Exception):
        _BackendRendezvousStateHolder(backend, settings).sync()
    assert (tmp_path / "made").is_dir()
