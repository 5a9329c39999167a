"""Parts: cut a model into stages that keep its names, and say which values go from one to another."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import fx, nn

from commlib.errors import UsageError
from commlib.pipeline.schedule import Link
from commlib.pipeline.schedule.balance import balance

INPUTS, OUTPUT = "inputs", "output"
"""The names of what the first stage is given, as (args, kwargs), and of what the last one returns."""

Split = str | Sequence[int] | Sequence[str] | Callable[[nn.Module], Sequence[int]]

Named = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """A model in stages. values: the names of what goes along each link, in order. counts: layers of each stage."""

    parts: tuple[nn.Module, ...]
    values: Mapping[Link, tuple[str, ...]]
    counts: tuple[int, ...]

    @property
    def links(self) -> tuple[Link, ...]:
        """The links between stages."""
        return tuple(self.values)


def cut(model: Any, stages: int, split: Split) -> Cut:
    """Cut a model into `stages` parts, each an nn.Module that maps named values to named values.

    A sequence of modules (nn.Sequential, nn.ModuleList, a list) is cut between them; what one returns is what the next
    is called with, a tuple as several arguments. Any other module is traced by torch.fx, and cut between its operations
    where few values cross: so skip connections may go over several stages.

    split: "auto", so that parameters (and where there are none, layers) are even; or how many layers each stage has; or
    the names of the submodules at which the second, third, ... stage begins. Raises UsageError.
    """
    if isinstance(model, nn.Sequential | nn.ModuleList):
        return _cut_sequence(list(model.named_children()), stages, split)
    if isinstance(model, list | tuple):
        for layer in model:
            if not isinstance(layer, nn.Module):
                raise UsageError(f"pipeline: a layer is {type(layer).__name__}, expected an nn.Module")
        return _cut_sequence([(str(number), layer) for number, layer in enumerate(model)], stages, split)
    if not isinstance(model, nn.Module):
        raise UsageError(f"pipeline: expected an nn.Module or a list of them, got {type(model).__name__}")
    return _Traced(model, stages, split).cut()


def parameter_bytes(module: nn.Module) -> int:
    """Return the bytes of the parameters of a module, each counted once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


# A sequence of modules


class Layers(nn.Module):
    """Some of the layers of a sequence, under the names that they have there."""

    def __init__(self, layers: Iterable[tuple[str, nn.Module]], takes: str, gives: str) -> None:
        super().__init__()
        for name, layer in layers:
            self.add_module(name, layer)
        self.takes, self.gives = takes, gives

    def forward(self, values: Named) -> Named:
        """Call the layers one after another."""
        value = values[self.takes]
        if self.takes == INPUTS:
            args, kwargs = value
            first, *rest = self.children()
            value = first(*args, **kwargs)
        else:
            rest = list(self.children())
        for layer in rest:
            value = layer(*value) if isinstance(value, tuple) else layer(value)
        return {self.gives: value}


def _cut_sequence(layers: list[tuple[str, nn.Module]], stages: int, split: Split) -> Cut:
    counts = _counts([name for name, _ in layers], [layer for _, layer in layers], stages, split)
    parts, start = [], 0
    for stage, count in enumerate(counts):
        takes = INPUTS if stage == 0 else f"after {stage - 1}"
        gives = OUTPUT if stage == stages - 1 else f"after {stage}"
        parts.append(Layers(layers[start : start + count], takes, gives))
        start += count
    return Cut(tuple(parts), {Link(s, s + 1): (f"after {s}",) for s in range(stages - 1)}, counts)


