"""Freed gradients stay in the process unless the user has configured malloc differently."""

import resource
import sys

import pytest
import torch

from commlib.buffers.freed_memory import keep_freed_memory


@pytest.fixture(autouse=True)
def forget():
    keep_freed_memory.cache_clear()
    yield
    keep_freed_memory.cache_clear()


@pytest.mark.parametrize(("name", "value"), [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.check=0")])
def test_the_users_tunables_win(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_pages_are_not_faulted_in_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert keep_freed_memory()
    for _ in range(5):
        torch.ones(4 << 20)  # the heap grows until a block fits
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(10):
        torch.ones(4 << 20)
    pages = 10 * (16 << 20) // resource.getpagesize()
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < pages / 10
