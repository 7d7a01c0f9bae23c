"""The smallest complete training loop with Gossamer: two workers, 8-bit gradients.

    gossamer run -np 2 examples/train.py

Only the parts that say gs are Gossamer's.
"""

import torch
from torch import nn

import gossamer as gs

gs.init()
torch.manual_seed(gs.rank())  # each rank draws its own data; the model is copied from rank 0
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model = gs.DataParallel(model, optimizer, algorithm="bytegrad")

for step in range(201):
    inputs = torch.randn(64, 8)
    loss = nn.functional.mse_loss(model(inputs), inputs[:, :2].prod(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 and gs.rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

model.close()
gs.shutdown()
