"""Report: collect all results of `ci/gpu` in one JSON file, and print a short summary.

    python benchmarks/gpu_report.py FOLDER FILE.json [--show]

The folder has parts.tsv with a line for each part (name, exit code, seconds, limit), and for each part NAME with tests
NAME.jsonl, with figures NAME.json, or NAME.sweep of `commlib bench sweep`. The exit code is 1 if a test or a part
failed. It needs only the standard library.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

OVER, NO_TIME = 124, 125  # exit codes: the part exceeded its limit; there was no time to begin it


def tests_of(path: Path) -> list[dict[str, Any]]:
    """Return the tests of one part; a test that began and did not end is "unfinished"."""
    tests: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        before = tests.get(entry["test"])
        # A test that passed may still fail in its teardown; not the other way round.
        if before is None or before["outcome"] in ("begun", "passed"):
            tests[entry["test"]] = entry
    for entry in tests.values():
        if entry["outcome"] == "begun":
            entry["outcome"] = "unfinished"
    return list(tests.values())


def record_of(path: Path) -> dict[str, Any]:
    """Return a sweep as a record, like those of `commlib bench VERB`; a case without figures is a note."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    environment = next(line for line in lines if line["kind"] == "environment")
    cases = [line for line in lines if line["kind"] == "case"]
    notes = [f"{line['name']}: {line['status']}: {line['reason']}" for line in cases if line["row"] is None]
    notes += [note for line in cases for note in line["notes"]]
    return {
        "benchmark": "commlib bench sweep",
        "facts": environment["facts"],
        "options": environment["plan"],
        "notes": list(dict.fromkeys(notes)),
        "rows": [line["row"] for line in cases if line["row"] is not None],
    }


def verdict(code: int, limit: int) -> str:
    if code == NO_TIME:
        return "no time was left"
    if code == OVER:
        return f"ended after {limit} s"
    return "ok" if code == 0 else f"failed with {code}"


def collect(folder: Path) -> dict[str, Any]:
    """Return everything."""
    content: dict[str, Any] = {"machine": {}, "parts": [], "tests": {}, "benchmarks": {}}
    path = folder / "found.json"
    if path.exists():
        content["machine"] = json.loads(path.read_text())
    for line in (folder / "parts.tsv").read_text().splitlines():
        name, code, seconds, limit = line.split("\t")
        part: dict[str, Any] = {"name": name, "code": int(code), "seconds": int(seconds), "limit": int(limit)}
        part["verdict"] = verdict(part["code"], part["limit"])
        if (outcomes := folder / f"{name}.jsonl").exists():
            content["tests"][name] = tests_of(outcomes)
            part["tests"] = dict(Counter(test["outcome"] for test in content["tests"][name]))
        if name != "found" and (figures := folder / f"{name}.json").exists():
            content["benchmarks"][name] = json.loads(figures.read_text())
        if (sweep := folder / f"{name}.sweep").exists():
            content["benchmarks"][name] = record_of(sweep)
        content["parts"].append(part)
    return content


def show(content: dict[str, Any]) -> None:
    print(f"\n=== {'part':<16}{'seconds':>8}  how it went")
    for part in content["parts"]:
        tests = ", ".join(f"{number} {outcome}" for outcome, number in part.get("tests", {}).items())
        print(f"    {part['name']:<16}{part['seconds']:>8}  {part['verdict']}{f': {tests}' if tests else ''}")
    for name, tests in content["tests"].items():
        for test in tests:
            if test["outcome"] in ("failed", "unfinished"):
                print(f"    {name}: {test['test']} {test['outcome']}")


def has_failed(content: dict[str, Any]) -> bool:
    """Return whether a part failed or exceeded its limit; a part without time to begin does not count."""
    bad = any(test["outcome"] in ("failed", "unfinished") for tests in content["tests"].values() for test in tests)
    return bad or any(part["code"] not in (0, NO_TIME) for part in content["parts"])


def main() -> int:
    folder, target = map(Path, sys.argv[1:3])
    content = collect(folder)
    content["failed"] = has_failed(content)
    target.write_text(json.dumps(content, indent=1) + "\n")
    if "--show" in sys.argv:
        show(content)
    return int(content["failed"])


if __name__ == "__main__":
    sys.exit(main())
