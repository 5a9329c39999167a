"""The picture of a run, and its title."""

from __future__ import annotations

import warnings

import pytest
from matplotlib.figure import Figure

from commlib.bench import plot, record
from tests.unit.bench.figures import row, settings

FACTS = {
    "date": "2026-11-21T18:30:05+00:00",
    "ranks": 4,
    "mpi": "Some MPI 5",
    "hosts": ["a", "b"] * 2,
    "load": 1.25,
    "cores": 8,
    "slurm": {"SLURM_JOB_ID": "77"},
}
SIZES = [4 << 2 * power for power in range(12)]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self, *arguments, **options):
        figures.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)

    def draw(rows, title="title"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plot.write(tmp_path / "run.png", rows, title)
        return figures[-1]

    return draw


def test_small_sizes_are_visible(drawn):
    """Bandwidths were drawn on a linear axis, where everything below 64 KiB is at the bottom."""
    figure = drawn([row(size=size, seconds={"commlib": [1e-6 + size * 1e-10]}) for size in SIZES])
    for axes in figure.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        low, high = axes.transAxes.inverted().transform(axes.transData.transform(axes.lines[0].get_xydata()))[[0, 6], 1]
        assert abs(high - low) > 0.03  # of the height, between 4 B and 16 KiB


def test_the_title_has_host_date_load_and_job(drawn):
    """Without these, pictures of two runs cannot be distinguished."""
    text = record.heading(settings(), FACTS)
    assert text.splitlines() == [
        "all_reduce, 4 ranks, Some MPI 5",
        "a, b; 2026-11-21 18:30:05 UTC; load 1.2 on 8 cores at the start; Slurm job 77",
    ]
    assert drawn([row()], text).get_suptitle() == text
    many = {**FACTS, "hosts": [f"n{n}" for n in range(64)], "slurm": None}
    assert record.heading(settings(), many).splitlines()[1].startswith("n0, n1, n2, ... (64 hosts); 2026")
    assert "Slurm" not in record.heading(settings(), many)


def test_one_rank_has_times_but_no_bus(drawn):
    figure = drawn([row(ranks=1, size=size) for size in SIZES])
    assert [len(axes.lines) for axes in figure.axes] == [0, 2]


def test_each_place_has_a_line(drawn):
    rows = [row("all_gather", size=size, in_place=place) for size in SIZES for place in (False, True)]
    labels = [line.get_label() for line in drawn(rows).axes[1].lines]
    assert len(labels) == 4 and "commlib float32 sum in place" in labels


def test_the_job_of_slurm_is_recorded():
    environment = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CONF": "/x"}
    recorded = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert record.slurm_job(environment) == recorded
    assert record.slurm_job({"HOME": "/"}) is None
