"""Symmetric memory: finding places, keeping memory alive, giving it back together."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from commlib.buffers.symmetric_memory import SymmetricMemory
from tests.bodies.loopback import run


class Memory:
    """Shared memory of two ranks in one process, seen by rank 1."""

    closed = False

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.parts = nbytes, [np.zeros(nbytes + 64, np.uint8) for _ in range(2)]
        self.bases = [(part.ctypes.data + 63) // 64 * 64 for part in self.parts]

    def close(self) -> None:
        self.closed = True


class Group:
    """A group seen by rank 1; `others_dead` holds the arrays that rank 0 reports as freed."""

    def __init__(self) -> None:
        self.memories: list[Memory] = []
        self.others_dead: set[int] | None = None  # None: the same as this rank

        def share(nbytes: int) -> Memory:
            self.memories.append(Memory(nbytes))
            return self.memories[-1]

        def agree(dead: Any) -> list[Any]:
            return [dead if self.others_dead is None else self.others_dead, dead]

        self.symmetric = SymmetricMemory(1, share, agree)


def place(group: Group, array: Any) -> Any:
    return group.symmetric.find(array.ctypes.data, array.nbytes)


def test_an_address_has_a_place():
    group = Group()
    first, second = group.symmetric.allocate(1000), group.symmetric.allocate(500)
    for array, memory in ((first, group.memories[0]), (second, group.memories[1])):
        number, addresses = place(group, array)
        assert addresses == memory.bases and addresses[1] == array.ctypes.data
        assert place(group, array[100:300]) == (number + 100, [base + 100 for base in memory.bases])
        assert place(group, array[len(array) - 1 :])[1] == [base + len(array) - 1 for base in memory.bases]
    assert place(group, first)[0] != place(group, second)[0]


def test_other_memory_has_no_place():
    group = Group()
    assert place(group, np.zeros(10)) is None
    x = group.symmetric.allocate(1000)
    assert place(group, np.zeros(10)) is None
    start = x.ctypes.data
    for address, nbytes in ((start - 1, 10), (start - 1, 1), (start + 991, 10), (start, 1001), (start + 1000, 1)):
        assert group.symmetric.find(address, nbytes) is None, (address - start, nbytes)


def test_a_view_keeps_the_segment():
    group = Group()
    view = group.symmetric.allocate(1000)[10:20].view(np.int16)[1:]
    gc.collect()
    group.symmetric.allocate(1)
    assert not group.memories[0].closed
    assert place(group, view) is not None
    del view
    gc.collect()
    group.symmetric.allocate(1)
    assert group.memories[0].closed


def test_a_segment_is_released_only_when_all_ranks_have_dropped_it():
    group = Group()
    group.symmetric.allocate(1000)
    gc.collect()
    group.others_dead = set()
    group.symmetric.allocate(1)
    assert not group.memories[0].closed
    group.others_dead = None
    gc.collect()
    group.symmetric.allocate(1)
    assert group.memories[0].closed


def test_close_keeps_memory_that_an_array_uses():
    """It was unmapped under the array: the next access ended the process."""
    group = Group()
    x, dead = group.symmetric.allocate(1000), group.symmetric.allocate(1000)
    assert place(group, x) is not None
    del dead
    gc.collect()
    group.symmetric.close()
    assert [memory.closed for memory in group.memories] == [False, True]
    assert place(group, x) is None
    x[:] = 1


def test_empty_arrays_have_no_place():
    group = Group()
    assert group.symmetric.allocate(0).shape == (0,)


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 0, 1]])
def test_a_communicator_has_symmetric_memory(nodes):
    def check(comm):
        x = comm.empty((30, 100), "float32")
        assert x.shape == (30, 100) and not x.any() and x.ctypes.data % 64 == 0
        x[:] = comm.rank
        comm.all_reduce(x, out=x)
        assert (x == 3).all()
        assert comm.empty((), "int8").shape == () and comm.empty(0).shape == (0,)
        assert comm.empty(np.int64(3)).shape == comm.empty(3).shape == (3,)

    run(3, check, nodes=nodes)
