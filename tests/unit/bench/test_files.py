"""The JSON and the PNG of a run, from given figures."""

from __future__ import annotations

import json
import sys

import pytest

from commlib.bench import plot, record
from commlib.bench.run import write_files
from tests.unit.bench.figures import row, settings

FACTS = {"date": "2026-11-21T18:30:05+00:00", "ranks": 4, "mpi": "Some MPI 5", "hosts": ["a"] * 4}
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def test_a_run_writes_its_files(tmp_path):
    chosen = settings(peers=("mpi", "gloo"), out=tmp_path, dtypes=("float32", "int8"))
    rows = [row(size=size, dtype=dtype) for dtype in ("float32", "int8") for size in (1 << 16, 1 << 20)]
    notices = write_files(chosen, FACTS, rows, ["gloo: none"])
    data, picture = sorted(tmp_path.iterdir())
    assert data.name == "all_reduce-4-ranks-20261121T183005.json"
    assert notices == [f"wrote {data}", f"wrote {picture}"]
    assert picture.read_bytes().startswith(SIGNATURE) and picture.stat().st_size > 5000
    read = json.loads(data.read_text())
    assert read["facts"].pop("load_after") >= 0
    assert read["facts"] == FACTS and read["notes"] == ["gloo: none"]
    assert read["options"]["verb"] == "all_reduce" and read["options"]["peers"] == ["mpi", "gloo"]
    assert "out" not in read["options"]  # it does not affect the figures
    assert [(one["size"], one["dtype"]) for one in read["rows"]] == [(one.size, one.dtype) for one in rows]
    first = read["rows"][0]
    assert first["seconds"] == rows[0].seconds and first["bound_seconds"] == rows[0].bound_seconds
    assert first["wrong"] == {"commlib": 0, "mpi": 0}
    assert first["of_bound"] == pytest.approx(0.8)
    assert first["figures"]["mpi"]["time_us"] == pytest.approx(250)
    assert first["figures"]["commlib"]["busbw"] == pytest.approx(rows[0].busbw())


def test_a_missing_matplotlib_is_reported_and_the_data_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    notices = write_files(settings(out=tmp_path), FACTS, [row()], [])
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    assert "matplotlib is not installed" in notices[1] and "extra 'plot'" in notices[1]


def test_a_barrier_has_a_picture(tmp_path):
    plot.write(tmp_path / "barrier.png", [row("barrier", size=0, count=0, dtype="", op="")], "barrier")
    assert (tmp_path / "barrier.png").read_bytes().startswith(SIGNATURE)


def test_file_names_are_distinct():
    assert [plot.name_of_size(n) for n in (4, 1024, 64 << 20, 1536)] == ["4", "1 Ki", "64 Mi", "1.5 Ki"]
    ours = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11"
    assert record.name_of_library(ours) == "Open MPI v5.0.11"
    assert record.name_of_library("MPICH Version:      5.0.2\nMPICH ABI: 1") == "MPICH 5.0.2"
    environment = {"OMPI_MCA_btl": "self", "HOME": "/root", "COMMLIB_CHECK": "never"}
    assert record.settings_of(environment) == {"COMMLIB_CHECK": "never", "OMPI_MCA_btl": "self"}
