"""Gradients that travel outside the buckets: sparse ones, and those that a user's compressor packs.

They have a slot without elements, whose flag tells all ranks whether any of them has such a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from commlib import horovod as core
from commlib.data_parallel import Statistics
from commlib.data_parallel.report import all_reduce_bytes
from commlib.errors import MismatchError, UsageError
from commlib_torch._bridge import to_tensor as new
from commlib_torch._call import read
from commlib_torch._options import Options
from commlib_torch._parameters import Named
from commlib_torch.horovod._start import Reduction, start_allreduce


class Aside:
    """Which gradients of some parameters go aside, as far as all ranks know, and the exchanges that reduce them."""

    def __init__(self, comm: Any, options: Options, named: Sequence[Named]) -> None:
        self._comm, self._options = comm, options
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._everything = options.compressor is not None
        self._sparse: set[int] = set()
        """Parameters that all ranks know to have sparse gradients, which travel aside."""
        self._sparse_again: dict[int, int] = {}
        """Those that all ranks know to have sparse gradients, which travel dense; with their sparse dimensions."""
        self._found: dict[int, int] = {}
        """Those that this rank found since ranks last spoke about it."""

    def __contains__(self, index: object) -> bool:
        return index in self._sparse or self._everything

    @property
    def sparse(self) -> frozenset[int]:
        """Parameters that all ranks know to have sparse gradients."""
        return frozenset(self._sparse)

    def restore(self, sparse: Iterable[int]) -> None:
        """Take parameters for known to have sparse gradients. The same on all ranks."""
        self._sparse.update(sparse)

    @property
    def has_news(self) -> bool:
        """This rank found a sparse gradient that not all ranks know of."""
        return bool(self._found)

    def is_new(self, index: int, grad: Tensor | None) -> bool:
        """Note a sparse gradient of a parameter that not all ranks know to have such.

        Returns whether it cannot travel before they do.
        """
        if grad is None or grad.layout == torch.strided or index in self._sparse or index in self._sparse_again:
            return False
        self._found[index] = grad.sparse_dim() if grad.layout == torch.sparse_coo else grad.dim()
        return not self._options.sparse_as_dense

    def prepare(self, index: int, grad: Tensor) -> None:
        """Make the gradient of a parameter that is known to have sparse ones sparse, if it is not."""
        if index in self._sparse and grad.layout == torch.strided:
            self._parameters[index].grad = grad.detach().to_sparse(1)
        elif index not in self._sparse and grad.layout != torch.strided:
            self._parameters[index].grad = grad.detach().to_dense()

    def finish(
        self, used: Callable[[int], bool], statistics: Statistics, *, news: bool, standing_in: bool = False
    ) -> bool:
        """Reduce what travels aside; return whether more parameters do so from now on. Collective.

        Every rank sees from the same flags what there is: `used` parameters, and whether any rank has `news`. One that
        is `standing_in` gives nothing, and its gradients stay. Raises MismatchError on every rank if a gradient is
        sparse on some and dense on others.
        """
        parameters, options, size = self._parameters, self._options, self._comm.size
        found = self._learn(used) if news else set()
        for index in sorted(self._sparse):
            if index in found or used(index):
                grad = None if standing_in else parameters[index].grad
                wire = options.wire_dtype(parameters[index].dtype)
                total, nbytes = gather_rows(self._comm, self._names[index], parameters[index], grad, wire=wire)
                statistics.count(nbytes * (size - 1), nbytes * (size - 1))
                if not standing_in:
                    parameters[index].grad = total / size if options.op == "mean" else total
        if options.compressor is not None and not standing_in:  # a rank that has joined needs no standing in
            packed = [i for i in range(len(parameters)) if i not in self._sparse and used(i)]
            if packed:
                named = [(self._names[index], parameters[index]) for index in packed]
                gradients, nbytes = reduce_compressed(options, named)
                whole = sum(parameter.nbytes for _, parameter in named)
                statistics.count(all_reduce_bytes(size, nbytes), all_reduce_bytes(size, whole))
                for index, gradient in zip(packed, gradients, strict=True):
                    parameters[index].grad = gradient
        if not standing_in:
            self._make_sparse_again(used)
        return bool(found)

    def _make_sparse_again(self, used: Callable[[int], bool]) -> None:
        """Give back as sparse what travelled dense for that: optimizers such as SparseAdam take nothing else."""
        for index, dimensions in self._sparse_again.items():
            parameter = self._parameters[index]
            if used(index) and parameter.grad is not None and parameter.grad.layout == torch.strided:
                parameter.grad = parameter.grad.detach().to_sparse(dimensions)

    def _learn(self, used: Callable[[int], bool]) -> set[int]:
        """Tell the other ranks which parameters have sparse gradients; return those that now travel aside."""
        everyone: dict[int, int] = {}
        for theirs in self._comm.all_gather_object(self._found):
            everyone |= theirs
        self._found.clear()
        if self._options.sparse_as_dense:
            self._sparse_again |= everyone
            return set()
        found = set(everyone)
        self._sparse |= found
        for index in sorted(found):
            if used(index):
                raise MismatchError(
                    f"the gradient of {self._names[index]} is sparse on some ranks and dense on others: "
                    "pass sparse_as_dense=True"
                )
        return found


def rows_of(name: str, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return (numbers of rows, their values) of a sparse gradient, each row once."""
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        raise UsageError(
            f"the gradient of {name} has layout {gradient.layout} with {gradient.sparse_dim()} sparse dimensions; only "
            "rows, as of an embedding, are supported: pass sparse_as_dense=True"
        )
    gradient = gradient.coalesce()
    return gradient.indices()[0], gradient.values()


