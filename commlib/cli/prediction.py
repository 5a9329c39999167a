"""Prediction: the predicted times of a verb on a described cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from commlib.arguments import suggest
from commlib.console.text import bytes_text, columns, digits, seconds_text
from commlib.console.width import wrap
from commlib.cost.flat import predict_flat
from commlib.cost.hierarchical import predict_hierarchical
from commlib.cost.model import DEFAULT, Machine
from commlib.cost.table import Table
from commlib.errors import UsageError
from commlib.schedule import LinkCost, algorithms
from commlib.schedule.expansion import rail_algorithms
from commlib.schedule.hierarchy import HIERARCHICAL

MOST_RANKS = 16384
SIZES = tuple(4096 << 4 * power for power in range(6))  # 4 KiB to 4 GiB
HIERARCHICAL_MARK = "h:"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds of each algorithm, by size."""

    verb: str
    nodes: int
    ranks_per_node: int
    machine: Machine
    rows: dict[int, dict[str, float]]

    def to_dict(self) -> dict[str, Any]:
        """Return the data of `commlib show --predict --json`."""
        node, network = self.machine.node, self.machine.network
        return {
            "verb": self.verb,
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "machine": {
                "node": {"alpha": node.alpha, "beta": node.beta},
                "network": {"alpha": network.alpha, "beta": network.beta},
                "gamma": self.machine.gamma,
            },
            "rows": [{"bytes": size, "seconds": row, "best": find_fastest(row)} for size, row in self.rows.items()],
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return the table, in at most `width` columns."""
        names = list(next(iter(self.rows.values())))
        lines = [["bytes", *names]]
        for size, row in self.rows.items():
            best = find_fastest(row)
            lines.append([bytes_text(size), *(seconds_text(row[n]) + (" *" if n == best else "  ") for n in names)])
        lines[0][1:] = (name + "  " for name in lines[0][1:])
        ranks = self.nodes * self.ranks_per_node
        title = f"{self.verb}, predicted for {self.nodes} x {self.ranks_per_node} = {ranks} ranks; * is the fastest"
        title += "\n" + describe(self.machine)
        if any(name.startswith(HIERARCHICAL_MARK) for name in names):
            title += f"\n{HIERARCHICAL_MARK} hierarchical: shared memory within a node, the algorithm between nodes"
        return f"{wrap(title, width, indent=2)}\n\n{columns(lines, width=width)}"


def predict_all(
    verb: str, nodes: int, ranks_per_node: int, sizes: tuple[int, ...], machine: Machine, only: str | None = None
) -> Prediction:
    """Predict all algorithms of a verb, or `only` one, flat and hierarchical. Raises UsageError."""
    names = algorithms(verb)
    if only is not None:
        if only not in names:
            raise UsageError(f"{verb} has no algorithm {only!r}; known are {', '.join(names)}{suggest(only, names)}")
        names = (only,)
    if nodes * ranks_per_node > MOST_RANKS:
        raise UsageError(f"{nodes} nodes of {ranks_per_node} ranks are more than the supported {MOST_RANKS} ranks")
    rows = {}
    for size in sizes:
        rows[size] = {name: predict_flat(verb, name, nodes, ranks_per_node, size, machine) for name in names}
        if nodes > 1 and ranks_per_node > 1 and verb in HIERARCHICAL:
            for name in (name for name in names if name in rail_algorithms(verb)):
                seconds = predict_hierarchical(verb, name, nodes, ranks_per_node, size, machine)
                rows[size][HIERARCHICAL_MARK + name] = seconds
    return Prediction(verb, nodes, ranks_per_node, machine, rows)


def find_fastest(row: dict[str, float]) -> str:
    """Return the algorithm with the minimum time, the first of equal ones."""
    return min(row, key=lambda name: float(f"{row[name]:.9e}"))


def load_machine(path: Path) -> Machine:
    """Return the machine in a tuning file; of several (one per MPI library), the last. Raises UsageError."""
    machines = Table.load(path).machines
    if not machines:
        raise UsageError(f"the tuning table {path} describes no machine: run 'commlib tune'")
    return machines[-1].machine


def make_machine(
    base: Machine | None,
    *,
    alpha_us: float | None = None,
    bandwidth_gbs: float | None = None,
    node_alpha_us: float | None = None,
    node_bandwidth_gbs: float | None = None,
    gamma_gbs: float | None = None,
) -> Machine:
    """Return `base`, or the default machine, with the given values replaced."""
    machine = base or DEFAULT
    network, node = (
        LinkCost(
            link.alpha if microseconds is None else microseconds * 1e-6,
            link.beta if gigabytes is None else 1 / (gigabytes * 1e9),
        )
        for link, microseconds, gigabytes in (
            (machine.network, alpha_us, bandwidth_gbs),
            (machine.node, node_alpha_us, node_bandwidth_gbs),
        )
    )
    gamma = machine.gamma if gamma_gbs is None else 1 / (gamma_gbs * 1e9)
    return replace(machine, node=node, network=network, gamma=gamma)


def describe(machine: Machine) -> str:
    """Return the parameters of a machine in one line."""
    links = (("network", machine.network), ("node", machine.node))
    parts = [f"{name} {digits(link.alpha * 1e6)} us and {rate(link.beta)} a message" for name, link in links]
    return ", ".join([*parts, f"combining {rate(machine.gamma)}"])


def rate(seconds_per_byte: float) -> str:
    """Return seconds per byte as GB/s."""
    return f"{digits(1e-9 / seconds_per_byte)} GB/s" if seconds_per_byte else "free"