def _counts(names: Sequence[str], layers: Sequence[nn.Module], stages: int, split: Split) -> tuple[int, ...]:
    """Return how many layers each stage has."""
    if callable(split):
        split = split(nn.ModuleList(layers))
    if isinstance(split, str):
        if split != "auto":
            raise UsageError(f"pipeline: split is {split!r}, expected 'auto', numbers of layers, or names of layers")
        sizes = [float(parameter_bytes(layer)) for layer in layers]
        # Layers without parameters cost something, too: as much as a hundredth of an average one.
        least = sum(sizes) / len(sizes) / 100 if sizes and sum(sizes) else 1.0
        return balance([size + least for size in sizes], stages)
    given: list[Any] = list(split)
    if all(isinstance(count, int) for count in given):
        counts = tuple(given)
        if len(counts) != stages or min(counts, default=0) < 1 or sum(counts) != len(layers):
            raise UsageError(
                f"pipeline: split is {list(counts)}; expected {stages} positive numbers that add up to the "
                f"{len(layers)} layers"
            )
        return counts
    if len(given) != stages - 1:
        raise UsageError(f"pipeline: split names {len(given)} layers; expected {stages - 1}: one for each later stage")
    places = []
    for name in given:
        if name not in names:
            raise UsageError(f"pipeline: split: there is no layer {name!r}; there are {', '.join(names)}")
        places.append(names.index(str(name)))
    ends = [0, *places, len(names)]
    counts = tuple(end - start for start, end in pairwise(ends))
    if min(counts) < 1:
        raise UsageError(f"pipeline: split {given}: layers must be named in their order, and not the first one")
    return counts


# Any module, by its trace


