"""Kernels from a site or a container are read from a folder that this user cannot write."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from commlib import folders
from commlib.kernels import cache


def forget() -> None:
    for cached in (cache.folder, cache.find_site_folders, cache.log_once):
        cached.cache_clear()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This user's own cache folder. The folders of the node are empty."""
    monkeypatch.setattr(folders, "user_cache", lambda: tmp_path / "home" / "commlib")
    monkeypatch.setattr(cache, "node_folders", lambda: iter([]))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("COMMLIB_KERNELS", raising=False)
    forget()
    yield tmp_path / "home" / "commlib"
    forget()


@pytest.fixture
def site(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site's kernels: it has "a", and only its administrator can write."""
    place = tmp_path / "site"
    monkeypatch.setenv("COMMLIB_KERNELS", str(place))
    cache.write("a", b"code of a")
    folder = cache.folder()
    assert folder is not None and folder.parent == place
    forget()
    before = cache.open_own

    def refusing(name: str, descriptor: int) -> int:
        if os.path.realpath(f"/proc/self/fd/{descriptor}") == str(folder):
            raise OSError(30, "Read-only file system")
        return before(name, descriptor)

    monkeypatch.setattr(cache, "open_own", refusing)  # root may write anywhere
    return folder


def test_the_settings_folder_comes_first(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLIB_KERNELS", str(tmp_path / "given"))
    cache.write("a", b"code")
    assert cache.read("a") == b"code"
    assert (tmp_path / "given" / f"kernels-{cache.stamp()}" / "a").is_file() and not home.exists()


def test_site_kernels_are_read_and_others_are_cached_at_home(site: Path, home: Path) -> None:
    assert cache.read("a") == b"code of a"
    assert cache.read("b") is None
    cache.write("b", b"code of b")
    assert cache.read("b") == b"code of b"
    assert cache.folder() == home / site.name and not (site / "b").exists()


def test_site_kernels_are_read_without_a_writable_cache(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "candidates", lambda: iter([site.parent]))
    caplog.set_level(logging.ERROR)
    assert cache.folder() is None and cache.read("a") == b"code of a" and cache.read("b") is None


def test_a_site_folder_that_others_can_write_is_ignored(site: Path) -> None:
    site.chmod(0o777)
    assert cache.read("a") is None


def test_damaged_site_kernels_are_reported_and_not_removed(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    (site / "a").write_bytes(b"?")
    assert cache.read("a") is cache.read("a") is None
    (record,) = caplog.records
    assert record.getMessage() == f"the compiled kernel {site / 'a'} is damaged"
    assert (site / "a").is_file()


def test_kernels_of_other_sources_are_not_read(site: Path) -> None:
    shutil.move(site, site.with_name("kernels-0123456789abcdef"))
    assert cache.find_site_folders() == () and cache.read("a") is None
