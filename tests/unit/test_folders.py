"""A private folder: no other user can change its contents, or replace the folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from commlib import folders
from commlib.folders import NotPrivateError, open_private, read_private, user_cache, write_private

SOMEBODY = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A folder that is private, two below one that tests make unsafe."""
    folder = tmp_path / "home" / ".cache" / "commlib"
    folder.mkdir(parents=True)
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    with open_private(folder) as here:
        write_private("table", here, b"kept")
    return folder


def read(folder: Path) -> bytes:
    with open_private(folder) as here:
        return read_private("table", here)


def test_written_files_can_be_read(cache: Path) -> None:
    assert read(cache) == b"kept"
    assert stat.S_IMODE((cache / "table").stat().st_mode) == 0o600
    assert os.listdir(cache) == ["table"]


def test_missing_folders_are_created_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with pytest.raises(FileNotFoundError), open_private(path):
        pass
    with open_private(path, create=True):
        pass
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (path, path.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("above", [0, 1, 2])
@pytest.mark.parametrize(("mode", "who"), [(0o777, "everyone"), (0o775, "its group")])
def test_a_parent_folder_that_others_can_write_is_not_safe(
    cache: Path, above: int, mode: int, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last folder's owner was looked at: a user who could rename a folder above it had his file unpickled."""
    monkeypatch.setattr(folders, "is_group_of_one", lambda gid, uid: False)
    path = [cache, *cache.parents][above]
    path.chmod(mode)
    with pytest.raises(NotPrivateError, match=rf"{path} may be written by {who} \(chmod go-w {path}\)"):
        read(cache)


def test_the_sticky_bit_makes_a_folder_above_safe_but_not_the_last(cache: Path) -> None:
    cache.parent.chmod(0o1777)
    assert read(cache) == b"kept"
    cache.chmod(0o1777)
    with pytest.raises(NotPrivateError, match="may be written by everyone"):
        read(cache)


@as_root
@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_parent_folder_of_another_user_is_not_safe(cache: Path, above: int) -> None:
    path = [cache, *cache.parents][above]
    os.chown(path, SOMEBODY, -1)
    with pytest.raises(NotPrivateError, match=f"{path} belongs to uid {SOMEBODY}"):
        read(cache)


@as_root
def test_a_file_of_another_user_is_not_read(cache: Path) -> None:
    os.chown(cache / "table", SOMEBODY, -1)
    with pytest.raises(NotPrivateError, match=f"table belongs to uid {SOMEBODY}"):
        read(cache)


def test_neither_a_shared_file_nor_a_special_file_is_read(cache: Path) -> None:
    (cache / "table").chmod(0o666)
    with pytest.raises(NotPrivateError, match="table may be written by everyone"):
        read(cache)
    (cache / "table").rename(cache / "another")
    (cache / "table").symlink_to("another")
    with pytest.raises(OSError, match="symbolic links"):
        read(cache)
    (cache / "table").unlink()
    os.mkfifo(cache / "table")
    with pytest.raises(NotPrivateError, match="table is not a file"):
        read(cache)
    (cache / "table").unlink()
    (cache / "table").mkdir()
    with pytest.raises(NotPrivateError, match="table is not a file"):
        read(cache)


def test_a_link_is_as_safe_as_its_target(cache: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(cache.parent)
    assert read(link / "commlib") == b"kept"
    cache.parent.chmod(0o777)
    with pytest.raises(NotPrivateError, match="written by everyone"):
        read(link / "commlib")


def test_the_checked_folder_is_used(cache: Path) -> None:
    """Replacing the folder after the check has no effect: files are opened within the checked folder."""
    with open_private(cache) as here:
        cache.rename(cache.with_name("moved"))
        cache.mkdir()
        (cache / "table").write_bytes(b"forged")
        assert read_private("table", here) == b"kept"


def test_a_private_group_counts_as_the_user(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every user has a group of his own the umask is 002, and his group can write all his new files."""
    cache.parent.chmod(0o775)
    ours = cache.stat().st_gid, os.geteuid()
    monkeypatch.setattr(folders, "is_group_of_one", lambda gid, uid: (gid, uid) == ours)
    assert read(cache) == b"kept"


def test_a_file_is_written_completely_or_not_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with open_private(cache) as here, pytest.raises(OSError, match="No space left"):
        write_private("table", here, b"newer")
    monkeypatch.undo()
    assert read(cache) == b"kept"
    assert os.listdir(cache) == ["table"]


def test_the_users_cache_follows_the_desktop_standard() -> None:
    assert user_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/commlib")
    assert user_cache({"XDG_CACHE_HOME": "relative"}) == user_cache({}) == Path.home() / ".cache/commlib"


def test_a_user_without_a_home_has_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container without an entry for the user, looking up the home raised RuntimeError at the start."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert user_cache({}) == Path("/.cache/commlib")
