"""A training script written for Horovod, on handwritten digits. One line was changed to run it with commlib:

    import horovod.torch as hvd        ->        import commlib_torch.horovod as hvd

    mpirun -n 2 python examples/horovod_torch.py

Its exit code is 0 only if the trained network is accurate, and the same on all ranks.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.nn.functional as F
from digits import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import commlib_torch.horovod as hvd  # was: import horovod.torch as hvd

parser = argparse.ArgumentParser(description="digits with Horovod's API")
parser.add_argument("--batch-size", type=int, default=16, help="per rank")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--lr", type=float, default=0.02, help="per rank")
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half precision")
parser.add_argument("--use-adasum", action="store_true", help="combine steps by Adasum")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--min-accuracy", type=float, default=0.95)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits() -> tuple[TensorDataset, TensorDataset]:
    images, labels = map(torch.from_numpy, load_digits())
    images = images.unsqueeze(1)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return TensorDataset(images[:-360], labels[:-360]), TensorDataset(images[-360:], labels[-360:])


def train(epoch: int, model: nn.Module, optimizer: optim.Optimizer, loader: Any, sampler: Any) -> None:
    model.train()
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
    mean_loss = metric_average(loss.item(), "avg_train_loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch:2d}: loss {mean_loss:.4f}")


def metric_average(value: float, name: str) -> float:
    return float(hvd.allreduce(torch.tensor(value), name=name).item())


@torch.no_grad()
def test(model: nn.Module, loader: Any, sampler: Any) -> float:
    model.eval()
    right = 0.0
    for data, target in loader:
        right += float((model(data).argmax(1) == target).float().sum())
    accuracy = metric_average(right / len(sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.2%}")
    return accuracy


def same_everywhere(model: nn.Module) -> bool:
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = hvd.allgather(weights.unsqueeze(0), name="weights")
    return all(torch.equal(theirs, weights) for theirs in everyone)


def main() -> int:
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())  # different weights on each rank, until the broadcast
    torch.set_num_threads(1)

    train_dataset, test_dataset = digits()
    train_sampler: Any = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler: Any = DistributedSampler(test_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_dataset, batch_size=90, sampler=test_sampler)

    model = Net()
    # Average makes one big batch of the ranks' batches, so the learning rate grows with the number of ranks.
    lr_scaler = 1 if args.use_adasum else hvd.size()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        train(epoch, model, optimizer, train_loader, train_sampler)
    accuracy = test(model, test_loader, test_sampler)
    same = same_everywhere(model)
    if hvd.rank() == 0:
        print(f"weights are {'the same' if same else 'NOT the same'} on {hvd.size()} rank{'s' * (hvd.size() > 1)}")
    return 0 if same and accuracy > args.min_accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
