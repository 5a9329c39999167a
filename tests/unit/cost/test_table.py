"""The file of measured times: its contents, and errors about a broken file."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commlib.cost.model import DEFAULT
from commlib.cost.records import Entry, FittedMachine, MeasuredTime
from commlib.cost.table import Table, default_path
from commlib.errors import UsageError
from commlib.folders import NotPrivateError
from commlib.schedule import LinkCost

TIMES = (
    MeasuredTime(2048, "ring", 0, 1e-5),
    MeasuredTime(2048, "native", 0, 2e-5),
    MeasuredTime(8192, "double_tree", 4, 3e-5),
)
ENTRY = Entry("all_reduce", 4, 8, "Open MPI 5.0", "any", TIMES)
FITTED = FittedMachine("Open MPI 5.0", LinkCost(5e-6, 1 / 3e9), None, 1.1e-10)
TABLE = Table((ENTRY,), (FITTED,))


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "tuning.json"
    TABLE.save(path)
    assert Table.load(path) == TABLE
    assert [file.name for file in path.parent.iterdir()] == ["tuning.json"]


def test_the_size_decides_which_algorithms_compete() -> None:
    assert ENTRY.competitors(0) == ENTRY.competitors(2048) == TIMES[:2]
    assert ENTRY.competitors(2049) == ENTRY.competitors(8192) == TIMES[2:]
    assert ENTRY.competitors(8193) == ()  # never measured: the table does not decide


def test_times_are_sorted_when_they_are_read() -> None:
    data = TABLE.to_dict()
    data["entries"][0]["times"].reverse()
    assert Table.from_dict(data) == TABLE


def test_an_entry_is_found_by_its_place_and_item_size() -> None:
    halves = Entry("all_reduce", 4, 8, "Open MPI 5.0", 2, TIMES)
    table = Table((halves, ENTRY))
    assert table.find("all_reduce", 4, 8, 2) is halves
    assert table.find("all_reduce", 4, 8) is table.find("all_reduce", 4, 8, 4) is ENTRY
    assert table.find("all_reduce", 8, 4) is table.find("broadcast", 4, 8) is None


def test_new_measurements_replace_those_of_the_same_place_only() -> None:
    other_library = Entry("all_reduce", 4, 8, "MPICH 5.0", "any", TIMES)
    other_place = Entry("all_reduce", 1, 8, "Open MPI 5.0", "any", TIMES)
    again = Entry("all_reduce", 4, 8, "Open MPI 5.0", "any", TIMES[:1])
    old = Table((ENTRY, other_library), (FittedMachine("Open MPI 5.0", LinkCost(1, 1), LinkCost(2, 2), 3.0),))
    both = old.updated(Table((again, other_place), (FITTED,)))
    assert set(both.entries) == {again, other_library, other_place}
    # A run on one node cannot measure the network: earlier times of it stay.
    assert both.machines == (FittedMachine("Open MPI 5.0", FITTED.node, LinkCost(2, 2), FITTED.gamma),)
    assert both.of_library("MPICH 5.0") == Table((other_library,), ())


def test_unmeasured_numbers_have_defaults() -> None:
    assert FITTED.node is not None
    assert (FITTED.machine.node, FITTED.machine.network, FITTED.machine.gamma) == (
        FITTED.node,
        DEFAULT.network,
        1.1e-10,
    )


def test_the_default_path_is_in_the_cache_folder() -> None:
    assert default_path({"XDG_CACHE_HOME": "/c"}) == Path("/c/commlib/tuning.json")
    assert default_path({}) == Path.home() / ".cache/commlib/tuning.json"


def change(path: str, value: Any) -> dict[str, Any]:
    """Return the table's JSON with one thing in it changed."""
    data: Any = copy.deepcopy(TABLE.to_dict())
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    place = data
    for step in way:
        place = place[step]
    place[last] = value
    return data  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 2, "has format 2, but this version reads 1: run 'commlib tune' again"),
        ("entries", {}, "expected a list 'entries', got {}"),
        ("entries.0", 7, r"entries\[0\]: expected an object, got 7"),
        ("entries.0.verb", "all_shrink", "no collective is called 'all_shrink'"),
        ("entries.0.nodes", 0, "nodes must be a number .int. of at least 1, got 0"),
        ("entries.0.nodes", 1.5, "nodes must be a number .int. of at least 1, got 1.5"),
        ("entries.0.library", None, "library must be a string, got None"),
        ("entries.0.item_size", "some", "item_size must be a number"),
        ("entries.0.times.1.algorithm", "star", r"times\[1\]: unknown algorithm 'star'; known are ring, .*native"),
        ("entries.0.times.0.segments", -1, r"times\[0\]: segments must be a number .int. of at least 0, got -1"),
        ("entries.0.times.0.seconds", "1", "seconds must be a number .float. of at least 0, got '1'"),
        ("entries.0.times.0.seconds", float("nan"), "seconds must be a number"),
        ("entries.0.times.0.up_to", True, "up_to must be a number"),
        ("machines.0.gamma", float("inf"), "gamma must be a number"),
        ("machines.0.node.beta", -1.0, r"machines\[0\]: node: beta must be a number"),
        ("entries.0.times.2.segments", 10**9, r"times\[2\]: segments must be at most 65536, got 1000000000"),
        ("entries.0.times.0.up_to", 2**63, "up_to must be at most 9223372036854775807, got 9223372036854775808"),
        ("entries.0.times.0.seconds", 10**400, "seconds must be at most 1000000.0, got 1000"),
        ("entries.0.nodes", 2**31, r"entries\[0\]: nodes must be at most 2147483647, got 2147483648"),
        ("entries.0.ranks_per_node", 10**12, "ranks_per_node must be at most 2147483647, got 1000000000000"),
        ("entries.0.item_size", 2**70, "item_size must be at most"),
        ("machines.0.node.alpha", 1e300, r"machines\[0\]: node: alpha must be at most 1000000.0, got 1e.300"),
        ("machines.0.node.beta", 1e300, r"machines\[0\]: node: beta must be at most 1.0, got 1e.300"),
        ("machines.0.gamma", 2, r"machines\[0\]: gamma must be at most 1.0, got 2"),
        ("machines.0.network", 3, r"machines\[0\]: network: expected an object"),
    ],
)
def test_an_error_locates_the_fault_in_a_file(tmp_path: Path, path: str, value: Any, message: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(change(path, value)))
    with pytest.raises(UsageError, match=message) as caught:
        Table.load(file)
    assert str(file) in str(caught.value) or "all_shrink" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"7", b"[" * 200_000])
