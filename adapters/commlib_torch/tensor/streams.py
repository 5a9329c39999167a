"""Random streams of PyTorch: draw the same where a tensor is whole, and otherwise where it is divided.

PyTorch's own generator is the shared stream: give all ranks of a tensor-parallel axis the same seed (`seed`). A draw
for what is divided takes one number of it, on every rank, and goes on from there in a stream of this rank. Whoever
saves and restores PyTorch's state, as `torch.utils.checkpoint` does, so has all streams.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from commlib.errors import UsageError
from commlib.mesh_groups import Mesh
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.streams import fold, seed_at
from commlib_torch._uncompiled import uncompiled
from commlib_torch.tensor.moves import On, axis_of


def seed(mesh: Mesh, number: int, same: Collection[str] = ("tp",)) -> int:
    """Seed PyTorch's generators: the same on all ranks along the axes `same` of the mesh, else different ones.

    Returns this rank's seed. Every rank gives the same number.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise UsageError(f"seed: expected a whole number from 0 on, got {number!r}")
    found = seed_at(number, mesh.shape.coordinates(mesh.comm.rank), same)
    torch.manual_seed(found)
    return found


@uncompiled
def draw(axis: On, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for what is divided among the ranks of an axis, another one at each call.

    It takes one number of PyTorch's own generator, so all ranks of the axis call this alike.
    """
    return torch.Generator(device).manual_seed(_own_seed(axis_of(axis)))


@contextmanager
def divided(axis: On, device: torch.device | str = "cpu") -> Iterator[None]:
    """Let PyTorch's generator of a device be this rank's own stream inside, and go on as before afterwards.

    For functions that take no generator, such as `F.scaled_dot_product_attention`. On an axis of one rank nothing is
    divided, and nothing changes.
    """
    shared = axis_of(axis)
    if shared.size == 1:
        yield
        return
    number, generator = _own_seed(shared), _generator_of(torch.device(device))
    before = generator.get_state()
    generator.manual_seed(number)
    try:
        yield
    finally:
        generator.set_state(before)


@uncompiled
def dropout(x: Tensor, p: float, training: bool, axis: On) -> Tensor:
    """Return `F.dropout(x, p, training)` of what is divided among the ranks of an axis: with another mask on each."""
    if not training or p == 0:
        return x
    with divided(axis, x.device):
        return torch.nn.functional.dropout(x, p, True)


def _own_seed(axis: Axis) -> int:
    return fold(int(torch.randint(1 << 62, (), device="cpu")), axis.rank)


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    found: torch.Generator = module.default_generators[
        module.current_device() if device.index is None else device.index
    ]
    return found
