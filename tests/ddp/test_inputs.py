"""Where gs.DistributedDataParallel puts the arguments of a forward: devices, and containers with tensors in them.

No GPU is needed: devices are only named here. Ranks are threads.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.utils.rnn import pack_sequence

import gossamer as gs
from gossamer.ddp import arguments
from tests.support.models import flat_grads, seeded
from tests.support.stock import run_beside, wrap


class OnCuda:
    """A model for arguments.devices(), which needs no such device."""

    def parameters(self):
        return [SimpleNamespace(device=torch.device("cuda", 1))]


def test_devices_are_named_as_torch_names_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device in (1, "cuda:1", torch.device("cuda:1"), "cuda", torch.device("cuda")):
        assert arguments.devices(OnCuda(), [device], None) == ([1], 1)
    assert arguments.devices(OnCuda(), [1], 0) == ([1], 0)
    assert arguments.devices(OnCuda(), [1], "cuda") == ([1], 1)
    for other in ("cpu", "meta"):
        with pytest.raises(gs.ConfigError, match=f"must be of the model's type cuda, got '{other}'"):
            arguments.devices(OnCuda(), [other], None)
    with pytest.raises(gs.ConfigError, match="must name the model's device .*, got cuda:0"):
        arguments.devices(OnCuda(), [0], None)


def test_inputs_are_moved_with_the_sizes_of_packed_sequences_left_on_the_cpu():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    (moved, kept), named = arguments.moved(((packed, 3), {"x": [packed.data]}), torch.device("meta"))
    assert (moved.data.device.type, moved.batch_sizes.device.type, kept) == ("meta", "cpu", 3)
    assert moved.batch_sizes.tolist() == [2, 1, 1]
    assert named["x"][0].device.type == "meta"


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(2, 3)

    def forward(self, packed):
        return self.cells(packed)[0]


def test_packed_sequences_go_in_and_come_out():
    def body(comm, group):
        gradients = []
        packed = pack_sequence([torch.full((3, 2), comm.rank + 1.0), torch.ones(1, 2)])
        for kind in (Stock, gs.DistributedDataParallel):
            model = wrap(kind, seeded(Recurrent), comm, group, {})
            model(packed).data.square().mean().backward()
            gradients.append(flat_grads(model))
        return gradients

    for theirs, ours in run_beside(2, body):
        assert torch.equal(theirs, ours)
