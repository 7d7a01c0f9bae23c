"""Parameters of many shapes with an optimizer, for the tests of fuse_optimizer, and a comparison of two of them."""

import torch
from torch import nn, optim

SHAPES = [(5,), (3, 7), (1,), (33,), (8, 8), (13, 3, 3), (0,), (100,), (257,), (), (31,)]
F32, F64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def build(kind, options, dtypes=(F32,)) -> tuple[list[nn.Parameter], optim.Optimizer]:
    """Parameters of all shapes, in two groups with a learning rate each."""
    generator = torch.Generator().manual_seed(0)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=F64).to(dtypes[index % len(dtypes)]))
        for index, shape in enumerate(SHAPES)
    ]
    half = len(params) // 2
    return params, kind([{"params": params[:half]}, {"params": params[half:], "lr": 0.02}], **options)


def give_gradients(params, step, *, holes=True) -> None:
    """Sets new gradient tensors. With holes, every ninth parameter has none; which ones changes each step."""
    generator = torch.Generator().manual_seed(step)
    for index, param in enumerate(params):
        gradient = torch.randn(param.shape, generator=generator, dtype=F64).to(param.device, param.dtype)
        param.grad = None if holes and (step + index) % 9 == 0 else gradient


def assert_same(one, other) -> None:
    """Parameters and optimizer states, bit for bit."""
    for index, (mine, theirs) in enumerate(zip(one[0], other[0], strict=True)):
        assert torch.equal(mine, theirs), f"parameter {index} of {mine.dtype}"
    mine, theirs = one[1].state_dict(), other[1].state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert mine["state"][index].keys() == state.keys()
        for key, value in state.items():
            got = mine["state"][index][key]
            same = torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value
            assert same, f"{key} of parameter {index}"
            assert getattr(got, "shape", None) == getattr(value, "shape", None), f"{key} of parameter {index}"


def runs_of(optimizer) -> list[int]:
    """The numbers of parameters that the last fuse_step() joined."""
    return [len(run.params) for runs in optimizer._gossamer_fusion.runs for run in runs]
