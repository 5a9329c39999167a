"""Markdown tables of benchmark records: each function takes the starts of one section."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from benchmarks.compare import figures
from benchmarks.page_text import bytes_text, inner, range_text, spread_text, table, time_text
from ci.hosts import bits_per_second
from commlib.bench.all_verbs import text
from commlib.bench.all_verbs.cells import Cell, find_cells, merge
from commlib.bench.all_verbs.goals import FORMS, GOALS, MEMORIES

Record = Mapping[str, Any]

STARTS = "median (least-greatest), or least-greatest alone, of the starts"
ROUNDS = "median (10 % to 90 % of the rounds) of one start"
OF_ONE_START = {  # where a record has no rounds
    "channel": "none, medians of the rounds of one start",
    "codecs": "none, the best runs of one start",
    "compression": "none, medians of the steps of one start",
    "all_reduce": "none, medians of the rounds of one start",
    "all_to_all_v": "none, medians of the rounds of one start",
}


def compare(records: Sequence[Record]) -> str:
    """All-reduce: commlib's time, and the ratio of each peer's time to it. A file has several starts, or one."""
    starts = [one for record in records for one in record.get("starts", [{"setting": "default", **record}])]
    ours, ratios = figures(starts)
    peers = list(dict.fromkeys(peer for of in ratios.values() for peer in of))
    names = {"mpi": "MPI_Allreduce", "pieces": "1 MiB pieces", "gloo": "torch gloo"}
    rows = (
        [bytes_text(size), time_text(statistics.median(times)), *(spread_text(ratios[size].get(p, [])) for p in peers)]
        for size, times in ours.items()
    )
    return "Peers' columns: the peer's time divided by commlib's.\n\n" + table(
        ["bytes", "commlib", *(names.get(peer, peer) for peer in peers)], rows
    )


def verb(records: Sequence[Record]) -> str:
    """`commlib bench VERB`: time, peers' times as multiples of it, and the share of the memory bound."""
    shown = [row for record in records for row in record["rows"]]
    by_size: dict[int, list[Record]] = {}
    for row in shown:
        by_size.setdefault(row["size"], []).append(row)
    peers = [name for name in shown[0]["seconds"] if name != "commlib"]
    rows = []
    for size, starts in by_size.items():
        times = [statistics.median(row["seconds"]["commlib"]) for row in starts]
        cells = [spread_text(ratios(starts, "commlib", peer)) for peer in peers]
        bounds = [row["of_bound"] for row in starts if row.get("of_bound")]
        bound = f"{statistics.median(bounds):.0%}" if bounds else ""
        rows.append([bytes_text(size), time_text(statistics.median(times)), *cells, bound])
    return table(["bytes", "commlib", *(f"{peer}, times" for peer in peers), "of the bound"], rows)


def all_verbs(records: Sequence[Record]) -> str:
    """Every verb in every form: commlib's and MPI's time of each cell, and the cells that miss their goal."""
    cells = _cells_of_starts(records)
    parts = [
        "Each cell: commlib:MPI, microseconds; the fastest form of MPI's. Bytes as in "
        "[`commlib bench`](../../docs/pages/bench.md#every-verb-against-mpi). "
        f"{text.legend(cells, '**bold** misses the goal')}.",
        f"Goals, commlib's time / MPI's: {'; '.join(map(text.goal_text, GOALS))}. **{text.verdict(cells)}.**",
    ]
    for form, memory in product(FORMS, MEMORIES):
        if chosen := [cell for cell in cells if (cell.form, cell.memory) == (form, memory)]:
            titles, *rows = text.grid(chosen, around="**")
            parts += [f"### {form}, {memory} arrays", table(titles, rows)]
    return "\n\n".join(parts)


