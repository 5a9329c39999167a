"""Shared segments: mapped by all, unnamed, refused on all ranks if one cannot be allocated, freed when dropped."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from commlib.buffers import available_memory as memory
from commlib.buffers import shared_memory as segment
from commlib.errors import TransportError


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


def test_all_ranks_see_a_write_and_no_file_remains():
    before = mappings()
    segments = everywhere(3, lambda rank, gather: segment.share(rank, 5000, gather))
    assert [len(shared.bases) for shared in segments] == [3, 3, 3]
    assert len({base for shared in segments for base in shared.bases}) == 9
    assert all(base % 64 == 0 for shared in segments for base in shared.bases)
    for rank, shared in enumerate(segments):
        assert not array(shared.bases[rank], 5000).any()
        array(shared.bases[rank], 5000)[:] = rank + 1
    for shared in segments:
        assert [set(array(base, 5000)) for base in shared.bases] == [{1}, {2}, {3}]
    assert files() == []
    assert mappings() == before + 9
    segments[0].close()
    assert mappings() == before + 6
    del segments, shared
    assert mappings() == before


def test_segments_use_no_descriptors():
    before = len(os.listdir("/proc/self/fd"))
    segments = everywhere(4, lambda rank, gather: segment.share(rank, 100, gather))
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(segments) == 4


def test_too_little_memory_is_an_error_on_all_ranks():
    """A sparse file would map without an error, and kill the process at the first write."""
    before = mappings()
    for error in everywhere(2, lambda rank, gather: segment.share(rank, 1 << 60, gather)):
        assert isinstance(error, TransportError)
        assert "cannot share 1152921504606846976 bytes of memory on each of 2 ranks" in str(error)
        assert "rank 0 of the node: " in str(error) and "rank 1 of the node: " in str(error)
        assert "--shm-size" in str(error)
    assert files() == []
    assert mappings() == before


def test_one_rank_that_sees_another_folder_is_named_on_all(monkeypatch):
    created = segment.allocate

    def elsewhere(path, nbytes):
        created(path, nbytes)
        return path if threading.current_thread() is not second[0] else path + "-elsewhere"

    second: list[Any] = [None]
    monkeypatch.setattr(segment, "allocate", elsewhere)

    def run(rank, gather):
        if rank == 1:
            second[0] = threading.current_thread()
        return segment.share(rank, 100, gather)

    for error in everywhere(2, run):
        assert isinstance(error, TransportError)
        assert "No such file" in str(error)
        assert "seen by all ranks of the node" in str(error)
    assert files() == []


def test_segments_never_have_a_name(monkeypatch):
    """A job that was killed while a segment had a name leaked its memory."""
    seen = []
    create = segment.allocate

    def look(path, nbytes):
        seen.append(files())
        mapping_ = create(path, nbytes)
        seen.append(files())
        return mapping_

    monkeypatch.setattr(segment, "allocate", look)
    everywhere(2, lambda rank, gather: segment.share(rank, 100, gather))
    assert seen == [[]] * 4


def test_files_have_names_where_descriptors_of_others_cannot_be_opened(monkeypatch):
    """Ranks in containers of their own have other process numbers, or may not read each other's descriptors."""
    mapping, seen = segment.Mapping, []

    def refuse(path, nbytes):
        seen.append(path)
        if path.startswith("/proc/"):
            raise PermissionError(13, "Permission denied", path)
        assert files()
        return mapping(path, nbytes)

    monkeypatch.setattr(segment, "Mapping", refuse)
    segments = everywhere(2, lambda rank, gather: segment.share(rank, 5000, gather))
    array(segments[0].bases[1], 5000)[:] = 7
    assert set(array(segments[1].bases[1], 5000)) == {7}
    assert files() == [] and any(path.startswith(segment.FOLDER) for path in seen)


def test_another_process_with_the_same_number_is_ignored(monkeypatch):
    nameless = segment.create_unnamed
    other = os.open("/dev/null", os.O_RDWR)

    @contextmanager
    def elsewhere(name):
        with nameless(name):
            yield f"/proc/{os.getpid()}/fd/{other}"

    monkeypatch.setattr(segment, "create_unnamed", elsewhere)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    segments = everywhere(2, lambda rank, gather: segment.share(rank, 100, gather))
    os.close(other)
    assert [len(shared.bases) for shared in segments] == [2, 2]


def test_segments_beyond_available_memory_are_refused(monkeypatch):
    """Unnamed memory has no limit of its own: the kernel would kill some process instead of returning an error."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 100 << 20)
    for error in everywhere(2, lambda rank, gather: segment.share(rank, 200 << 20, gather)):
        assert isinstance(error, TransportError) and "104857600 bytes are available" in str(error)
    segments = everywhere(2, lambda rank, gather: segment.share(rank, 90 << 20, gather))
    assert len(segments[0].bases) == 2


def test_available_memory_is_at_most_that_of_the_machine():
    assert 0 < memory.available_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_control_groups_limit_available_memory(monkeypatch, tmp_path):
    (tmp_path / "job" / "step").mkdir(parents=True)
    for folder, most, used, cached in (("job", "4000000", 3000000, 500000), ("job/step", "max", 1000, 0)):
        (tmp_path / folder / "memory.max").write_text(f"{most}\n")
        (tmp_path / folder / "memory.current").write_text(f"{used}\n")
        (tmp_path / folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\nactive_file 7\n")
    assert memory.left_in(tmp_path / "job", "memory.max", "memory.current") == 1500007
    assert memory.left_in(tmp_path / "job/step", "memory.max", "memory.current") == sys.maxsize
    assert memory.left_in(tmp_path / "gone", "memory.max", "memory.current") == sys.maxsize


def test_sweeping_removes_unused_files(monkeypatch, tmp_path):
    monkeypatch.setattr(segment, "FOLDER", str(tmp_path))
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    names = {
        "dead": f"commlib-{dead.pid}-00",
        "reused": f"commlib-{os.getppid()}-01",
        "alive": f"commlib-{os.getpid()}-02",
        "locked": f"commlib-{dead.pid}-03",
        "others": "commlib-tune-04",
    }
    for name in names.values():
        (tmp_path / name).write_bytes(b"0")
    (tmp_path / f"commlib-{dead.pid}-05").symlink_to(tmp_path / names["others"])
    monkeypatch.setattr(segment, "may_own", lambda process, created: process == os.getpid())
    with open(tmp_path / names["locked"]) as locked_file:
        fcntl.flock(locked_file, fcntl.LOCK_SH)
        segment.sweep()
    assert {key for key, name in names.items() if (tmp_path / name).exists()} == {"alive", "locked", "others"}


def test_a_process_may_own_only_files_newer_than_itself():
    now = time.time()
    assert segment.may_own(os.getpid(), now)
    assert not segment.may_own(os.getpid(), now - 10**6)  # another process with this number created it
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    assert not segment.may_own(dead.pid, now)
