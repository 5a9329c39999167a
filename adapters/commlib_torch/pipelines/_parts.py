"""Model splitting: cut a model into stages that keep its names, and list the values of each link."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

from torch import nn

from commlib.pipeline.schedule import Link
from commlib.pipeline.split import even_counts, read_split, unknown_split

INPUTS, OUTPUT = "inputs", "output"
"""The names of the first stage's arguments, (args, kwargs), and of the last stage's result."""

Named = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A model split into stages. values: the names of each link's values, in order. counts: units per stage."""

    parts: tuple[nn.Module, ...]
    values: Mapping[Link, tuple[str, ...]]
    counts: tuple[int, ...]

    @property
    def links(self) -> tuple[Link, ...]:
        """The links between stages."""
        return tuple(self.values)


class Units(Protocol):
    """A model as a sequence of units; a split is between units."""

    def sizes(self) -> list[float]:
        """Return the bytes of the parameters of each unit."""
        ...

    def count_of(self, split: Sequence[Any], stages: int) -> tuple[int, ...]:
        """Return the number of units of each stage from the user's `split`. Raises UsageError."""
        ...

    def cut(self, counts: Sequence[int]) -> SplitModel:
        """Return stages with these numbers of units. A stage maps named values to named values."""
        ...


def compute_counts(units: Units, stages: int, split: Any) -> tuple[int, ...]:
    """Return the number of units of each stage: "auto" balances parameter bytes. Raises UsageError."""
    if not isinstance(split, str):
        return units.count_of(list(split), stages)
    if split != "auto":
        raise unknown_split(split)
    return even_counts(units.sizes(), stages)


class Layers:
    """A sequence of named modules: the output of one is the input of the next.

    spreads: a tuple returned by a layer becomes several arguments of the next, as in a list of layers; otherwise it is
    one argument, as in nn.Sequential. container: the module that has the layers; its own parameters and buffers go to
    the first stage.
    """

    def __init__(
        self, layers: Iterable[tuple[str, nn.Module]], *, spreads: bool, container: nn.Module | None = None
    ) -> None:
        self._layers, self._spreads, self._container = list(layers), spreads, container

    def sizes(self) -> list[float]:
        """Return the bytes of the parameters of each layer."""
        return [float(parameter_bytes(layer)) for _, layer in self._layers]

    def count_of(self, split: Sequence[Any], stages: int) -> tuple[int, ...]:
        """Return the numbers of layers as given, or computed from the names of the first layers of stages."""
        return read_split(split, [name for name, _ in self._layers], stages)

    def cut(self, counts: Sequence[int]) -> SplitModel:
        """Return stages with these numbers of layers."""
        last = len(counts) - 1
        parts = tuple(
            _Layers(
                self._layers[start:end],
                INPUTS if stage == 0 else f"after {stage - 1}",
                OUTPUT if stage == last else f"after {stage}",
                spreads=self._spreads,
            )
            for stage, (start, end) in enumerate(pairwise((0, *accumulate(counts))))
        )
        if self._container is not None:
            _take_state(parts[0], self._container)
        return SplitModel(parts, {Link(s, s + 1): (f"after {s}",) for s in range(last)}, tuple(counts))


class _Layers(nn.Module):
    """Some of the layers of a sequence, under their names in it."""

    def __init__(self, layers: Iterable[tuple[str, nn.Module]], takes: str, gives: str, *, spreads: bool) -> None:
        super().__init__()
        self._modules.update(layers)  # independent of their names
        vars(self)["_commlib"] = takes, gives, spreads

    def forward(self, values: Named) -> Named:
        """Call the layers one after another."""
        takes, gives, spreads = vars(self)["_commlib"]
        value = values[takes]
        # children() leaves out repeated layers
        layers = (layer for layer in self._modules.values() if layer is not None)
        if takes == INPUTS:
            args, kwargs = value
            value = next(layers)(*args, **kwargs)
        for layer in layers:
            value = layer(*value) if spreads and isinstance(value, tuple) else layer(value)
        return {gives: value}


def _take_state(part: nn.Module, container: nn.Module) -> None:
    """Give a stage the parameters and buffers of the container."""
    part._parameters.update(container._parameters)
    for name, buffer in container._buffers.items():
        part.register_buffer(name, buffer, persistent=name not in container._non_persistent_buffers_set)


def parameter_bytes(module: nn.Module) -> int:
    """Return the bytes of the parameters of a module, each counted once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
