"""Write the pages of benchmarks/results/, and the speed tables of README, from the JSON files that benchmarks left.

    python benchmarks/pages.py            # after `python benchmarks/NAME.py ... --out benchmarks/results/NAME.json`
    python benchmarks/pages.py --check    # ends with 1 if a page differs from its files

A page has a section for each benchmark, MPI library and set of options; several files of one section are several
starts. A section shows machine, date, commit, versions and command. Its spread is the range over the starts, or for a
single start the 10 % and 90 % quantiles of its rounds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import page_tables as tables
from benchmarks import speed
from benchmarks.compare import SETTINGS
from benchmarks.page_text import range_text

RESULTS = Path(__file__).with_name("results")
ROOT = RESULTS.parents[1]
SPEED_PAGES = {
    "README.md": ("benchmarks/results/", False),
    "docs/pages/performance.md": ("../../benchmarks/results/", True),
}
"""Pages with a speed table: the path of the results from there, and whether it has all rows."""

BUSY = 0.5  # load per core, at the start and at the end without the job's ranks, above which figures prove nothing

Record = Mapping[str, Any]
Table = Callable[[Sequence[Record]], str]


@dataclass(frozen=True, slots=True)
class Topic:
    """One page. tables: by benchmark, the function that tabulates its records. hosts: only several hosts, or one."""

    name: str
    title: str
    about: str
    tables: Mapping[str, Table]
    hosts: bool | None = None


TOPICS = (
    Topic(
        "node",
        "On one node",
        "Collectives and messages between the ranks of one node.",
        {
            "compare": tables.compare,
            "all_reduce": tables.compare,
            "verb": tables.verb,
            "all_to_all_v": tables.all_to_all_v,
            "channel": tables.channel,
        },
        hosts=False,
    ),
    Topic(
        "verbs",
        "Every verb against MPI",
        "Every verb in every form, with ordinary and symmetric arrays, from `commlib bench all`.",
        {"all": tables.all_verbs},
    ),
    Topic(
        "hosts",
        "Between hosts",
        "Collectives and messages between emulated hosts: network namespaces, TCP, links of a known rate.",
        {"hosts": tables.hosts, "channel": tables.channel},
        hosts=True,
    ),
    Topic("named", "Named operations", "Arrays that each rank submits by name, in its own order.",
          {"named": tables.named}),
    Topic(
        "training",
        "Training steps",
        "A training step with communication, as a multiple of the same step without.",
        {"data_parallel": tables.steps, "keras_fit": tables.steps, "overlap": tables.steps},
    ),
    Topic("pipeline", "Pipelines", "Training steps in stages, against a peer, the simulator and empty stages.",
          {"pipeline": tables.pipeline, "pipeline_keras": tables.pipeline_keras}),
    Topic("tensor", "Sharded layers", "Layers of a model sharded over ranks, against a peer and one process.",
          {"tensor": tables.tensor, "tensor_keras": tables.tensor_keras}),
    Topic("moe", "Mixtures of experts", "Tokens to experts and back, and the step of a layer, against peers.",
          {"moe": tables.moe, "moe_keras": tables.moe_keras}),
    Topic(
        "gpu",
        "GPUs",
        "Collectives, training steps and kernels on GPUs.",
        {
            "gpu verb": tables.gpu_verbs,
            "gpu verbs": tables.gpu_verbs,
            "gpu staging": tables.gpu_verbs,
            "gpu step": tables.gpu_steps,
            "gpu kernels": tables.gpu_kernels,
        },
    ),
    Topic("timeline", "Timelines", "Training steps and calls while a timeline is written, against the same without.",
          {"timeline": tables.timeline}),
    Topic("compression", "Compressed gradients", "Training with codecs, and the codecs separately.",
          {"compression": tables.compression, "codecs": tables.codecs}),
)  # fmt: skip


def load(folder: Path = RESULTS) -> list[Record]:
    """Return the records of a folder, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def page(topic: Topic, records: Sequence[Record]) -> str:
    """Return the Markdown of one topic."""
    parts = [
        f"# {topic.title}",
        "<!-- Written by benchmarks/pages.py from the JSON files in this folder. Do not edit. -->",
        f"{topic.about} [How it is measured](../README.md).",
    ]
    sections: dict[str, list[Record]] = {}
    for record in records:
        if kind_of(record) in topic.tables and topic.hosts in (None, has_hosts(record)):
            sections.setdefault(heading(record), []).append(record)
    if not sections:
        parts.append("No results are published yet.")
    for title, group in sections.items():
        parts += [f"## {title}", facts_text(group), topic.tables[kind_of(group[0])](group)]
    return "\n\n".join(parts) + "\n"


