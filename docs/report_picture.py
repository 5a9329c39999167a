"""Draw a report: the picture of docs/pages/bench.md, from raw figures in benchmarks/results.

    python docs/report_picture.py docs/pages/pictures/report.png

It compares two starts of benchmarks/all_reduce.py. Needs Chromium, and jinja2 and matplotlib from the extra 'report'.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from commlib.bench.page import page, runs
from commlib.bench.rows import BenchRow
from commlib.bench.sweep.measuring import make_line
from commlib.bench.sweep.plan import SweepCase
from commlib.bench.sweep.results import FORMAT

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
STARTS = {"start-1": "all_reduce-1.json", "start-2": "all_reduce-2.json"}
WIDTH, HEIGHT = 1240, 1330


def sweep_of(content: dict[str, Any]) -> str:
    """Return the lines that a sweep would have written for such a file."""
    facts = {**content["facts"], "hosts": ["one node"]}
    lines: list[dict[str, Any]] = [
        {"kind": "environment", "number": 0, "format": FORMAT, "plan": content["options"], "facts": facts}
    ]
    for figures in content["rows"]:
        ranks, size = content["ranks"], figures["size"]
        case = SweepCase(
            1, ranks, "all_reduce", "float32", "sum", "auto", True, True, size, tuple(content["options"]["peers"])
        )
        row = BenchRow(
            "all_reduce",
            ranks,
            "float32",
            "sum",
            None,
            size,
            figures["count"],
            figures["seconds"],
            figures["wrong"],
            [],
        )
        lines.append({**make_line(case, "ok", "", notes=[], row=row.figures(), took=0.0), "environment": 0})
    return "".join(json.dumps(one) + "\n" for one in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    browser = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if browser is None:
        raise SystemExit("Chromium not found: install it (apt install chromium); as root, ci/setup does it")
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, source in STARTS.items():
            paths.append(Path(folder) / f"{name}.jsonl")
            paths[-1].write_text(sweep_of(json.loads((RESULTS / source).read_text())))
        report = Path(folder) / "report.html"
        report.write_text(page.render([runs.read(path) for path in paths]))
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--window-size={WIDTH},{HEIGHT}",
        ]
        command = [browser, *options, f"--screenshot={arguments.out.absolute()}", report.as_uri()]
        subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    main()
