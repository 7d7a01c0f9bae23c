"""The codecs and dtypes for tests of all codecs, on CPU and GPU. Not a test file."""

import torch

import gossamer as gs

CODECS = [
    gs.Identity(),
    gs.Int8(),
    gs.Int8(256),
    gs.Int8(stochastic=True),
    gs.Int4(),
    gs.Int4(64, stochastic=True, seed=7),
    gs.Int2(),
    gs.OneBit(),
    gs.MinMaxUInt8(),
    gs.BF16(),
    gs.FP16(),
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
