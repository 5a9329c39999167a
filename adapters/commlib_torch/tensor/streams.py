"""Random streams of PyTorch: equal draws for unsharded tensors, different draws for sharded ones.

PyTorch's own generator is the shared stream: give all ranks of a tensor-parallel axis the same seed (`seed`). A draw
for a sharded tensor takes one number from it on every rank, and continues in a stream of this rank. Code that saves and
restores PyTorch's state, such as `torch.utils.checkpoint`, thereby handles all streams.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from commlib.mesh_groups import Mesh
from commlib.sharding.axis import AxisRanks, ParallelAxis, axis_of
from commlib.tensor_parallel.streams import fold, seed_at
from commlib_torch._graph_breaks import disable_compile

__all__ = ["divided", "draw", "dropout", "seed"]


def seed(mesh: Mesh, number: int, same: Collection[str] = ("tp",)) -> int:
    """Seed PyTorch's generators: the same on all ranks along the axes `same` of the mesh, otherwise different.

    Returns this rank's seed. Pass the same number on every rank.

    Args:
        mesh: The mesh.
        number: The seed, the same on every rank.
        same: Names of axes along which ranks draw the same numbers.
    """
    derived = seed_at(number, mesh.shape.coordinates(mesh.comm.rank), same)
    torch.manual_seed(derived)
    return derived


@disable_compile
def draw(ranks: AxisRanks, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for a tensor sharded along an axis, a new one at each call.

    It takes one number from PyTorch's own generator, so all ranks of the axis must call this alike.

    Args:
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        device: The device of the generator.
    """
    return torch.Generator(device).manual_seed(_own_seed(axis_of(ranks, "draw")))


@contextmanager
def divided(ranks: AxisRanks, device: torch.device | str = "cpu") -> Iterator[None]:
    """Use this rank's stream as PyTorch's generator of a device within the context; restore it afterwards.

    For functions that accept no generator, such as `F.scaled_dot_product_attention`. On an axis of one rank nothing
    changes.

    Args:
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        device: The device whose generator is used.
    """
    shared = axis_of(ranks, "divided")
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


@disable_compile
def dropout(x: Tensor, p: float, training: bool, ranks: AxisRanks) -> Tensor:
    """Return `F.dropout(x, p, training)` of a tensor sharded along an axis, with a different mask on each rank.

    Args:
        x: This rank's shard.
        p: The share of elements that is dropped.
        training: Whether anything is dropped.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
    """
    if not training or p == 0:
        return x
    with divided(ranks, x.device):
        return torch.nn.functional.dropout(x, p, True)


def _own_seed(axis: ParallelAxis) -> int:
    return fold(int(torch.randint(1 << 62, (), device="cpu")), axis.rank)


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[
        module.current_device() if device.index is None else device.index
    ]
    return generator
