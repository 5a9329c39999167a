"""Gradients reduced by name: each bucket is an operation of its own, which ranks ask for in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commlib.dtypes import Array
from commlib.horovod.operations import start_allreduce
from commlib.horovod.process_sets import ProcessSet
from commlib.horovod.reductions import resolve_op


def reduce_by_name(process_set: ProcessSet | None) -> Callable[..., None]:
    """Return what reduces arrays in place over a process set, by name: see `Ranks.reduce_by_name`."""

    def reduce(arrays: Sequence[Array], name: str, *, op: str, predivide: float) -> None:
        start_allreduce(
            arrays,
            arrays,
            name,
            op=resolve_op(op),
            prescale_factor=1 / predivide,
            postscale_factor=predivide,
            process_set=process_set,
            blocking=True,
        ).wait()

    return reduce
