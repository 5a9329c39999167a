"""Parts: cut a model into stages that keep its names, and say which values go from one to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

from torch import nn

from commlib.pipeline.schedule import Link
from commlib.pipeline.split import counts_given, even_counts, unknown_split

INPUTS, OUTPUT = "inputs", "output"
"""The names of what the first stage is given, as (args, kwargs), and of what the last one returns."""

Split = str | Sequence[int] | Sequence[str] | Callable[[Any], Sequence[int] | Sequence[str] | str]

Named = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """A model in stages. values: the names of what goes along each link, in order. counts: units in each stage."""

    parts: tuple[nn.Module, ...]
    values: Mapping[Link, tuple[str, ...]]
    counts: tuple[int, ...]

    @property
    def links(self) -> tuple[Link, ...]:
        """The links between stages."""
        return tuple(self.values)


class Units(Protocol):
    """A model as a sequence of units, between which it can be cut."""

    def sizes(self) -> list[float]:
        """Return the bytes of the parameters of each unit."""
        ...

    def count_of(self, split: Sequence[Any], stages: int) -> tuple[int, ...]:
        """Return how many units each stage has, as a user says it. Raises UsageError."""
        ...

    def cut(self, counts: Sequence[int]) -> Cut:
        """Return stages of so many units each. A stage maps named values to named values."""
        ...


def counts_by(units: Units, stages: int, split: Any) -> tuple[int, ...]:
    """Return how many units each stage has: even in the bytes of parameters if split is "auto". Raises UsageError."""
    if not isinstance(split, str):
        return units.count_of(list(split), stages)
    if split != "auto":
        raise unknown_split(split)
    return even_counts(units.sizes(), stages)


class Layers:
    """A sequence of named modules. What one returns is what the next is called with.

    spreads: a tuple that a layer returns is several arguments of the next, as in a list of layers; else it is one
    argument, as in nn.Sequential. container: the module that has them, whose own parameters and buffers, which no
    layer has, are the first stage's.
    """

    def __init__(
        self, layers: Iterable[tuple[str, nn.Module]], *, spreads: bool, container: nn.Module | None = None
    ) -> None:
        self._layers, self._spreads, self._container = list(layers), spreads, container

    def sizes(self) -> list[float]:
        """See `Units`."""
        return [float(parameter_bytes(layer)) for _, layer in self._layers]

    def count_of(self, split: Sequence[Any], stages: int) -> tuple[int, ...]:
        """Return numbers of layers as they are given, or those between the layers that are named."""
        return counts_given(split, [name for name, _ in self._layers], stages)

    def cut(self, counts: Sequence[int]) -> Cut:
        """See `Units`."""
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
        return Cut(parts, {Link(s, s + 1): (f"after {s}",) for s in range(last)}, tuple(counts))


class _Layers(nn.Module):
    """Some of the layers of a sequence, under the names that they have there."""

    def __init__(self, layers: Iterable[tuple[str, nn.Module]], takes: str, gives: str, *, spreads: bool) -> None:
        super().__init__()
        self._modules.update(layers)  # whatever their names are
        vars(self)["_commlib"] = takes, gives, spreads

    def forward(self, values: Named) -> Named:
        """Call the layers one after another."""
        takes, gives, spreads = vars(self)["_commlib"]
        value = values[takes]
        # children() leaves out a layer that comes again
        layers = (layer for layer in self._modules.values() if layer is not None)
        if takes == INPUTS:
            args, kwargs = value
            value = next(layers)(*args, **kwargs)
        for layer in layers:
            value = layer(*value) if spreads and isinstance(value, tuple) else layer(value)
        return {gives: value}


def _take_state(part: nn.Module, container: nn.Module) -> None:
    """Give a part the parameters and buffers of a container itself."""
    part._parameters.update(container._parameters)
    for name, buffer in container._buffers.items():
        part.register_buffer(name, buffer, persistent=name not in container._non_persistent_buffers_set)


def parameter_bytes(module: nn.Module) -> int:
    """Return the bytes of the parameters of a module, each counted once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
