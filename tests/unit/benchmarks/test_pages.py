"""Pages of results agree with their JSON files, for every benchmark with results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page_tables as tables
from benchmarks import pages
from benchmarks.page_text import bytes_text, inner, range_text, spread_text, time_text

FACTS = {
    "date": "2026-11-23T04:00:00+00:00", "ranks": 2, "cores": 8, "cpu": "Some CPU", "load": 0.1, "load_after": 0.3,
    "mpi": "Some MPI 1", "commit": "0123456789", "versions": {"commlib": "1", "numpy": "2"},
    "command": "mpirun -n 2 python benchmarks/x.py --rounds 3",
}  # fmt: skip


def record(benchmark: str, options: dict[str, Any] | None = None, **measured: Any) -> dict[str, Any]:
    return {"benchmark": benchmark, "facts": FACTS, "options": options or {}, **measured}


def written(topic: str, *records: dict[str, Any]) -> str:
    return pages.page(next(one for one in pages.TOPICS if one.name == topic), records)


@pytest.mark.parametrize("name", [f"{topic.name}.md" for topic in pages.TOPICS])
def test_committed_pages_match_the_files(name: str) -> None:
    assert (pages.RESULTS / name).read_text() == pages.pages()[name], "run python benchmarks/pages.py"


def test_a_section_names_machine_date_and_options() -> None:
    text = written("named", record("named", {"tensors": 2}, seconds={"named": [2e-5] * 3, "MPI_Allreduce": [1e-5] * 3}))
    assert "## named, 2 ranks, Some MPI 1: `--rounds 3`" in text
    assert "- Machine: Some CPU, 8 cores, load 0.1 at the start, 0.3 at the end" in text
    assert "- Date: 2026-11-23; commit 0123456789\n- Versions: commlib 1, numpy 2\n" in text
    assert "`mpirun -n 2 python benchmarks/x.py --rounds 3`; files: 1; spread: median (10 %" in text
    assert "| named | 10.00 (10.00-10.00) | 2.00 (2.00-2.00) |" in text
    assert "busy" not in text


def test_each_file_is_one_start() -> None:
    slow, fast = (
        record("named", {"tensors": 1}, seconds={"named": [time] * 3, "MPI_Allreduce": [1e-6] * 3})
        for time in (4e-6, 2e-6)
    )
    text = written("named", slow, fast)
    assert (
        "files: 2; spread: median (least-greatest), or least-greatest alone, of the starts" in text
        and text.count("## named") == 1
    )
    assert "| named | 3.00 (2.00-4.00) | 3.00 (2.00-4.00) |" in text


@pytest.mark.parametrize(("before", "after"), [(4.1, 4.1), (0.1, 6.1)])
def test_a_busy_machine_is_reported(before: float, after: float) -> None:
    busy = record("named", {"tensors": 1}, seconds={"named": [1.0], "MPI_Allreduce": [1.0]})
    busy["facts"] = {**FACTS, "load": before, "load_after": after, "commit": "0123+"}
    text = written("named", busy)
    assert "**The machine was busy" in text and "commit 0123+ (+: with changes)" in text


def test_all_reduce_in_several_starts() -> None:
    def rows(mpi: float) -> list[dict[str, Any]]:
        return [{"size": 4096, "seconds": {"commlib": [1e-6] * 3, "mpi": [mpi] * 3}}]

    settings = [("default", 3e-6), ("tuned ring", 2e-6), ("default", 5e-6), ("tuned ring", 2e-6)]
    starts = [{"setting": name, "rows": rows(mpi)} for name, mpi in settings]
    text = written("node", record("compare", starts=starts))
    assert "| bytes | commlib | MPI_Allreduce | tuned ring |" in text
    assert "| 4 Ki | 1.00 us | 4.00 (3.00-5.00) | 2.00 (2.00-2.00) |" in text
    one = {"seconds": {"commlib": [1e-6], "mpi": [2e-6]}, "size": 4}
    assert "| 4 | 1.00 us | 2.00 |" in written("node", record("all_reduce", rows=[one]))


def test_a_verb_of_the_command() -> None:
    row = {"size": 1 << 20, "seconds": {"commlib": [1e-4] * 3, "mpi": [2e-4] * 3}, "of_bound": 0.5}
    bench = record("commlib bench all_gather", rows=[row])
    bench["facts"] = {**FACTS, "command": ["bench", "all_gather", "--out", "somewhere", "--peer", "mpi"]}
    text = written("node", bench)
    assert "## bench all_gather, 2 ranks, Some MPI 1: `all_gather --peer mpi`" in text
    assert "| 1 Mi | 100 us | 2.00 (2.00-2.00) | 50% |" in text


def test_every_verb_has_all_cells_and_marks_the_slow_ones() -> None:
    row = {"verb": "scan", "memory": "ordinary", "bytes": 1024, "wrong": {"blocking": 0, "planned": 0, "mpi": 0}}
    seconds = {"blocking": [2e-6] * 3, "planned": [1e-6] * 3, "mpi": [1.5e-6] * 3}
    barrier = {"verb": "barrier", "memory": "ordinary", "bytes": 0, "wrong": {}, "seconds": {}}
    bench = record("commlib bench all", {"forms": ["blocking", "planned"]}, rows=[{**row, "seconds": seconds}, barrier])
    bench["facts"] = {**FACTS, "command": ["bench", "all", "--json", "somewhere", "--rounds", "3"]}
    text = written("verbs", bench)
    assert "## bench all, 2 ranks, Some MPI 1: `all --rounds 3`" in text
    assert "### blocking, ordinary arrays\n\n| bytes | scan | barrier |" in text
    assert "| - |  | unmeasured |\n| 1K | **2.00:1.50** |  |" in text
    assert "### planned, ordinary arrays" in text and "| 1K | 1.00:1.50 |  |" in text
    assert "**1 of 4 cells reach the goal, 1 slow, 2 unmeasured.**" in text
    assert written("verbs", bench, bench).count("| 1K | 1.00:1.50 |  |") == 1
    summary = tables.all_verbs_summary([bench], "verbs.md")
    assert "| Some MPI 1 | 2 | blocking | ordinary | 0 of 2 | scan 1024 B: 1.3 times its goal |" in summary


def test_channels_are_separate_on_a_node_and_between_hosts() -> None:
    rows = [{"bytes": 8, "pattern": "there", "contender": name, "us": us} for name, us in (("channel", 2), ("MPI", 3))]
    on_node = record("channel", {"patterns": ["there"]}, where="one node", rows=rows)
    between = {**on_node, "where": "two hosts"}
    for topic in ("node", "hosts"):
        text = written(topic, on_node, between)
        assert text.count("| 8 | 2.00 us | 1.50 |") == 1
    assert "channel, 2 ranks, two hosts" in text


def test_hosts_have_a_share_of_the_link() -> None:
    of = {"seconds": [1e-3] * 3, "wrong": 0}
    options = {"hosts": 2, "rate": "1gbit"}
    text = written("hosts", record("hosts", options, rows=[{"size": 62500, "commlib": of, "mpi": of}]))
    assert "| 62500 | 1.00 ms, 50% | 1.00 ms, 50% |" in text


def test_steps_are_multiples_of_those_without_communication() -> None:
    seconds = {"no communication": [0.1] * 3, "ours": [0.11] * 3}
    measured = {"ours": {"hidden_seconds": 0.5, "reductions": 100}}
    text = written("training", record("overlap", seconds=seconds, statistics=measured))
    assert "| ours | 110.0 | 1.10 (1.10-1.10) | 5.0 |" in text
    assert "hidden" not in written("training", record("keras_fit", seconds=seconds))


def test_the_cost_of_timelines_is_shown() -> None:
    measured = {"all-reduce of 4 bytes": {"off": [[1e-6, 2e-6]] * 3, "on": [[2e-6, 2.5e-6]] * 3}}
    text = written("timeline", record("timeline", measured=measured))
    assert "| all-reduce of 4 bytes | 1.00 us | 2.000 (2.00-2.00) | 1.250 (1.25-1.25) |" in text


def test_pipelines() -> None:
    size = {"kind": "perceptron", "rows": 8, "width": 128, "nbytes": 4096, "schedule": "1f1b", "computes": 1e-3}
    peers = [{**size, "seconds": {"ours": [0.01] * 3, "torch": [0.02] * 3}}]
    sleeping = {"schedule": "gpipe", "stages": "even", "seconds": [0.11] * 3, "simulated": 0.1}
    bubble = [{**sleeping, "bubble": 0.2, "simulated_bubble": 0.19}]
    overhead = [{"schedule": "1f1b", "actions": 100, "seconds": [5e-4] * 3}]
    one = record("pipeline", options={"microbatches": 7}, peers=peers, bubble=bubble, overhead=overhead)
    text = written("pipeline", one)
    # Of 2 ranks: 8 microbatches follow each other on the longest path, which compute for 8 of the peer's 20 ms.
    assert "| perceptron 8 x 128 | 1.00 | 4 Ki | 1f1b | 10.00 | 2.00 (2.00-2.00) | 2.50 |" in text
    assert "| gpipe | even | 110.0 | 1.10 | 0.200 | 0.190 |" in text and "| 1f1b | 100 | 5.0 |" in text
    several = written("pipeline", one, one)
    assert several.count("| 1f1b | 100 | 5.0 |") == 1


def test_pipelines_of_keras() -> None:
    size = {"kind": "dense", "rows": 8, "width": 128, "schedule": "1f1b", "bubble": 0.2, "predicted_bubble": 0.19}
    seconds = {"one process": [0.3, 0.3, 0.4], "pipeline": [0.2] * 3}
    text = written("pipeline", record("pipeline_keras", fits=[{**size, "seconds": seconds, "predicted": 0.25}]))
    assert "| dense 8 x 128 | 1f1b | 300 | 200 | 1.50 | 1.20 | 0.200 | 0.190 |" in text


def test_divided_blocks() -> None:
    seconds = {"ours": [0.01] * 3, "torch": [0.02] * 3, "computes": [0.008] * 3, "one process": [0.018] * 3}
    recorded = {
        who: {"parameters": size, "activations": 10**6} for who, size in (("ours", 10**6), ("one process", 3 * 10**6))
    }
    block = [{"tokens": 16, "seconds": seconds, "saved_bytes": recorded, "reduced": 131072, "formula": 131072}]
    text = written("tensor", record("tensor", block=block))
    assert "| 16 | 10.00 | 2.00 (2.00-2.00) | 8.00 | 1.80 | 2.0 of 4.0 | 128 Ki (128 Ki) |" in text


def test_divided_models_of_keras() -> None:
    seconds = {"moves": [2e-3] * 3, "nothing": [1e-3] * 3}
    moves = [{"nbytes": 4, "backward": True, "count": 20, "seconds": seconds}]
    fits = [{"rows": 8, "width": 64, "seconds": {"divided": [0.1] * 3, "one process": [0.15] * 3}}]
    text = written("tensor", record("tensor_keras", moves=moves, fits=fits))
    assert "| 4 | forward and backward | 50 |" in text and "| 8 x 64 | 100.0 | 150.0 | 1.50 |" in text


PARTS = {
    "step": 1e-2, "routing": 1e-4, "routing, backward": 3e-5, "dispatch": 5e-5, "combine": 6e-5, "dispatch_back": 7e-5,
    "combine_back": 8e-5, "meetings": 9e-5,
}  # fmt: skip


def test_mixtures_of_experts() -> None:
    seconds = {"ours": [4e-5, 5e-5, 5e-5], "gloo": [1e-3] * 3, "gloo, counts": [2e-3] * 3}
    moves = [{"nbytes": 65536, "seconds": seconds}]
    names = {"ours": 0.004, "by hand": 0.008, "one-hot": 0.016, "dense": 0.002, "products": 0.001}
    step = {"top_k": 2, "hidden": 64, "seconds": {name: [value] * 3 for name, value in names.items()}, "parts": PARTS}
    text = written("moe", record("moe", moves=moves, layer=[step]))
    assert "| 64 Ki | 50 | 40 | 20.00 (20.00-25.00) | 40.00 (40.00-50.00) |" in text
    assert "| top-2, 64 | 4.00 | 0.50 (0.50-0.50) | 0.25 (0.25-0.25) | 2.00 (2.00-2.00) | 4.00 (4.00-4.00) |" in text
    assert "| top-2, 64 | 100 | 30 | 50 | 60 | 70 | 80 | 90 |" in text


def test_mixtures_of_experts_in_keras() -> None:
    nodes = [{"tokens": 8, "count": 10, "seconds": {"nodes": [2e-3] * 3, "nothing": [1e-3] * 3}, "parts": PARTS}]
    steps = [{"top_k": 1, "hidden": 64, "seconds": {"ours": [6e-3] * 3, "dense": [3e-3] * 3}, "parts": PARTS}]
    text = written("moe", record("moe_keras", nodes=nodes, steps=steps))
    assert "| 8 | 100 | 39 | 9 |" in text
    assert "| top-1, 64 | 6.00 | 2.00 (2.00-2.00) | 100 | 30 | 50 | 60 | 70 | 80 | 90 |" in text


def test_compression_and_codecs() -> None:
    of = {"seconds": [0.1, 0.3, 0.2], "sent": [1024, 3072], "validation": [[1, 1.0, 9.0], [2, 2.0, 2.5]]}
    text = written("compression", record("compression", figures={"int8": of, "local": {**of, "sent": [None]}}))
    assert "| int8 | 200 | 2 | 2.500 |" in text and "| local | 200 |  | 2.500 |" in text
    text = written("compression", record("codecs", figures={"int8": {"encode": 20.123, "bytes": 1.0}}))
    assert "| int8 | 20.1 | 1.00 |" in text


def test_gpus() -> None:
    common = {"verb": "all_reduce", "dtype": "float32"}
    rows = [
        {**common, "size": 4096, "seconds": {"commlib": [3e-5] * 3, "gloo": [3e-4] * 3}, "bound_seconds": []},
        {
            **common,
            "size": 1 << 28,
            "seconds": {"commlib": [4e-4] * 3, "ordinary": [8e-4] * 3},
            "bound_seconds": [3.6e-4, 4e-4],
        },
    ]
    for benchmark in ("gpu verbs", "commlib bench sweep"):
        text = written("gpu", {**record(benchmark, {"device": "cuda"}, rows=rows), "where": "on a GPU"})
        assert f"## {benchmark.removeprefix('commlib ')}, 2 ranks, on a GPU, Some MPI 1" in text
        assert "| verb | dtype | bytes | commlib | ordinary arrays | gloo, times |" in text
        assert "| all_reduce | float32 | 4 Ki | 30.0 us |  | 10.0 |" in text
        assert "| all_reduce | float32 | 256 Mi | 400 us (90%) | 800 us (45%) |  |" in text
    assert "commlib bench all_reduce" not in written(
        "node", record("commlib bench all_reduce", {"device": "cuda"}, rows=rows)
    )
    kernel = {"name": "fill", "moved": 1 << 20, "clock": "events", "seconds": [1e-6], "rate": 90.0, "copy": 100.0}
    assert "| fill | 1 | 1.00 us | 90 | 90% | events |" in written("gpu", record("gpu kernels", kernels=[kernel]))
    steps: dict[str, Any] = {"seconds": {"commlib": [0.05, 0.06, 0.07]}, "exposed_percent": {"commlib": 3.21}}
    assert "| commlib | 60.00 (50.00-70.00) | 3.2 |" in written("gpu", record("gpu step", **steps))


def test_missing_results_are_reported() -> None:
    assert "No results are published yet." in written("hosts")


def test_a_folder_gives_pages(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(record("codecs", figures={"int8": {"encode": 1.0}})))
    pages_ = pages.pages(tmp_path)
    names = (
        "node",
        "verbs",
        "hosts",
        "named",
        "training",
        "pipeline",
        "tensor",
        "moe",
        "gpu",
        "timeline",
        "compression",
    )
    assert set(pages_) == {f"{name}.md" for name in names}
    assert "int8" in pages_["compression.md"] and "int8" not in pages_["node.md"]


def test_numbers_are_formatted() -> None:
    assert [bytes_text(n) for n in (4, 1024, 1536, 64 << 20)] == ["4", "1 Ki", "1536", "64 Mi"]
    assert [time_text(s) for s in (1e-6, 9.996e-4, 0.0123, 2.0)] == ["1.00 us", "1.00 ms", "12.3 ms", "2.00 s"]
    assert inner(list(range(11))) == list(range(1, 10)) and inner([2, 1]) == [1, 2]
    assert spread_text([]) == "" and spread_text([2]) == "2.00" and spread_text([1, 3]) == "2.00 (1.00-3.00)"
    assert range_text([188.9, 194.2], "#.3g") == "189-194"
    assert range_text([1.01, 1.02], ".1f") == "1.0" and range_text([1, 2], ".1f") == "1.0-2.0"
