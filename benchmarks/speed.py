"""Speed tables of README and docs/pages/performance.md: ratios of peers' times to commlib's, from the results files.

`python benchmarks/pages.py` writes them between the marks of these two pages.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare import figures
from benchmarks.page_tables import ratios
from benchmarks.page_text import table

Record = Mapping[str, Any]
Ratios = Callable[[Sequence[Record]], Sequence[float]]

RESULTS = Path(__file__).with_name("results")
BEGIN, END = "<!-- begin: written by benchmarks/pages.py -->", "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Speed:
    """One ratio. files: a pattern of results files, one for each start. page: of results/, with all figures.

    ratios: the peer's time divided by commlib's, for each start. first: also in README.
    """

    what: str
    peer: str
    files: str
    page: str
    ratios: Ratios
    first: bool = True


def all_reduce(size: int, peer: str) -> Ratios:
    """Return the ratios of an all-reduce on one node; several starts are in one file."""
    return lambda records: figures([start for record in records for start in record["starts"]])[1][size][peer]


def verb_on_gpu(size: int) -> Ratios:
    """Return the ratio of an all-reduce of GPU arrays in symmetric memory, by medians of the rounds."""

    def of_records(records: Sequence[Record]) -> list[float]:
        seconds = next(
            row["seconds"]
            for record in records
            for row in record["rows"]
            if (row["verb"], row["dtype"], row["size"]) == ("all_reduce", "float32", size)
        )
        return [statistics.median(seconds["gloo"]) / statistics.median(seconds["commlib"])]

    return of_records


def between_hosts(size: int, peer: str) -> Ratios:
    """Return the ratios of an all-reduce between hosts."""

    def of_records(records: Sequence[Record]) -> list[float]:
        rows = [next(row for row in record["rows"] if row["size"] == size) for record in records]
        return [statistics.median(row[peer]["seconds"]) / statistics.median(row["commlib"]["seconds"]) for row in rows]

    return of_records


def exchange(size: int, contender: str) -> Ratios:
    """Return the ratios of all_to_all_v with equal counts."""

    def of_records(records: Sequence[Record]) -> list[float]:
        times = [
            {
                row["contender"]: row["us"]
                for row in record["rows"]
                if (row["pattern"], row["bytes"]) == ("balanced", size)
            }
            for record in records
        ]
        return [one["MPI"] / one[contender] for one in times]

    return of_records


def step(peer: str, ours: str) -> Ratios:
    """Return the ratios of a record with seconds for each contender."""
    return lambda records: ratios(records, ours, peer)


def part(name: str, peer: str, **of: Any) -> Ratios:
    """Return the ratios of the row of a record's part that has these values."""

    def of_records(records: Sequence[Record]) -> list[float]:
        rows = [
            next(row for row in record[name] if all(row[key] == value for key, value in of.items()))
            for record in records
        ]
        return ratios(rows, "ours", peer)

    return of_records


_KI, _MI = 1 << 10, 1 << 20
_BLOCK = "step of a sharded transformer block, width 512"

