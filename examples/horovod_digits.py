"""Handwritten digits in Horovod's own style: a small CNN on scikit-learn's 8 x 8 images.

    gossamer run -np 2 examples/horovod_digits.py
    gossamer run -np 2 examples/horovod_digits.py --compression fp16 --use-adasum

Only the import of hvd differs from a script for Horovod. Under `gossamer run --as-horovod` it may stay
`import horovod.torch as hvd`.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gossamer.horovod.torch as hvd

COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16, "bf16": hvd.Compression.bf16}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A CNN on 8 x 8 digits")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.05, help="of one rank")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compression", choices=COMPRESSIONS, default="none")
    parser.add_argument("--use-adasum", action="store_true", help="combine the ranks' steps by Adasum")
    return parser.parse_args()


class Net(nn.Sequential):
    """Returns logits [N, 10] for images [N, 1, 8, 8]."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns 1500 images to train with, and 297 to test with."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    targets = torch.tensor(labels)
    return TensorDataset(inputs[:1500], targets[:1500]), TensorDataset(inputs[1500:], targets[1500:])


def average(value: float, name: str) -> float:
    """Returns the mean over the ranks."""
    return float(hvd.allreduce(torch.tensor(value), name=name))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, device: torch.device
) -> float:
    """Trains one epoch on this rank's part of the data. Returns the mean loss of all ranks."""
    model.train()
    total = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        total += loss.item()
    return average(total / len(loader), "train_loss")


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Returns the share of the images that the model recognises, over all ranks."""
    model.eval()
    right = count = 0
    for inputs, targets in loader:
        right += int((model(inputs.to(device)).argmax(1).cpu() == targets).sum())
        count += len(targets)
    return average(right / count, "accuracy")


def main() -> None:
    args = arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")

    training, testing = digits()
    sampler = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(training, args.batch_size, sampler=sampler)
    test_sampler = DistributedSampler(testing, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    test_loader = DataLoader(testing, args.batch_size, sampler=test_sampler)

    model = Net().to(device)
    # The batch of all ranks is hvd.size() times as large. Adasum finds the length of its steps by itself.
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=COMPRESSIONS[args.compression],
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train(model, optimizer, loader, device)
        accuracy = test(model, test_loader, device)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
