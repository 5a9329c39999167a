"""GradScaler: a dynamic loss scale for float16 that ranks agree on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commlib import horovod as core
from commlib.ranks import Ranks, communicator_of
from commlib_torch._bridge import array_of


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, except that all ranks skip a step if one of them finds an infinity or NaN.

    With a sharded model, ranks see the gradients of different weights: without agreement, some would step and others
    not, and their scales would diverge. `unscale_`, or otherwise `step`, is collective over the ranks.

        scaler = ct.GradScaler(ranks=mesh)  # then as torch.amp.GradScaler

    Args:
        device: The type of device, as torch takes it.
        ranks: The ranks that agree; a mesh means all its ranks; None: all.
        **options: Arguments of `torch.amp.GradScaler`.

    Raises:
        UsageError: For ranks that have no communicator.
    """

    def __init__(self, device: str = "cpu", *, ranks: Ranks | None = None, **options: Any) -> None:
        super().__init__(device, **options)
        self.comm = core.require_world() if ranks is None else communicator_of(ranks, "GradScaler", whole=True)
        """The ranks that agree."""

    def __repr__(self) -> str:
        return f"<GradScaler of {self.comm.size} ranks, scale {self.get_scale():g}>"

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        infinities: dict[torch.device, Tensor] = super()._unscale_grads_(*args, **kwargs)
        worst = torch.zeros(())
        for value in infinities.values():
            worst = torch.maximum(worst, value.detach().cpu().reshape(()))
        self.comm.all_reduce(array_of(worst), "max", out=array_of(worst))
        for value in infinities.values():
            value.fill_(worst.item())
        return infinities
