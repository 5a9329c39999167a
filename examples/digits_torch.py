"""Train a small convolutional network on handwritten digits, data-parallel, and compare with one process.

    mpirun -n 2 python examples/digits_torch.py [--device cuda]

Every rank trains on its share of each batch. Afterwards every rank trains the same network again, alone, on full
batches. The weights of both runs must be equal within rounding, because the order of summation differs.
"""

from __future__ import annotations

import argparse
import copy
import sys
import textwrap
import time
from collections.abc import Iterator

import torch
from digits import explain_slowdown, find_load, load_digits
from rich.progress import track
from torch import Tensor, nn

import commlib_torch as ct

BATCH = 96  # of all ranks together; 1, 2, 3, 4, 6 and 8 ranks can share it equally
EPOCHS = 30
TEST = 360  # images kept for the end
MIN_ACCURACY = 0.97
MAX_DIFFERENCE = 1e-5  # relative, float32


def network() -> nn.Module:
    # Tanh and average pooling on purpose: rounding differences stay near 1e-6 over all steps. With ReLU or GELU, or
    # with max-pooling, they grew to several per cent in some runs: equally good networks, but not equal ones.
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1), nn.Tanh(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.Tanh(), nn.Linear(64, 10),
    )  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def digits() -> tuple[Tensor, Tensor]:
    """Return 1797 images [n, 1, 8, 8] of values in [0, 1] and their labels [n], shuffled."""
    images, labels = map(torch.from_numpy, load_digits())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images.unsqueeze(1)[order], labels[order]


def batches(count: int) -> Iterator[Tensor]:
    """Yield the indices of every full batch, in the same order on every rank."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(EPOCHS):
        for batch in torch.randperm(count, generator=generator).split(BATCH):
            if len(batch) == BATCH:
                yield batch


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    *,
    rank: int,
    size: int,
    title: str,
) -> float:
    """Train on share `rank` of `size` of each batch and return the seconds it took."""
    start = time.perf_counter()
    steps = EPOCHS * (len(labels) // BATCH)
    for batch in track(batches(len(labels)), title, total=steps, disable=ct.rank() != 0):
        share = batch.chunk(size)[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[share]), labels[share]).backward()
        optimizer.step()
    return time.perf_counter() - start


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


@torch.no_grad()
def largest_difference(model: nn.Module, reference: nn.Module) -> float:
    """Return the largest max |a - b| / max |b| of all weights a of the model and b of the reference."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="ranks may share a GPU")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    ct.init()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(ct.local_rank() % torch.cuda.device_count())
    if BATCH % ct.size():
        sys.exit(f"{ct.size()} ranks cannot share a batch of {BATCH} equally")
    images, labels = (values.to(device) for values in digits())
    training, testing = (images[:-TEST], labels[:-TEST]), (images[-TEST:], labels[-TEST:])

    torch.manual_seed(ct.rank())  # different weights on each rank ...
    model = network().to(device)
    ct.broadcast_parameters(model.state_dict(), root=0)  # ... until here
    alone = copy.deepcopy(model)

    optimizer = ct.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    total = train(model, optimizer, *training, rank=ct.rank(), size=ct.size(), title=f"{ct.size()} ranks")
    exposed = optimizer.exposed_seconds
    total_alone = train(alone, sgd(alone), *training, rank=0, size=1, title="alone  ")

    right, difference = accuracy(model, *testing), largest_difference(model, alone)
    passed = right > MIN_ACCURACY and difference < MAX_DIFFERENCE
    if ct.rank() == 0:
        print(f"test accuracy        {right:8.2%}    (must be > {MIN_ACCURACY:.0%})")
        print(f"computation          {total - exposed:8.2f} s")
        print(f"exposed waiting      {exposed:8.2f} s  (communication that computation did not hide)")
        print(f"total                {total:8.2f} s")
        print(f"one process alone    {total_alone:8.2f} s  (all ranks at once, each on full batches)")
        print(f"largest difference   {difference:8.1e}    (of the weights, relative; must be < {MAX_DIFFERENCE:.0e})")
        load, cores = find_load()
        if reason := explain_slowdown(ct.size(), total, total_alone, load=load, cores=cores):
            print(textwrap.fill(reason, 100))
        print("equal" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
