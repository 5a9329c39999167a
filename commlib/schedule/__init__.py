"""Collective algorithms as data: rounds of sends and receives that can be verified, costed and rendered."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from commlib.schedule import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from commlib.schedule.ir import EMPTY, Copy, Program, Recv, Round, Send, Span
from commlib.schedule.layout import Layout, Slices, blocks, cut, even, uneven
from commlib.schedule.registry import Algorithm, Claims, algorithm, algorithms, find, program, verbs
from commlib.schedule.render import render
from commlib.schedule.simulate import LinkCost, SimulatedCost, estimate, nodes, simulate
from commlib.schedule.verify import ScheduleError, verify

__all__ = [
    "EMPTY",
    "Algorithm",
    "Claims",
    "Copy",
    "Layout",
    "LinkCost",
    "Program",
    "Recv",
    "SimulatedCost",
    "Round",
    "ScheduleError",
    "Send",
    "Slices",
    "Span",
    "algorithm",
    "algorithms",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "blocks",
    "broadcast",
    "cut",
    "estimate",
    "even",
    "find",
    "gather",
    "nodes",
    "program",
    "reduce",
    "reduce_scatter",
    "render",
    "scatter",
    "simulate",
    "uneven",
    "verbs",
    "verify",
]

# Importing a verb registers its algorithms: a new file needs no mention here.
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