def test_other_contents_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"broken\.json"):
        Table.load(file)


def test_unreadable_and_unwritable_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*missing.json.*run 'commlib tune'"):
        Table.load(tmp_path / "missing.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        TABLE.save(tmp_path / "file" / "below.json")


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot read the tuning table /dev/zero .it has more than 64 MiB"):
        Table.load("/dev/zero")


def test_a_private_table_is_for_this_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "commlib" / "tuning.json"
    TABLE.save(file, private=True)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert Table.load(file, private=True) == TABLE
    file.parent.chmod(0o777)
    with pytest.raises(NotPrivateError, match=f"{file.parent} may be written by everyone"):
        Table.load(file, private=True)
    with pytest.raises(UsageError, match=f"cannot write .*{file.parent} may be written by everyone"):
        TABLE.save(file, private=True)
    assert Table.load(file) == TABLE


def test_device_arrays_have_their_own_entries() -> None:
    there = replace(ENTRY, device="cuda")
    table = Table((ENTRY, there))
    assert table.find("all_reduce", 4, 8) is ENTRY
    assert table.find("all_reduce", 4, 8, device="cuda") is there
    assert table.find("all_reduce", 4, 8, device="rocm") is None
    assert Table.from_dict(table.to_dict()) == table
    assert set(Table((ENTRY,)).updated(Table((there,))).entries) == {ENTRY, there}


def test_a_table_without_devices_is_for_the_host() -> None:
    data = Table((ENTRY,)).to_dict()
    del data["entries"][0]["device"]
    assert Table.from_dict(data).entries == (ENTRY,)
    data["entries"][0]["device"] = 3
    with pytest.raises(UsageError, match=r"entries\[0\]: device must be a string, got 3"):
        Table.from_dict(data)