def gather_rows(
    comm: Any, name: str, parameter: Tensor, gradient: Tensor | None, *, wire: torch.dtype
) -> tuple[Tensor, int]:
    """Return the sum of the sparse gradients of all ranks, on every rank, and the bytes of this rank's. Collective.

    A rank without one gives no rows. Values travel as `wire`.
    """
    if gradient is None:
        indices = torch.empty(0, dtype=torch.int64)
        values = torch.empty(0, *parameter.shape[1:], dtype=wire)
    else:
        indices, values = rows_of(name, gradient)
    indices, values = indices.cpu(), values.detach().cpu().to(wire)
    numbers = new(comm.all_gather_v(read(indices)))
    rows = new(comm.all_gather_v(read(values))).to(parameter.device, parameter.dtype)
    numbers = numbers.to(parameter.device).unsqueeze(0)
    total = torch.sparse_coo_tensor(numbers, rows, tuple(parameter.shape), check_invariants=True).coalesce()
    return total, indices.nbytes + values.nbytes


def reduce_compressed(options: Options, named: Sequence[Named]) -> tuple[list[Tensor], int]:
    """Return the gradients of (name, parameter) pairs, reduced as the user's compressor packs them, and their bytes.

    By name. A parameter without a gradient on this rank counts as zeros.
    """
    compressor = options.compressor
    assert compressor is not None
    packed: list[Tensor] = []
    contexts = []
    for _, parameter in named:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
        tensor, context = compressor.compress(gradient)
        # What it returns may be the gradient itself, and a failed operation must not have changed that.
        packed.append(tensor.clone() if tensor is gradient else tensor)
        contexts.append(context)
    how = Reduction(
        core.resolve_op(options.op),
        f"gradients of {named[0][0]} and {len(named) - 1} more",
        prescale_factor=1 / options.predivide,
        postscale_factor=options.predivide,
        process_set=options.process_set,
    )
    nbytes = sum(tensor.nbytes for tensor in packed)
    results = start_allreduce(packed, how, in_place=True, blocking=True).wait()
    gradients = [compressor.decompress(result, context) for result, context in zip(results, contexts, strict=True)]
    return gradients, nbytes
