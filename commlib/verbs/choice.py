"""Stand-in."""

from __future__ import annotations

from dataclasses import dataclass

from commlib.schedule import find


@dataclass(frozen=True, slots=True)
class Choice:
    algorithm: str
    segments: int
    seconds: float
    source: str = "model"


def choose(verb: str, algorithm: str, size: int, nbytes: int) -> Choice:
    name = algorithm
    if algorithm in ("auto", "node", "hierarchical"):
        if verb == "all_reduce":
            name = "recursive_doubling" if nbytes <= 16 << 10 else "halving_doubling" if nbytes <= 512 << 10 else "ring"
        elif verb == "reduce_scatter":
            name = "recursive_halving" if nbytes <= 256 << 10 else "ring"
        elif verb in ("reduce", "broadcast"):
            name = "binomial_tree" if nbytes <= 256 << 10 else "chain"
        elif verb == "all_gather":
            name = "bruck" if nbytes <= 16 << 10 else "ring"
        elif verb == "all_to_all":
            name = "bruck" if size > 4 and nbytes // size <= 256 else "pairwise"
    find(verb, name)
    segments = (
        min(64, max(1, nbytes // (128 << 10))) if name in ("chain",) else max(1, min(64, nbytes // size // (1 << 20)))
    )
    return Choice(name, segments, nbytes * 1e-9)
