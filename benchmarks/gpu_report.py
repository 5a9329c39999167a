"""Report: put all that `ci/gpu` found, tested and measured into one JSON file, and say in a few lines how it went.

    python benchmarks/gpu_report.py FOLDER FILE.json [--show]

The folder has parts.tsv, a line for each part (name, exit code, seconds, limit), and for a part NAME.jsonl, its tests,
or NAME.json, its figures. Ends with 1 if a test or a part failed. Nothing but the standard library is needed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

OVER, NO_TIME = 124, 125  # exit codes: the part's limit was over; there was no time to begin it


def tests_of(path: Path) -> list[dict[str, Any]]:
    """Return the tests of one part: a test that has begun and not ended is "unfinished"."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        told = json.loads(line)
        before = found.get(told["test"])
        # A test that passed may yet fail when it is taken down; not the other way round.
        if before is None or before["outcome"] in ("begun", "passed"):
            found[told["test"]] = told
    for told in found.values():
        if told["outcome"] == "begun":
            told["outcome"] = "unfinished"
    return list(found.values())


def verdict(code: int, limit: int) -> str:
    if code == NO_TIME:
        return "no time was left"
    if code == OVER:
        return f"ended after {limit} s"
    return "ok" if code == 0 else f"failed with {code}"


def collect(folder: Path) -> dict[str, Any]:
    """Return everything."""
    content: dict[str, Any] = {"machine": {}, "parts": [], "tests": {}, "benchmarks": {}}
    found = folder / "found.json"
    if found.exists():
        content["machine"] = json.loads(found.read_text())
    for line in (folder / "parts.tsv").read_text().splitlines():
        name, code, seconds, limit = line.split("\t")
        part: dict[str, Any] = {"name": name, "code": int(code), "seconds": int(seconds), "limit": int(limit)}
        part["verdict"] = verdict(part["code"], part["limit"])
        if (outcomes := folder / f"{name}.jsonl").exists():
            content["tests"][name] = tests_of(outcomes)
            part["tests"] = dict(Counter(test["outcome"] for test in content["tests"][name]))
        if name != "found" and (figures := folder / f"{name}.json").exists():
            content["benchmarks"][name] = json.loads(figures.read_text())
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
    """Return whether a part failed, or was ended; what had no time left has said nothing."""
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
