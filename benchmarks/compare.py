"""The all-reduce benchmark in several process starts, against default and tuned MPI.

    python benchmarks/compare.py [--ranks 2] [--starts 3] [--out FILE.json] [-- OPTIONS OF all_reduce.py]

One process may be slower than the next from start to end, so a single start proves nothing. And Open MPI's segmented
ring, its best algorithm for large arrays, can only be chosen when the job starts. This program runs all_reduce.py
several times with each setting, alternating. It prints for each size the median time, and for each peer the median,
least and greatest ratio (peer's time / commlib's, both of the same process).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from commlib.bench import record

WORKER = Path(__file__).with_name("all_reduce.py")
RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "5",
    "OMPI_MCA_coll_tuned_allreduce_algorithm_segmentsize": str(1 << 20),
}
# name of the setting -> environment; in the second, "mpi" is the tuned ring
SETTINGS = {"default": {}, "tuned ring": RING}


def start(ranks: int, environment: dict[str, str], options: list[str], file: Path) -> dict[str, Any]:
    """Run all_reduce.py once and return its figures."""
    command = ["mpiexec", "-n", str(ranks), sys.executable, str(WORKER), "--out", str(file), *options]
    subprocess.run(command, env={**os.environ, **environment}, check=True, stdout=subprocess.DEVNULL)
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write raw figures of all starts to this JSON file")
    parser.add_argument("options", nargs="*", help="after --: options of all_reduce.py")
    arguments = parser.parse_args()
    starts, facts = [], dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.starts):
            for setting, environment in SETTINGS.items():
                measured = start(arguments.ranks, environment, arguments.options, Path(folder) / "start.json")
                starts.append({"setting": setting, "rows": measured["rows"]})
                facts = facts or measured["facts"]  # later starts see the load of earlier ones
    facts["command"] = shlex.join(["python", "benchmarks/compare.py", *record.program_arguments()])
    if arguments.out:
        record.write(arguments.out, "compare", facts, arguments, starts=starts)
    show(*figures(starts))


def figures(starts: list[dict[str, Any]]) -> tuple[dict[int, list[float]], dict[int, dict[str, list[float]]]]:
    """Return, by size, commlib's times in seconds and the ratios of each peer, one figure per start."""
    ours: dict[int, list[float]] = {}
    ratios: dict[int, dict[str, list[float]]] = {}
    for one in starts:
        for row in one["rows"]:
            medians = {name: statistics.median(values) for name, values in row["seconds"].items()}
            mine = medians.pop("commlib")
            ours.setdefault(row["size"], []).append(mine)
            for name, time in medians.items():
                if one["setting"] == "default" or name == "mpi":
                    label = name if one["setting"] == "default" else one["setting"]
                    ratios.setdefault(row["size"], {}).setdefault(label, []).append(time / mine)
    return ours, ratios


def show(ours: dict[int, list[float]], ratios: dict[int, dict[str, list[float]]]) -> None:
    print(f"{'size':>10}{'time us':>11}  peer's time / commlib's: median (least-greatest)")
    for size, times in ours.items():
        cells = "   ".join(
            f"{name} {statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"
            for name, values in ratios[size].items()
        )
        print(f"{size:>10}{statistics.median(times) * 1e6:>11.2f}  {cells}")


if __name__ == "__main__":
    main()
