"""Averages a tensor over all workers, once exactly and once in 8 bits, and compares the two.

    gossamer run -np 2 examples/all_reduce.py

The call changes the tensor in place. Every rank ends with the same bits, with a codec too.
"""

import torch

import gossamer as gs

gs.init()
torch.manual_seed(gs.rank())
mine = torch.randn(1_000_000)

exact, rounded = mine.clone(), mine.clone()
gs.all_reduce(exact, op="mean")
gs.all_reduce(rounded, op="mean", codec=gs.Int8())

error = (rounded - exact).norm() / exact.norm()
where = f"rank {gs.rank()}/{gs.size()}"
print(f"{where}: relative error of the 8-bit mean {error:.2%}, first value {rounded[0]:.7f}")
gs.shutdown()