def all_verbs_summary(records: Sequence[Record], page: str) -> str:
    """Return how many cells reach their goal, for each number of ranks, MPI library, form and memory."""
    kinds: dict[tuple[str, ...], list[Cell]] = {}
    for cell in _cells_of_starts(records):
        kinds.setdefault((cell.mpi, str(cell.ranks), cell.form, cell.memory), []).append(cell)
    rows = []
    for kind, cells in kinds.items():
        shares = {cell.name: share / cell.goal for cell in cells if (share := cell.share) is not None}
        worst = max(shares, key=lambda name: shares[name], default="")
        good = sum(cell.status == "good" for cell in cells)
        farthest = f"{worst.partition(', ')[0]}: {shares[worst]:.1f} times its goal" if worst else ""
        rows.append([*kind, f"{good} of {len(cells)}", farthest])
    columns = ["MPI", "ranks", "form", "arrays", "cells that reach their goal", "farthest from it"]
    return f"[Every verb against MPI]({page}), all cells:\n\n" + table(columns, rows)


def _cells_of_starts(records: Sequence[Record]) -> list[Cell]:
    """Return the cells of several files; of a cell in several starts, the median of each start counts as a round."""
    starts: dict[tuple[object, ...], list[Cell]] = {}
    for record in records:
        for cell in find_cells(record):
            starts.setdefault(cell.key, []).append(cell)
    return [cells[0] if len(cells) == 1 else merge(cells) for cells in starts.values()]


def channel(records: Sequence[Record]) -> str:
    """Messages: the channel's time, and the ratio of the other contenders' times to it, a table for each pattern."""
    parts = []
    for pattern in records[0]["options"]["patterns"]:
        by_size: dict[int, list[dict[str, float]]] = {}
        for record in records:
            own = [row for row in record["rows"] if row["pattern"] == pattern]
            for size in dict.fromkeys(row["bytes"] for row in own):
                by_size.setdefault(size, []).append(
                    {row["contender"]: row["us"] for row in own if row["bytes"] == size}
                )
        others = [name for name in next(iter(by_size.values()))[0] if name != "channel"]
        rows = (
            [
                bytes_text(size),
                time_text(statistics.median(one["channel"] for one in starts) / 1e6),
                *(spread_text([one[name] / one["channel"] for one in starts]) for name in others),
            ]
            for size, starts in by_size.items()
        )
        parts.append(f"Pattern `{pattern}`:\n\n" + table(["bytes", "channel", *(f"{n}, times" for n in others)], rows))
    return "\n\n".join(parts)


def all_to_all_v(records: Sequence[Record]) -> str:
    """all_to_all_v: MPI's time, and its ratio to the time of each commlib variant."""
    kinds = dict.fromkeys((row["pattern"], row["bytes"]) for row in records[0]["rows"])
    names = [name for name in dict.fromkeys(row["contender"] for row in records[0]["rows"]) if name != "MPI"]
    rows = []
    for kind in sorted(kinds, key=lambda kind: kind[0]):
        of = [
            {row["contender"]: row["us"] for row in record["rows"] if (row["pattern"], row["bytes"]) == kind}
            for record in records
        ]
        ours = (spread_text([one["MPI"] / one[name] for one in of]) for name in names)
        rows.append([kind[0], bytes_text(kind[1]), range_text([one["MPI"] for one in of], ".1f"), *ours])
    text = "MPI_Alltoallv's time, on ordinary arrays, divided by the time of each commlib variant."
    return f"{text}\n\n" + table(["counts", "bytes for each rank", "MPI_Alltoallv, us", *names], rows)


def hosts(records: Sequence[Record]) -> str:
    """All-reduce between hosts: time, and the share of the links' bound, of each contender."""
    options = records[0]["options"]
    names = [name for name in records[0]["rows"][0] if name != "size"]
    rate = bits_per_second(options["rate"]) / 8
    rows = []
    for place, row in enumerate(records[0]["rows"]):
        size = row["size"]
        bound = 2 * (options["hosts"] - 1) / options["hosts"] * size / rate
        cells = []
        for name in names:
            times = [statistics.median(record["rows"][place][name]["seconds"]) for record in records]
            if len(records) == 1:
                times = inner(records[0]["rows"][place][name]["seconds"])
            share = range_text([bound / time for time in times], ".0%")
            cells.append(f"{time_text(statistics.median(times))}, {share}")
        rows.append([bytes_text(size), *cells])
    return "Each cell: time, and the share of the links' bound.\n\n" + table(["bytes", *names], rows)