SPEEDS = (
    Speed("all-reduce, 4 bytes", "MPI_Allreduce", "compare-*", "node", all_reduce(4, "mpi")),
    Speed("all-reduce, 1 KiB", "MPI_Allreduce", "compare-*", "node", all_reduce(_KI, "mpi")),
    Speed("all-reduce, 64 KiB", "MPI_Allreduce", "compare-*", "node", all_reduce(64 * _KI, "mpi"), first=False),
    Speed("all-reduce, 1 MiB", "MPI_Allreduce", "compare-*", "node", all_reduce(_MI, "mpi")),
    Speed("all-reduce, 1 MiB", "torch gloo", "compare-*", "node", all_reduce(_MI, "gloo")),
    Speed("all-reduce, 16 MiB", "MPI_Allreduce", "compare-*", "node", all_reduce(16 * _MI, "mpi"), first=False),
    Speed("all-reduce, 64 MiB", "MPI_Allreduce", "compare-*", "node", all_reduce(64 * _MI, "mpi")),
    Speed("all-reduce, 64 MiB", "MPI_Allreduce, tuned ring", "compare-*", "node", all_reduce(64 * _MI, "tuned ring")),
    Speed("all_to_all_v, 64 KiB to each rank, symmetric memory", "MPI_Alltoallv", "all_to_all_v-*", "node",
          exchange(64 * _KI, "plan, symmetric"), first=False),
    Speed("all_to_all_v, 64 KiB to each rank, ordinary arrays", "MPI_Alltoallv", "all_to_all_v-*", "node",
          exchange(64 * _KI, "verb"), first=False),
    Speed("all-reduce, 4 bytes, 2 emulated hosts", "MPI_Allreduce", "hosts-*", "hosts", between_hosts(4, "mpi"),
          first=False),
    Speed("all-reduce, 64 MiB, 2 emulated hosts at 1 Gbit/s", "MPI_Allreduce", "hosts-*", "hosts",
          between_hosts(64 * _MI, "mpi")),
    Speed("1,000 arrays of 4 KiB by name, in any order", "MPI_Allreduce, in one order", "named-*", "named",
          step("MPI_Allreduce", "named")),
    Speed("the same as one group", "MPI_Allreduce, in one order", "named-*", "named", step("MPI_Allreduce", "grouped"),
          first=False),
    Speed("step of a perceptron, 4.9 M parameters", "DistributedDataParallel on gloo", "data_parallel-*", "training",
          step("torch DDP, gloo", "ours")),
    Speed("step of a perceptron, 4.9 M parameters", "the step without communication", "data_parallel-*", "training",
          step("no communication", "ours"), first=False),
    Speed("step of Keras' `fit`, 4.0 M parameters", "the step without communication", "keras_fit-*", "training",
          step("no communication", "ours"), first=False),
    Speed("step of a perceptron, 2 emulated hosts at 1 Gbit/s", "DistributedDataParallel on gloo", "overlap-*",
          "training", step("torch DDP, gloo", "overlap")),
    Speed("pipeline step (1F1B), microbatches of 0.15 ms", "torch.distributed.pipelining on gloo", "pipeline-*",
          "pipeline", part("peers", "torch", kind="perceptron", rows=8, schedule="1f1b")),
    Speed("pipeline step (1F1B), microbatches of 20 ms", "torch.distributed.pipelining on gloo", "pipeline-*",
          "pipeline", part("peers", "torch", kind="perceptron", rows=256, schedule="1f1b")),
    Speed(f"{_BLOCK}, 1 token", "DTensor on gloo", "tensor-*", "tensor", part("block", "torch", tokens=1)),
    Speed(f"{_BLOCK}, 512 tokens", "DTensor on gloo", "tensor-*", "tensor", part("block", "torch", tokens=512)),
    Speed(f"{_BLOCK}, 512 tokens", "one process", "tensor-*", "tensor", part("block", "one process", tokens=512)),
    Speed("64 KiB of rows to each rank's experts and back", "torch gloo", "moe-*", "moe",
          part("moves", "gloo", nbytes=64 * _KI), first=False),
    Speed("step of a mixture of 8 experts, top-2, 1024 hidden", "written with torch gloo", "moe-*", "moe",
          part("layer", "by hand", top_k=2, hidden=1024)),
    Speed("all-reduce on a GPU shared by 2 ranks, 1 MiB", "torch gloo on CUDA tensors", "gpu_verbs_2-*", "gpu",
          verb_on_gpu(_MI)),
    Speed("all-reduce on a GPU shared by 2 ranks, 256 MiB", "torch gloo on CUDA tensors", "gpu_verbs_2-*", "gpu",
          verb_on_gpu(256 * _MI)),
    Speed("step on a GPU shared by 2 ranks, 53.6 M parameters", "DistributedDataParallel on gloo", "gpu_step_2-*",
          "gpu", step("DDP, gloo", "commlib")),
)  # fmt: skip


def load(speed: Speed, folder: Path = RESULTS) -> list[Record]:
    """Return the records of a ratio, one for each file. Raises FileNotFoundError if there is none."""
    paths = sorted(folder.glob(f"{speed.files}.json"))
    if not paths:
        raise FileNotFoundError(f"{folder / speed.files}.json: no results of {speed.what!r}")
    return [json.loads(path.read_text()) for path in paths]


def ratio_text(values: Sequence[float]) -> str:
    """Return the median, with two digits."""
    middle = statistics.median(values)
    return f"{middle:.2f}" if middle < 2 else f"{middle:.1f}" if middle < 10 else f"{middle:.0f}"


def machine(record: Record) -> str:
    """Return processor and date of a record."""
    cpu = "Intel Xeon" if "Xeon" in record["facts"]["cpu"] else record["facts"]["cpu"]
    gpu = ", H200" if "H200" in record.get("where", "") else ""
    return f"{cpu}{gpu}, {record['facts']['date'][:10]}"


def speeds(links: str, *, all_rows: bool, folder: Path = RESULTS) -> str:
    """Return the table. links: the path of benchmarks/results/ from the page. all_rows: not only the first ones."""
    rows = []
    for speed in SPEEDS:
        if speed.first or all_rows:
            records = load(speed, folder)
            source = f"[{speed.page}]({links}{speed.page}.md)"
            rows.append([speed.what, speed.peer, ratio_text(speed.ratios(records)), machine(records[0]), source])
    return table(["what", "peer", "ratio", "machine, date", "figures"], rows)


def fill(text: str, contents: str) -> str:
    """Return a page with the text between its marks replaced. Raises ValueError for a page without marks."""
    before, _, rest = text.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise ValueError(f"the page has no {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{contents}\n\n{END}{after}"
