"""ParallelMLP: two linear layers and an activation, sharded from the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.arguments import suggest
from commlib.errors import UsageError
from commlib.sharding.axis import AxisRanks, axis_of
from commlib.tensor_parallel.styles import Column, Row
from commlib_torch._trial_run import preserve_model
from commlib_torch.tensor._sharding import compare_at_first_use
from commlib_torch.tensor.linear import ColumnLinear, RowLinear

Activation = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "elu": F.elu, "gelu": F.gelu, "leaky_relu": F.leaky_relu, "mish": F.mish, "relu": F.relu, "selu": F.selu,
    "sigmoid": F.sigmoid, "silu": F.silu, "softplus": F.softplus, "tanh": F.tanh,
}  # fmt: skip


class ParallelMLP(nn.Module):
    """A linear layer to `hidden` features, an activation, and a linear layer back, sharded among the ranks of an axis.

    x: (..., width), unsharded on every rank, or sharded along the dimension `sequence`; the output has the same layout.

    On an axis of one rank it is the unsharded layer, and for the same seed it has the same values on any number of
    ranks.

    Args:
        width: The features of inputs and outputs.
        hidden: The features between both layers.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        gated: The activation of one half of 2 * hidden features times the other half.
        activation: Its name, or an elementwise function.
        sequence: The dimension along which inputs and outputs are sharded; None: unsharded.
        bias: Whether the layer has a bias.
        **kwargs: `device` and `dtype` of the layers.

    Raises:
        UsageError: For an activation that needs all hidden features.

    Examples:
        >>> layer = ct.ParallelMLP(8, 32, comm)
        >>> layer(torch.ones(1, 8)).shape
        torch.Size([1, 8])
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        ranks: AxisRanks,
        *,
        gated: bool = False,
        activation: str | Activation = "gelu",
        sequence: int | None = None,
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.axis, self.gated = axis_of(ranks, "ParallelMLP"), gated
        self.activation = activation_of("ParallelMLP", activation)
        if callable(activation) and not is_elementwise(self.activation, hidden):
            raise UsageError(f"ParallelMLP: activation {activation!r} needs all hidden features, which are sharded")
        columns = Column(parts=2 if gated else 1, sequence=sequence)
        self.up = ColumnLinear(width, (1 + gated) * hidden, self.axis, bias, style=columns, **kwargs)
        self.down = RowLinear(hidden, width, self.axis, bias, style=Row(sequence=sequence), **kwargs)
        compare_at_first_use(self, "ParallelMLP", self.axis, {"gated": gated, "activation": activation})

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        inside: Tensor = self.up(x)
        if self.gated:
            gate, up = inside.chunk(2, -1)
            inside = self.activation(gate) * up
        else:
            inside = self.activation(inside)
        out: Tensor = self.down(inside)
        return out


def is_elementwise(activation: Activation, length: int) -> bool:
    """Return, by trial, whether a function on parts of a last dimension gives the parts of its result on all of it.

    True is returned for functions that draw random numbers, or that fail on random rows.
    """
    with torch.no_grad(), preserve_model(activation):
        x = torch.randn(3, 5, length, generator=torch.Generator().manual_seed(0), device="cpu")
        half, state = max(1, length // 2), torch.get_rng_state()
        try:
            whole, *halves = (activation(part.clone()) for part in (x, x[..., :half], x[..., half:]))
            parts = torch.cat(halves, -1)
        except Exception:
            return True
        draws = not torch.equal(state, torch.get_rng_state())
    return draws or (parts.shape == whole.shape and torch.allclose(parts, whole, 1e-4, 1e-6, equal_nan=True))


def activation_of(what: str, given: str | Activation) -> Activation:
    """Return an activation given by name, or as a function. Raises UsageError."""
    if isinstance(given, type):
        raise UsageError(
            f"{what}: activation is the class {given.__name__}, expected {given.__name__}(), or a function"
        )
    if callable(given):
        return given
    if not isinstance(given, str) or given not in _ACTIVATIONS:
        raise UsageError(
            f"{what}: activation {given!r}, expected a function, or one of {', '.join(_ACTIVATIONS)}"
            f"{suggest(given, _ACTIVATIONS)}"
        )
    return _ACTIVATIONS[given]