def named(records: Sequence[Record]) -> str:
    """Named operations: microseconds for each array, and multiples of MPI_Allreduce in order."""
    tensors, peer = records[0]["options"]["tensors"], "MPI_Allreduce"
    rows = (
        [name, each_text(records, name, tensors), spread_text(ratios(records, peer, name))]
        for name in records[0]["seconds"]
    )
    return table(["", "us for each array", f"times {peer}"], rows)


def steps(records: Sequence[Record]) -> str:
    """Training steps: milliseconds, and multiples of the step without communication; hidden time if it is recorded."""
    reference = "no communication"
    reported = records[0].get("statistics", {})
    rows = []
    for name in records[0]["seconds"]:
        medians = [statistics.median(record["seconds"][name]) for record in records]
        cells = [name, range_text([1e3 * value for value in medians], ".1f")]
        cells.append(spread_text(ratios(records, reference, name)))
        if reported:
            hidden = [record["statistics"].get(name) for record in records]
            milliseconds = [1e3 * one["hidden_seconds"] / one["reductions"] for one in hidden if one]
            cells.append(range_text(milliseconds, ".1f"))
        rows.append(cells)
    return table(["contender", "ms a step", f"times {reference}", *(["hidden, ms"] if reported else [])], rows)


def timeline(records: Sequence[Record]) -> str:
    """Timelines: the time of a step or call without one, and the ratios of wall and processor time with one."""
    rows = []
    for name in records[0]["measured"]:
        both = [record["measured"][name] for record in records]
        off = statistics.median(wall for one in both for wall, _ in one["off"])
        cells = []
        for place in range(2):
            starts = [[on[place] / off[place] for off, on in zip(one["off"], one["on"], strict=True)] for one in both]
            some = inner(starts[0]) if len(starts) == 1 else [statistics.median(values) for values in starts]
            cells.append(f"{statistics.median(some):.3f} ({min(some):.2f}-{max(some):.2f})")
        rows.append([name, time_text(off), *cells])
    return table(["", "without", "with one, times", "processor time, times"], rows)


def pipeline(records: Sequence[Record]) -> str:
    """Pipelines: a step against torch's, sleeping stages against the simulator, and the time of each action."""
    peers, bubbles, overheads = (
        [[record[part][place] for record in records] for place in range(len(records[0][part]))]
        for part in ("peers", "bubble", "overhead")
    )
    parts = []
    if peers:
        rows = [
            [
                f"{of[0]['kind']} {of[0]['rows']} x {of[0]['width']}",
                range_text([1e3 * one["computes"] for one in of], ".2f"),
                bytes_text(of[0]["nbytes"]),
                of[0]["schedule"],
                range_text([1e3 * statistics.median(one["seconds"]["ours"]) for one in of], ".2f"),
                spread_text(ratios(of, "ours", "torch")),
                range_text(
                    [
                        statistics.median(one["seconds"]["torch"]) / (_longest(record) * one["computes"])
                        for record, one in zip(records, of, strict=True)
                    ],
                    ".2f",
                ),
            ]
            for of in peers
        ]
        columns = ["layers", "computing per microbatch and stage, ms", "bytes sent", "schedule", "ms a step"]
        parts.append(table([*columns, "times torch.distributed.pipelining", "torch, times computing alone"], rows))
    if bubbles:
        rows = [
            [
                of[0]["schedule"],
                of[0]["stages"],
                range_text([1e3 * statistics.median(one["seconds"]) for one in of], ".1f"),
                spread_text([statistics.median(one["seconds"]) / one["simulated"] for one in of]),
                range_text([one["bubble"] for one in of], ".3f"),
                range_text([one["simulated_bubble"] for one in of], ".3f"),
            ]
            for of in bubbles
        ]
        columns = ["schedule", "stages", "ms", "times the simulator's", "idle", "simulated"]
        parts.append("Sleeping stages:\n\n" + table(columns, rows))
    if overheads:
        rows = [
            [
                of[0]["schedule"],
                str(of[0]["actions"]),
                range_text([1e6 * statistics.median(one["seconds"]) / one["actions"] for one in of], ".1f"),
            ]
            for of in overheads
        ]
        parts.append("Empty stages:\n\n" + table(["schedule", "actions", "us per action"], rows))
    return "\n\n".join(parts)


