"""UnbucketedGradients: reduce gradients outside the buckets, if they are sparse or a user's compressor packs them.

They have a slot without elements. Its flag shows all ranks whether any rank has such a gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from commlib.data_parallel.options import Gradient, Options
from commlib.data_parallel.reducer_ranks import ReducerRanks
from commlib.data_parallel.report import Statistics, all_reduce_bytes
from commlib.data_parallel.values import Values
from commlib.devices.arrays import as_contiguous
from commlib.devices.copies import copy_to_device
from commlib.dtypes import NUMPY
from commlib.errors import MismatchError, UsageError


class UnbucketedGradients:
    """The gradients that travel outside the buckets, as all ranks know, and their reductions."""

    def __init__(self, ranks: ReducerRanks, options: Options, gradients: Sequence[Gradient], values: Values) -> None:
        self._ranks, self._options, self._gradients, self._values = ranks, options, gradients, values
        self._everything = options.compressor is not None
        if self._everything:
            self._check_reduced_together(range(len(gradients)), "leave compression out, or use a built-in one")
        self._sparse: set[int] = set()
        self._sparse_again: dict[int, int] = {}
        """Parameters that all ranks know to have sparse gradients, which travel dense, with their sparse dimensions."""
        self._found: dict[int, int] = {}
        """Sparse gradients that this rank found since the last exchange, with their sparse dimensions."""

    def __contains__(self, index: object) -> bool:
        return index in self._sparse or self._everything

    @property
    def sparse(self) -> frozenset[int]:
        """Parameters that all ranks know to have sparse gradients."""
        return frozenset(self._sparse)

    def restore(self, sparse: Iterable[int]) -> None:
        """Mark parameters as known to have sparse gradients. The same on all ranks."""
        self._sparse.update(sparse)

    @property
    def has_found(self) -> bool:
        """Whether this rank found a sparse gradient that some ranks do not know of."""
        return bool(self._found)

    def is_new(self, index: int) -> bool:
        """Record a sparse gradient of a parameter that some ranks do not know to have one.

        Returns whether it must wait until all ranks know.
        """
        dimensions = self._values.sparse_dimensions(index)
        if dimensions is None or index in self._sparse or index in self._sparse_again:
            return False
        self._found[index] = dimensions
        return not self._options.sparse_as_dense

    def prepare(self, index: int) -> None:
        """Convert a gradient to rows if its parameter is known to be sparse, else to a dense array."""
        is_sparse = self._values.sparse_dimensions(index) is not None
        if index in self._sparse and not is_sparse:
            self._values.make_sparse(index)
        elif index not in self._sparse and is_sparse:
            self._values.make_dense(index)

    def finish(
        self,
        used: Callable[[int], bool],
        statistics: Statistics,
        *,
        any_found: bool,
        has_joined: bool = False,
    ) -> bool:
        """Reduce the gradients outside the buckets; return whether more parameters travel here from now on. Collective.

        Every rank decides from the same flags: `used` parameters, and whether any rank found another sparse one. A rank
        that `has_joined` contributes nothing, and its gradients do not change. Raises MismatchError on every rank if a
        gradient is sparse on some ranks and dense on others.
        """
        new_sparse = self._learn(used) if any_found else set()
        self._reduce_rows(
            [index for index in sorted(self._sparse) if index in new_sparse or used(index)], statistics, has_joined
        )
        if self._everything and not has_joined:  # by name: ranks that have joined take part anyway
            self._reduce_packed(
                [i for i in range(len(self._gradients)) if i not in self._sparse and used(i)], statistics
            )
        if not has_joined:
            self._make_sparse_again(used)
        return bool(new_sparse)

    def _reduce_rows(self, indices: Sequence[int], statistics: Statistics, has_joined: bool) -> None:
        of_device = defaultdict[str, list[int]](list)  # one exchange moves arrays of one device
        for index in indices:
            of_device[self._gradients[index].device].append(index)
        for _, those in sorted(of_device.items()):
            self._gather_rows(those, statistics, has_joined)

    def _gather_rows(self, indices: Sequence[int], statistics: Statistics, has_joined: bool) -> None:
        arrays: list[Any] = []
        for index in indices:
            wire = self._options.wire_dtype(self._gradients[index].dtype)
            if has_joined or not self._values.exists(index):
                arrays += _no_rows(self._gradients[index], wire)
            else:
                arrays += self._values.rows(index, wire)
        nbytes = sum(array.nbytes for array in arrays) * (self._ranks.size - 1)
        statistics.count(nbytes, nbytes)
        gathered = [as_contiguous(array, "gradients") for array in self._ranks.gather_rows(arrays)]
        divisor = self._ranks.size if self._options.op == "mean" else 1
        for index, numbers, rows in zip(indices, gathered[::2], gathered[1::2], strict=True):
            if not has_joined:
                self._values.take_rows(index, numbers, rows, divisor)

    def _reduce_packed(self, indices: Sequence[int], statistics: Statistics) -> None:
        if not indices:
            return
        arrays = [self._values.compress(index) for index in indices]
        first = self._gradients[indices[0]].name
        self._ranks.reduce_by_name(
            arrays,
            f"gradients of {first} and {len(indices) - 1} more",
            op=self._options.op,
            predivide=self._options.predivide,
        )
        size = self._ranks.size
        nbytes = sum(array.nbytes for array in arrays)
        whole = sum(self._gradients[index].nbytes for index in indices)
        statistics.count(all_reduce_bytes(size, nbytes), all_reduce_bytes(size, whole))
        for index, array in zip(indices, arrays, strict=True):
            self._values.decompress(index, array)

    def _make_sparse_again(self, used: Callable[[int], bool]) -> None:
        """Make gradients sparse again that travelled dense: optimizers such as SparseAdam require it."""
        for index, dimensions in self._sparse_again.items():
            values = self._values
            if used(index) and values.exists(index) and values.sparse_dimensions(index) is None:
                values.make_sparse(index, dimensions)

    def _learn(self, used: Callable[[int], bool]) -> set[int]:
        """Exchange which parameters have sparse gradients; return those that travel here from now on."""
        everyone: dict[int, int] = {}
        for theirs in self._ranks.all_gather_object(self._found):
            everyone |= theirs
        self._found.clear()
        if self._options.sparse_as_dense:
            self._sparse_again |= everyone
            return set()
        new_sparse = set(everyone)
        self._check_reduced_together(sorted(new_sparse), "pass sparse_as_dense=True")
        self._sparse |= new_sparse
        for index in sorted(new_sparse):
            if used(index):
                raise MismatchError(
                    f"the gradient of {self._gradients[index].name} is sparse on some ranks and dense on others: "
                    "pass sparse_as_dense=True"
                )
        return new_sparse

    def _check_reduced_together(self, indices: Iterable[int], remedy: str) -> None:
        """Raise UsageError, on every rank, for gradients that are reduced over only some of the ranks."""
        for gradient in (self._gradients[index] for index in indices):
            if gradient.axis:
                raise UsageError(
                    f"the gradient of {gradient.name} is reduced over some ranks only, those of {gradient.axis!r}. "
                    f"Such gradients travel only in buckets, not as rows or by a user-defined compressor: {remedy}"
                )


def _no_rows(gradient: Gradient, wire: str) -> list[Any]:
    shape = (0, *gradient.shape[1:])
    return [copy_to_device(array, gradient.place) for array in (np.empty(0, np.int64), np.empty(shape, NUMPY[wire]))]
