"""Accelerate with 8-bit gradients.

    gossamer run -np 2 examples/accelerate_training.py

`accelerate launch` and torchrun start it too. One line of Gossamer replaces accelerator.prepare(model).
"""

import torch
from accelerate import Accelerator

import gossamer as gs

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(
    accelerator.device
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
inputs = torch.randn(256, 16)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))

# With evaluation_mode=True accelerate does not wrap the model in torch DDP.
model = accelerator.prepare_model(
    gs.DataParallel(model, optimizer, algorithm="bytegrad"), evaluation_mode=True
)
optimizer, loader = accelerator.prepare(
    optimizer, torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
)

for epoch in range(10):
    for batch, target in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(batch), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}")
model.close()