def _longest(record: Record) -> int:
    """Return the number of microbatches on the longest path of a schedule with one stage on each rank."""
    return int(record["options"]["microbatches"]) + int(record["facts"]["ranks"]) - 1


def pipeline_keras(records: Sequence[Record]) -> str:
    """Keras' fit in stages: against one process, and against the simulator's prediction."""
    rows = []
    for place in range(len(records[0]["fits"])):
        of = [record["fits"][place] for record in records]
        alone, staged = ([statistics.median(one["seconds"][who]) for one in of] for who in ("one process", "pipeline"))
        rows.append([
            f"{of[0]['kind']} {of[0]['rows']} x {of[0]['width']}",
            of[0]["schedule"],
            range_text([1e3 * value for value in alone], ".0f"),
            range_text([1e3 * value for value in staged], ".0f"),
            range_text([a / b for a, b in zip(alone, staged, strict=True)], ".2f"),
            range_text([a / one["predicted"] for a, one in zip(alone, of, strict=True)], ".2f"),
            range_text([one["bubble"] for one in of], ".3f"),
            range_text([one["predicted_bubble"] for one in of], ".3f"),
        ])  # fmt: skip
    columns = ["layers", "schedule", "one process, ms a step", "pipeline", "speed-up", "predicted", "idle", "predicted"]
    return table(columns, rows)


def tensor(records: Sequence[Record]) -> str:
    """A sharded block: against torch's DTensor, computing alone and one process; memory, and bytes sent."""
    rows = []
    for place in range(len(records[0]["block"])):
        of = [record["block"][place] for record in records]
        middle = {
            who: [statistics.median(one["seconds"][who]) for one in of] for who in ("ours", "computes", "one process")
        }
        saved = [[sum(one["saved_bytes"][who].values()) / 1e6 for one in of] for who in ("ours", "one process")]
        rows.append([
            str(of[0]["tokens"]),
            range_text([1e3 * value for value in middle["ours"]], ".2f"),
            spread_text(ratios(of, "ours", "torch")),
            range_text([1e3 * value for value in middle["computes"]], ".2f"),
            range_text([a / b for a, b in zip(middle["one process"], middle["ours"], strict=True)], ".2f"),
            f"{range_text(saved[0], '.1f')} of {range_text(saved[1], '.1f')}",
            f"{bytes_text(of[0]['reduced'])} ({bytes_text(of[0]['formula'])})",
        ])  # fmt: skip
    columns = ["tokens", "ms a step", "times DTensor on gloo", "computing alone, ms", "speed-up over one process",
               "MB stored, of one process'", "bytes all-reduced (by the formula)"]  # fmt: skip
    return table(columns, rows)


def tensor_keras(records: Sequence[Record]) -> str:
    """Sharded Keras models: the cost of a redistribution in a graph, and fit against one process."""

    def cost(row: Record) -> float:
        pairs = zip(row["seconds"]["moves"], row["seconds"]["nothing"], strict=True)
        return float(statistics.median(1e6 * (moved - nothing) / row["count"] for moved, nothing in pairs))

    moves = [
        [
            bytes_text(of[0]["nbytes"]),
            "forward and backward" if of[0]["backward"] else "forward",
            range_text([cost(one) for one in of], ".0f"),
        ]
        for of in ([record["moves"][place] for record in records] for place in range(len(records[0]["moves"])))
    ]
    fits = []
    for place in range(len(records[0]["fits"])):
        of = [record["fits"][place] for record in records]
        alone, divided = ([statistics.median(one["seconds"][who]) for one in of] for who in ("one process", "divided"))
        fits.append([
            f"{of[0]['rows']} x {of[0]['width']}",
            range_text([1e3 * value for value in divided], ".1f"),
            range_text([1e3 * value for value in alone], ".1f"),
            range_text([a / b for a, b in zip(alone, divided, strict=True)], ".2f"),
        ])  # fmt: skip
    one = table(["bytes", "", "us per all-reduce"], moves)
    return f"{one}\n\n" + table(["rows x width", "fit, ms a step", "one process", "speed-up"], fits)


