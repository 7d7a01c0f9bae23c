"""Shows in TensorBoard where the time of a step goes: the loss, and the figures of model.report().

    gossamer run -np 2 examples/train_tensorboard.py --logdir runs
    tensorboard --logdir runs

Needs `pip install tensorboard`.
"""

import argparse

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import gossamer as gs

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--logdir", default="runs", help="folder for TensorBoard (default: runs)")
logdir = parser.parse_args().logdir

gs.init()
torch.manual_seed(gs.rank())  # each rank draws its own data; the model is copied from rank 0
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model = gs.DataParallel(model, optimizer, algorithm="bytegrad")
writer = SummaryWriter(logdir) if gs.rank() == 0 else None

for step in range(1, 201):
    inputs = torch.randn(64, 8)
    loss = nn.functional.mse_loss(model(inputs), inputs[:, :2].prod(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 and writer is not None:
        report = model.report(reset=True)  # medians of the last 50 steps of this rank
        for name, value in {"loss": loss.item(), **report.scalars()}.items():
            writer.add_scalar(name, value, step)
        print(f"step {step}: loss {loss.item():.4f}, {report['step_ms']:.2f} ms a step")

if writer is not None:
    writer.close()
model.close()
gs.shutdown()
