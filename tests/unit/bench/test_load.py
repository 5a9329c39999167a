"""A report has the word BUSY if the load exceeded the cores before the run."""

from __future__ import annotations

import io
import os

import pytest
from rich.console import Console

from commlib.bench import load, record
from commlib.bench.page import page, runs
from commlib.bench.report import Report
from commlib.bench.sweep.environment import differences
from tests.unit.bench import sweeps
from tests.unit.bench.figures import settings

BUSY = {"load_of_hosts": {"a": 9.125, "b": 1.0}, "usable_cores": {"a": 8, "b": 8}, "busy": ["a"]}
IDLE = {"load_of_hosts": {"a": 8.0, "b": 1.0}, "usable_cores": {"a": 8, "b": 8}}
FACTS = {"date": "2026-11-21T18:30:05+00:00", "ranks": 4, "hosts": ["a", "b"] * 2, "mpi": "Some MPI 5", "cpu": "CPU"}


class World:
    """The ranks of two hosts: the figures of this one, then those passed."""

    def __init__(self, *others):
        self.others = others

    def allgather(self, mine):
        return [mine, *self.others]


def test_the_load_of_each_host_is_recorded_with_the_cores_that_its_ranks_may_use(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (4.5, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {process != 0} | {0})  # a rank bound to core 0
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    loads = load.gather_loads(World(("a", 4.0, {1, 2}), ("b", 4.5, {0, 1, 2, 3, 4})), "a")
    assert loads == {"load_of_hosts": {"a": 4.5, "b": 4.5}, "usable_cores": {"a": 3, "b": 5}, "busy": ["a"]}
    assert "busy" not in load.gather_loads(World(("a", 4.0, {1, 2, 3, 4})), "a")


def test_a_load_equal_to_the_cores_is_not_busy():
    assert load.busy_text(IDLE) is None
    text = load.busy_text(BUSY)
    assert text is not None and text.startswith("BUSY: load 9.1 on 8 usable cores of a: other programs")
    assert text.endswith("Repeat the run when the load is lower.")


def test_at_most_three_hosts_are_named():
    hosts = [f"n{number}" for number in range(9)]
    text = load.busy_text({"load_of_hosts": dict.fromkeys(hosts, 9.0), "usable_cores": dict.fromkeys(hosts, 4)})
    assert text is not None and "of n2, and 6 more hosts: other" in text and "n3" not in text


@pytest.mark.parametrize(("cores", "is_busy"), [(8, False), (4, True)])
def test_files_of_older_versions_have_one_load(cores, is_busy):
    assert bool(load.busy_text({"load": 4.5, "cores": cores})) == is_busy


@pytest.mark.parametrize(("facts", "is_busy"), [(BUSY, True), (IDLE, False)])
def test_table_picture_and_page_show_a_busy_machine_in_their_heads(tmp_path, facts, is_busy):
    facts = {**FACTS, "cores": 8, "load": 9.125, **facts}
    output = io.StringIO()
    with Report(settings(), rounds=9, bound=True, console=Console(file=output)) as report:
        report.facts(facts)
    assert output.getvalue().splitlines()[2].startswith("# BUSY: load 9.1 on 8") == is_busy
    assert record.heading(settings(), facts).endswith("\nBUSY: load 9.1 on 8 usable cores of a") == is_busy
    path = tmp_path / "monday.jsonl"
    sweeps.write(path, facts=facts)
    text = page.render([runs.read(path)])
    head = text[: text.index("<main>")]
    assert ("monday: BUSY: load 9.1 on 8 usable cores of a" in head) == is_busy


def test_a_sweep_continued_on_a_busy_host_is_another_environment():
    assert differences(IDLE, BUSY) == ["busy: nothing before, a now"]
    assert differences(IDLE, {**IDLE, "load_of_hosts": {"a": 2.0, "b": 2.0}}) == []