def moe(records: Sequence[Record]) -> str:
    """Mixtures of experts: rows to experts and back against gloo, a layer's step against others, and its parts."""
    first = records[0]
    moves = []
    for place in range(len(first["moves"])):
        of = [record["moves"][place] for record in records]
        cells = [spread_text(ratios(of, "ours", name)) for name in ("gloo", "gloo, counts")]
        least = [min(one["seconds"]["ours"]) for one in of]
        moves.append([bytes_text(of[0]["nbytes"]), _each(of, "ours", 1e6, ".0f"), _in(least, 1e6, ".0f"), *cells])
    steps, shown = [], []
    for place in range(len(first["layer"])):
        of = [record["layer"][place] for record in records]
        name = f"top-{of[0]['top_k']}, {of[0]['hidden']}"
        cells = [spread_text(ratios(of, peer, "ours")) for peer in ("by hand", "one-hot", "dense", "products")]
        steps.append([name, _each(of, "ours", 1e3, ".2f"), *cells])
        shown.append([name, *_parts([one["parts"] for one in of], _MOE_PARTS)])
    columns = ["experts", "ms a step", "times by hand", "times one-hot", "times dense", "times products"]
    return "\n\n".join([
        table(["bytes for each rank", "round trip, us", "least", "gloo, times", "gloo with counts, times"], moves),
        "A step of a layer, forward and backward; then its time divided by that of each other contender:\n\n"
        + table(columns, steps),
        "Parts of rank 0's step, in microseconds; meetings (waits for other ranks) are part of the exchanges:\n\n"
        + table(["experts", *_MOE_PARTS], shown),
    ])  # fmt: skip


_MOE_PARTS = ("routing", "routing, backward", "dispatch", "combine", "dispatch_back", "combine_back", "meetings")


def moe_keras(records: Sequence[Record]) -> str:
    """Mixtures of experts in Keras: the cost of a host node, and a step against a dense one."""
    nodes, steps = [], []
    for place in range(len(records[0]["nodes"])):
        of = [record["nodes"][place] for record in records]
        costs = []
        for one in of:
            pairs = zip(one["seconds"]["nodes"], one["seconds"]["nothing"], strict=True)
            costs.append(statistics.median((moved - nothing) / one["count"] for moved, nothing in pairs))
        inside = [
            sum(value for name, value in one["parts"].items() if name not in ("step", "meetings")) / one["count"]
            for one in of
        ]
        waits = [one["parts"]["meetings"] / one["count"] for one in of]
        nodes.append([str(of[0]["tokens"]), *(_in(values, 1e6, ".0f") for values in (costs, inside, waits))])
    for place in range(len(records[0]["steps"])):
        of = [record["steps"][place] for record in records]
        name = f"top-{of[0]['top_k']}, {of[0]['hidden']}"
        cells = [_each(of, "ours", 1e3, ".2f"), spread_text(ratios(of, "dense", "ours"))]
        steps.append([name, *cells, *_parts([one["parts"] for one in of], _MOE_PARTS)])
    columns = ["experts", "ms a step", "times dense", *(f"{name}, us" for name in _MOE_PARTS)]
    one = table(["tokens", "us per node", "routing and exchange", "meetings"], nodes)
    return f"{one}\n\nA step, and its time divided by that of the dense one:\n\n" + table(columns, steps)


def _parts(records: Sequence[Record], names: Sequence[str]) -> list[str]:
    return [_in([record.get(name, 0.0) for record in records], 1e6, ".0f") for name in names]


def _in(seconds: Sequence[float], scale: float, form: str) -> str:
    return range_text([scale * value for value in seconds], form)


def _each(records: Sequence[Record], name: str, scale: float, form: str) -> str:
    """Return the range over the starts of a contender's median."""
    return _in([statistics.median(record["seconds"][name]) for record in records], scale, form)


def compression(records: Sequence[Record]) -> str:
    """Training with each codec: time of a step, bytes sent, validation loss after the last step."""
    rows = []
    for name in records[0]["figures"]:
        of = [record["figures"][name] for record in records]
        kib = [statistics.mean(one["sent"]) / 1024 for one in of if None not in one["sent"]]
        rows.append([
            name,
            range_text([1e3 * statistics.median(one["seconds"]) for one in of], ".0f"),
            range_text(kib, ".0f"),
            range_text([one["validation"][-1][2] for one in of], ".3f"),
        ])  # fmt: skip
    return table(["contender", "ms a step", "KiB sent per rank", "validation loss"], rows)


