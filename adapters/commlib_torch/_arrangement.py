"""Which gradient is in which bucket, and when that changes.

Buckets are in reverse module order at first. The first backward shows in which order gradients really become ready;
where buckets are launched during backward, they are then made anew, once, by the order of rank 0. They also change
when gradients turn out to travel aside.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch

from commlib.data_parallel import Bucket, Parameter, complete_order
from commlib.errors import UsageError
from commlib_torch._bridge import dtype_name
from commlib_torch._layout import lay_out
from commlib_torch._options import Options
from commlib_torch._parameters import Named

FLAGS = 2
"""What ranks tell each other in the last bucket. Flag i is number `len(parameters) + i`."""


class Arrangement:
    """The buckets of `parameters`, the same on all ranks of `comm`."""

    def __init__(
        self,
        comm: Any,
        options: Options,
        parameters: Sequence[Named],
        groups: Sequence[Sequence[int]],
        aside: Container[int],
    ) -> None:
        self._comm, self._options = comm, options
        self._parameters, self._groups, self._aside = parameters, groups, aside
        self._order: list[int] | None = None
        self.is_settled = not parameters
        """Ranks have agreed on the order, or that there is no reason to."""

    def buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets as they should be, by what ranks know. Raises UsageError for caps that make no sense."""
        options = self._options
        specs = [self._spec(index) for index in range(len(self._parameters))]
        try:
            return lay_out(
                specs,
                self._groups,
                FLAGS,
                first_mib=options.first_bucket_mib,
                cap_mib=options.bucket_cap_mib,
                order=self._order,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error

    @property
    def order(self) -> list[int] | None:
        """The order of gradients that ranks have agreed on; None for reverse module order."""
        return self._order

    def restore(self, order: Sequence[int] | None) -> None:
        """Take an order for agreed on. The same on all ranks."""
        self._order, self.is_settled = None if order is None else list(order), True

    def learn_order(self, seen: Sequence[int], *, overlap: bool) -> bool:
        """Agree on the order in which gradients become ready; return whether one was agreed on now. Collective.

        `seen` are the parameters that the last backward made gradients of. Rank 0 decides, because ranks may have seen
        other orders, or none: if it ran no backward it is asked again after the next reduction, if it does not
        `overlap` never.
        """
        if self.is_settled:
            return False
        word: list[int] | None = None
        if self._comm.rank == 0 and overlap:
            word = complete_order(seen, len(self._parameters)) if seen else []
        word = self._comm.broadcast_object(word)
        self.is_settled = word is None or bool(word)
        self._order = word or None
        return bool(word)

    def _spec(self, index: int) -> Parameter:
        name, parameter = self._parameters[index]
        real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
        wire = self._options.wire_dtype(real.dtype)
        return Parameter(
            name,
            0 if index in self._aside else real.numel(),
            dtype_name(wire),
            wire.itemsize,
            self._options.op,
            device=parameter.device.type,
            native_itemsize=0 if wire == real.dtype else real.dtype.itemsize,
        )