def kind_of(record: Record) -> str:
    """Return the name of the benchmark. Of `commlib bench`: "all", "verb" or, of arrays on a GPU, "gpu verb"."""
    name: str = record["benchmark"]
    if name == "commlib bench all":
        return "all"
    if not name.startswith("commlib bench "):
        return name
    return "verb" if record["options"].get("device", "host") == "host" else "gpu verb"


def has_hosts(record: Record) -> bool:
    """Return whether the ranks were on several hosts."""
    hosts: int = record["options"].get("hosts", 1)
    return record.get("where", "") == "two hosts" or hosts > 1


def heading(record: Record) -> str:
    """Return benchmark, number of ranks, MPI library and options. Equal for starts of the same measurement."""
    facts, words = record["facts"], command(record).split()
    script = next((place for place, word in enumerate(words) if word.endswith(".py") or word == "bench"), 0)
    options = " ".join(words[script + 1 :])
    name = record["benchmark"].removeprefix("commlib ")
    ranks = f"{facts['ranks']} rank{'s' * (facts['ranks'] > 1)}"
    where = f", {record['where']}" if "where" in record else ""
    return f"{name}, {ranks}{where}, {facts['mpi']}" + (f": `{options}`" if options else "")


def facts_text(records: Sequence[Record]) -> str:
    """Return machine, date, commit and command of the records of one section."""
    first = records[0]["facts"]
    dates = sorted({record["facts"]["date"][:10] for record in records})
    commits = sorted({record["facts"].get("commit") or "none" for record in records})
    changed = " (+: with changes)" if any(commit.endswith("+") for commit in commits) else ""
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    loads, after = loads_of(records)
    several = len(records) > 1 or len(records[0].get("starts", ())) > len(SETTINGS)
    spread = tables.STARTS if several else tables.OF_ONE_START.get(kind_of(records[0]), tables.ROUNDS)
    lines = [
        f"- Machine: {first['cpu']}, {first['cores']} cores, load {range_text(loads, '.1f')} at the start, "
        f"{range_text(after, '.1f')} at the end",
        f"- Date: {', '.join(dates)}; commit {', '.join(commits)}{changed}",
        f"- Versions: {versions}",
        f"- Command: `{command(records[0])}`; files: {len(records)}; spread: {spread}",
    ]
    if was_busy(records):
        lines.append("- **The machine was busy: these figures only show the layout of the page, not the speed.**")
    return "\n".join(lines)


def loads_of(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Return the loads at the start and at the end of each record."""
    facts = [record["facts"] for record in records]
    return [one["load"] for one in facts], [one.get("load_after", one["load"]) for one in facts]


def was_busy(records: Sequence[Record]) -> bool:
    """Return whether the machine was too busy for figures that prove anything."""
    first, (loads, after) = records[0]["facts"], loads_of(records)
    return bool(max(*loads, *(load - first["ranks"] for load in after)) > BUSY * first["cores"])


def command(record: Record) -> str:
    """Return the command line of a record; records of `commlib bench` have its arguments only."""
    recorded = record["facts"]["command"]
    if isinstance(recorded, str):
        return recorded
    outputs = ("--out", "--json")
    words = [
        word
        for word, before in zip(recorded, ["", *recorded], strict=False)
        if before not in outputs and word.partition("=")[0] not in outputs
    ]
    return " ".join(["mpirun", "-n", str(record["facts"]["ranks"]), "commlib", *words])


def pages(folder: Path = RESULTS) -> dict[str, str]:
    """Return every page of results by the name of its file."""
    records = load(folder)
    return {f"{topic.name}.md": page(topic, records) for topic in TOPICS}


def speed_pages() -> dict[Path, str]:
    """Return the pages that have a speed table, with its current figures."""
    return {
        ROOT / name: speed.fill((ROOT / name).read_text(), _speeds(links, all_rows=all_rows))
        for name, (links, all_rows) in SPEED_PAGES.items()
    }


def _speeds(links: str, *, all_rows: bool) -> str:
    """Return the speed table; with all rows also a summary of every verb against MPI, if the machine was not busy."""
    table = speed.speeds(links, all_rows=all_rows)
    verbs = [record for record in load() if kind_of(record) == "all" and not was_busy([record])]
    return f"{table}\n\n{tables.all_verbs_summary(verbs, f'{links}verbs.md')}" if all_rows and verbs else table


def main() -> int:
    wrong = 0
    for path, text in {**{RESULTS / name: text for name, text in pages().items()}, **speed_pages()}.items():
        if path.exists() and path.read_text() == text:
            continue
        if "--check" in sys.argv[1:]:
            print(f"{path} differs from its JSON files: run python benchmarks/pages.py")
            wrong += 1
        else:
            path.write_text(text)
            print(f"wrote {path}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