class _Traced:
    """A model's operations, and the stages that they belong to."""

    def __init__(self, model: nn.Module, stages: int, split: Split) -> None:
        self._model, self._stages, self._split = model, stages, split
        try:
            self._graph = fx.Tracer().trace(model)
        except Exception as error:
            raise UsageError(
                f"pipeline: {type(model).__name__} cannot be traced ({type(error).__name__}: {error}). Give its layers "
                "as a list or an nn.Sequential, or keep what depends on values out of forward"
            ) from error
        self._nodes = [node for node in self._graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
        self._order = {node: number for number, node in enumerate(self._nodes)}

    def cut(self) -> Cut:
        starts = self._starts()
        stage_of: dict[fx.Node, int] = {}
        for node, number in self._order.items():
            stage_of[node] = sum(start <= number for start in starts)
        stage_of |= {node: 0 for node in self._graph.nodes if node.op == "placeholder"}
        crossing = self._crossing(stage_of)
        parts = tuple(self._part(stage, stage_of, crossing) for stage in range(self._stages))
        ends = [0, *starts, len(self._nodes)]
        return Cut(parts, crossing, tuple(end - start for start, end in pairwise(ends)))

    def _starts(self) -> list[int]:
        """Return the numbers of the operations with which the second, third, ... stage begins."""
        split = self._split(self._model) if callable(self._split) else self._split
        if split == "auto":
            return self._balanced()
        if isinstance(split, str) or not all(isinstance(name, str) for name in split):
            raise UsageError(
                "pipeline: split of a model that is traced: 'auto', or the names of the submodules at which the later "
                "stages begin"
            )
        if len(split) != self._stages - 1:
            raise UsageError(
                f"pipeline: split names {len(split)} submodules; expected {self._stages - 1}: one for each later stage"
            )
        starts = [self._first_of(str(name)) for name in split]
        if starts != sorted(set(starts)) or 0 in starts:
            raise UsageError(f"pipeline: split {list(split)}: submodules must be named in the order of their first use")
        return starts

    def _first_of(self, name: str) -> int:
        for node, number in self._order.items():
            path = str(node.target) if node.op == "call_module" else ""
            stack = [where for where, _ in node.meta.get("nn_module_stack", {}).values()]
            if any(place == name or place.startswith(f"{name}.") for place in [path, *stack]):
                return number
        raise UsageError(f"pipeline: split: forward does not use a submodule {name!r}")

    def _balanced(self) -> list[int]:
        """Cut where parameters are even, between operations over which as few values as possible cross."""
        crossing = [self._alive(number) for number in range(1, len(self._nodes))]
        for most in sorted(set(crossing)):
            places = [0, *(number for number, count in enumerate(crossing, 1) if count <= most), len(self._nodes)]
            if len(places) > self._stages:
                break
        else:
            raise UsageError(f"pipeline: {len(self._nodes)} operations cannot be cut into {self._stages} stages")
        seen: set[int] = set()
        sizes = [self._size(node, seen) for node in self._nodes]
        least = sum(sizes) / len(sizes) / 100 if sum(sizes) else 1.0
        costs = [sum(sizes[start:end]) + least * (end - start) for start, end in pairwise(places)]
        counts = balance(costs, self._stages)
        return [places[sum(counts[:stage])] for stage in range(1, self._stages)]

    def _alive(self, number: int) -> int:
        """Return how many values are made before an operation and used by it or later."""
        made = (node for node in self._graph.nodes if self._order.get(node, -1) < number and node.op != "get_attr")
        return sum(any(self._order.get(user, len(self._nodes)) >= number for user in node.users) for node in made)

    def _size(self, node: fx.Node, seen: set[int]) -> float:
        """Return the bytes of the parameters that an operation is the first one to use."""
        if node.op == "call_module":
            parameters = list(self._model.get_submodule(str(node.target)).parameters())
        else:
            used = (self._attribute(other) for other in node.all_input_nodes if other.op == "get_attr")
            parameters = [value for value in used if isinstance(value, nn.Parameter)]
        new = [parameter for parameter in parameters if id(parameter) not in seen]
        seen |= {id(parameter) for parameter in new}
        return float(sum(parameter.numel() * parameter.element_size() for parameter in new))

    def _attribute(self, node: fx.Node) -> Any:
        return operator.attrgetter(str(node.target))(self._model)

    def _crossing(self, stage_of: Mapping[fx.Node, int]) -> dict[Link, tuple[str, ...]]:
        """Return the names of the values that go along each link."""
        found: dict[Link, list[str]] = {}
        for node, stage in stage_of.items():
            for user in node.users:
                other = self._stages - 1 if user.op == "output" else stage_of[user]
                if other != stage:
                    names = found.setdefault(Link(stage, other), [])
                    if node.name not in names:
                        names.append(node.name)
        return {link: tuple(found[link]) for link in sorted(found)}

    def _part(self, stage: int, stage_of: Mapping[fx.Node, int], crossing: Mapping[Link, tuple[str, ...]]) -> nn.Module:
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        takes = [name for link, names in crossing.items() if link.target == stage for name in names]
        gives = list(dict.fromkeys(n for link, names in crossing.items() if link.source == stage for n in names))
        by_name = {node.name: node for node in self._graph.nodes}
        arguments = [node for node in self._graph.nodes if node.op == "placeholder"]
        for name in takes:
            made[by_name[name]] = graph.placeholder(name)
        if stage == 0:
            for node in arguments:
                made[node] = graph.node_copy(node)

        def value(node: fx.Node) -> fx.Node:
            if node not in made and node.op == "get_attr":
                made[node] = graph.node_copy(node)
            return made[node]

        for node in self._nodes:
            if stage_of[node] == stage:
                made[node] = graph.node_copy(node, value)
        results: Any = {name: made[by_name[name]] for name in gives}
        if stage == self._stages - 1:
            (output,) = (node for node in self._graph.nodes if node.op == "output")
            results[OUTPUT] = fx.map_arg(output.args[0], value)
        graph.output(results)
        graph.lint()
        return _Operations(fx.GraphModule(self._model, graph), takes, has_inputs=stage == 0)


class _Operations(nn.Module):
    """Some of the operations of a model, over submodules and parameters under the names that they have there."""

    def __init__(self, graph: fx.GraphModule, takes: Sequence[str], *, has_inputs: bool) -> None:
        super().__init__()
        for name, module in graph.named_children():
            self.add_module(name, module)
        for name, parameter in graph.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in graph.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.__dict__["_graph"] = graph  # no child: its names would be there twice
        self._takes, self._has_inputs = tuple(takes), has_inputs

    def forward(self, values: Named) -> Named:
        """Run the operations."""
        args, kwargs = values[INPUTS] if self._has_inputs else ((), {})
        taken = {name: values[name] for name in self._takes}
        results: Named = self.__dict__["_graph"](*args, **kwargs, **taken)
        return results