def codecs(records: Sequence[Record]) -> str:
    """Codecs on one core: GB/s of float32, and bytes per element."""
    columns = list(next(iter(records[0]["figures"].values())))
    rows = (
        [name, *(range_text([record["figures"][name][c] for record in records], "#.3g") for c in columns)]
        for name in records[0]["figures"]
    )
    return "GB/s of float32, and payload bytes per element.\n\n" + table(["codec", *columns], rows)


def ratios(records: Sequence[Record], base: str, name: str) -> list[float]:
    """Return the ratio of a contender's time to the time of `base`, per start; of a single start, per inner round."""
    if len(records) == 1:
        seconds = records[0]["seconds"]
        return inner([one / other for one, other in zip(seconds[name], seconds[base], strict=True)])
    return [statistics.median(one["seconds"][name]) / statistics.median(one["seconds"][base]) for one in records]


def each_text(records: Sequence[Record], name: str, count: int) -> str:
    """Return microseconds per array, for `count` arrays."""
    if len(records) == 1:
        return spread_text([1e6 * value / count for value in inner(records[0]["seconds"][name])])
    return spread_text([1e6 * statistics.median(record["seconds"][name]) / count for record in records])


GPU_OURS = {"commlib": "commlib", "ordinary": "ordinary arrays"}


def gpu_verbs(records: Sequence[Record]) -> str:
    """Collectives: commlib's times, their share of the bound, and the ratio of each peer's time."""
    rows: dict[tuple[str, str, int], list[Record]] = {}
    for row in (row for record in records for row in record["rows"]):
        rows.setdefault((row["verb"], row["dtype"], row["size"]), []).append(row)
    names = list(dict.fromkeys(name for starts in rows.values() for row in starts for name in row["seconds"]))
    ours, peers = [name for name in names if name in GPU_OURS], [name for name in names if name not in GPU_OURS]
    lines = []
    for (verb, dtype, size), starts in sorted(rows.items()):
        cells = [verb, dtype, bytes_text(size)]
        for name in ours:
            bounds = [bound for row in starts for bound in row["bound_seconds"]]
            of = _gpu_seconds(starts, name)
            share = f" ({min(bounds) / of:.0%})" if of and bounds and size >= 1 << 24 else ""
            cells.append(time_text(of) + share if of else "")
        base = _gpu_seconds(starts, "commlib")
        cells += [f"{of / base:.1f}" if base and (of := _gpu_seconds(starts, peer)) else "" for peer in peers]
        lines.append(cells)
    columns = ["verb", "dtype", "bytes", *(GPU_OURS[name] for name in ours), *(f"{peer}, times" for peer in peers)]
    return "In brackets: the share of the bound.\n\n" + table(columns, lines)


def gpu_kernels(records: Sequence[Record]) -> str:
    """Kernels: the memory rate of each, and its share of a copy's rate."""
    lines = []
    for row in (row for record in records for row in record["kernels"]):
        share = f"{row['rate'] / row['copy']:.0%}"
        time = time_text(statistics.median(row["seconds"]))
        lines.append([row["name"], f"{row['moved'] / 2**20:.0f}", time, f"{row['rate']:.0f}", share, row["clock"]])
    return table(["kernel", "MiB moved", "time", "GB/s", "of a copy", "clock"], lines)


def gpu_steps(records: Sequence[Record]) -> str:
    """Training steps: their time, and their exposed communication in per cent of a step without communication."""
    lines = []
    for name in records[0]["seconds"]:
        milliseconds = [1e3 * each for record in records for each in record["seconds"][name]]
        exposed = statistics.median(record["exposed_percent"][name] for record in records)
        lines.append([name, spread_text(milliseconds), f"{exposed:.1f}"])
    return table(["step", "ms", "exposed, %"], lines)


def _gpu_seconds(rows: Sequence[Record], name: str) -> float:
    """Return the median over all rounds of a contender, 0 if it was not measured."""
    seconds: list[float] = [second for row in rows for second in row["seconds"].get(name, [])]
    return statistics.median(seconds) if seconds else 0.0
