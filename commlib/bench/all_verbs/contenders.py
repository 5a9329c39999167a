"""Contenders of a row: commlib's forms of a verb, and MPI's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from commlib.bench import commlib_contender, mpi_peer
from commlib.bench.all_verbs.cells import MPI, PERSISTENT, competes
from commlib.bench.cases import Case
from commlib.bench.measure import Call
from commlib.bench.session import Make
from commlib.bench.verbs import BenchVerb

PIECES_FROM = 16 << 20  # bytes from which MPI_Allreduce is also measured in pieces


def make_contenders(comm: Any, world: Any, verb: BenchVerb, forms: Sequence[str]) -> dict[str, Make]:
    """Return the contenders by name: the forms, and those of MPI's that they compete with."""
    ours: dict[str, Make] = {
        "blocking": partial(commlib_contender.call, comm),
        "asynchronous": partial(commlib_contender.call, comm, asynchronous=True),
        "planned": partial(commlib_contender.call, comm, plan=True),
    }
    theirs: dict[str, Make] = {MPI: partial(mpi_peer.call, world)}
    if verb.has_plan:
        theirs[PERSISTENT] = partial(mpi_peer.persistent, world)
    if verb.name == "all_reduce":
        theirs["pieces"] = partial(_pieces, world)
    if verb.name == "reduce_scatter":
        theirs["block"] = partial(mpi_peer.block, world)
        theirs["persistent block"] = partial(mpi_peer.persistent_block, world)
    own = {form: ours[form] for form in forms if form != "planned" or verb.has_plan}
    return own | {name: make for name, make in theirs.items() if any(competes(form, name) for form in own)}


def _pieces(world: Any, case: Case) -> Call:
    if case.nbytes < PIECES_FROM:
        raise mpi_peer.UnsupportedPeerError("the array is small")
    return mpi_peer.pieces(world, case)
