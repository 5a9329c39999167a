"""Shared segments: mapped by all, named by nobody, told of by all when one cannot be had, and gone when dropped."""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from commlib.errors import TransportError
from commlib.transport import segment


def everywhere(size, function):
    """Return what `function(rank, gather)` returns or raises on each of some threads."""
    values: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def gather(rank, value):
        values[rank] = value
        barrier.wait(10)
        gathered = list(values)
        barrier.wait(10)
        return gathered

    def run(rank):
        try:
            return function(rank, lambda value: gather(rank, value))
        except TransportError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def array(address, count):
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)


def files():
    return [name for name in os.listdir(segment.FOLDER) if name.startswith(f"commlib-{os.getpid()}-")]


def mappings():
    return Path("/proc/self/maps").read_text().count(f"commlib-{os.getpid()}-")


def test_all_see_what_one_writes_and_no_file_is_left():
    before = mappings()
    made = everywhere(3, lambda rank, gather: segment.share(rank, 5000, gather))
    assert [len(shared.bases) for shared in made] == [3, 3, 3]
    assert len({base for shared in made for base in shared.bases}) == 9
    assert all(base % 64 == 0 for shared in made for base in shared.bases)
    for rank, shared in enumerate(made):
        assert not array(shared.bases[rank], 5000).any()
        array(shared.bases[rank], 5000)[:] = rank + 1
    for shared in made:
        assert [set(array(base, 5000)) for base in shared.bases] == [{1}, {2}, {3}]
    assert files() == []
    assert mappings() == before + 9
    made[0].close()
    assert mappings() == before + 6
    del made, shared
    assert mappings() == before


def test_it_takes_no_descriptors():
    before = len(os.listdir("/proc/self/fd"))
    made = everywhere(4, lambda rank, gather: segment.share(rank, 100, gather))
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(made) == 4


def test_too_little_memory_is_told_on_all_ranks():
    """A file with holes would be mapped well, and end the process when it is written."""
    before = mappings()
    for error in everywhere(2, lambda rank, gather: segment.share(rank, 1 << 60, gather)):
        assert isinstance(error, TransportError)
        assert "cannot share 1152921504606846976 bytes of memory on each of 2 ranks" in str(error)
        assert "rank 0 of the node: " in str(error) and "rank 1 of the node: " in str(error)
        assert "--shm-size" in str(error)
    assert files() == []
    assert mappings() == before


def test_one_rank_that_sees_another_folder_is_named_on_all(monkeypatch):
    created = segment._create

    def elsewhere(path, nbytes):
        created(path, nbytes)
        return path if threading.current_thread() is not second[0] else path + "-elsewhere"

    second: list[Any] = [None]
    monkeypatch.setattr(segment, "_create", elsewhere)

    def run(rank, gather):
        if rank == 1:
            second[0] = threading.current_thread()
        return segment.share(rank, 100, gather)

    for error in everywhere(2, run):
        assert isinstance(error, TransportError)
        assert "No such file" in str(error)
        assert "seen by all ranks of the node" in str(error)
    assert files() == []
