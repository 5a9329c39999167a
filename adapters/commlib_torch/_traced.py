"""Traced: cut any module between its operations, as torch.fx traces them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import fx, nn

from commlib.errors import UsageError
from commlib.pipeline.schedule import Link
from commlib.pipeline.split import check_names, counts_between
from commlib_torch._parts import INPUTS, OUTPUT, Cut, Named

_SEVERAL = 4
"""How many times more units than stages there should be, so that these can be even."""


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Leave layers that are divided among ranks whole: they do more than torch.fx can see."""
        return type(m).__module__.startswith("commlib_torch.") or super().is_leaf_module(m, module_qualified_name)


class Traced:
    """A model's operations, in units between which as few values as possible cross."""

    def __init__(self, model: nn.Module, stages: int) -> None:
        self._model = model
        try:
            self._graph = _Tracer().trace(model)
        except Exception as error:
            raise UsageError(
                f"pipeline: {type(model).__name__} cannot be traced ({type(error).__name__}: {error}). Give its layers "
                "as a list or an nn.Sequential, or keep what depends on values out of forward"
            ) from error
        self._nodes = [node for node in self._graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
        self._order = {node: number for number, node in enumerate(self._nodes)}
        self._places = self._find_places(stages)

    def _find_places(self, stages: int) -> list[int]:
        """Return where units begin, and the end: more of them where few values cross everywhere."""
        crossing = [self._alive(number) for number in range(1, len(self._nodes))]
        places = [0, len(self._nodes)]
        for most in sorted(set(crossing)):
            places = [0, *(number for number, count in enumerate(crossing, 1) if count <= most), len(self._nodes)]
            if len(places) > _SEVERAL * stages:
                break
        if len(places) <= stages:
            raise UsageError(f"pipeline: {len(self._nodes)} operations cannot be cut into {stages} stages")
        return places

    def _alive(self, number: int) -> int:
        """Return how many values are made before an operation and used by it or later."""
        made = (node for node in self._graph.nodes if self._order.get(node, -1) < number and node.op != "get_attr")
        return sum(any(self._order.get(user, len(self._nodes)) >= number for user in node.users) for node in made)

    def sizes(self) -> list[float]:
        """See `Units`. A parameter counts where it is used first."""
        seen: set[int] = set()
        sizes = [self._size(node, seen) for node in self._nodes]
        return [sum(sizes[start:end]) for start, end in pairwise(self._places)]

    def _size(self, node: fx.Node, seen: set[int]) -> float:
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

    def count_of(self, split: Sequence[Any], stages: int) -> tuple[int, ...]:
        """Return the units between the first operations of the submodules that are named."""
        check_names(split, stages)
        starts = [self._first_of(name) for name in split]
        self._places = sorted({*self._places, *starts})
        return counts_between([self._places.index(start) for start in starts], len(self._places) - 1, split)

    def _first_of(self, name: str) -> int:
        for node, number in self._order.items():
            path = str(node.target) if node.op == "call_module" else ""
            stack = [where for where, _ in node.meta.get("nn_module_stack", {}).values()]
            if any(place == name or place.startswith(f"{name}.") for place in [path, *stack]):
                return number
        raise UsageError(f"pipeline: split: forward does not use a submodule {name!r}")

    def cut(self, counts: Sequence[int]) -> Cut:
        """See `Units`."""
        starts = [self._places[start] for start in accumulate(counts)][:-1]
        last = len(counts) - 1
        stage_of = {node: 0 for node in self._graph.nodes if node.op == "placeholder"}
        stage_of |= {node: sum(start <= number for start in starts) for node, number in self._order.items()}
        crossing = _crossing(stage_of, last)
        parts = tuple(self._part(stage, last, stage_of, crossing) for stage in range(last + 1))
        return Cut(parts, crossing, tuple(counts))

    def _part(
        self, stage: int, last: int, stage_of: Mapping[fx.Node, int], crossing: Mapping[Link, tuple[str, ...]]
    ) -> nn.Module:
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        takes = [name for link, names in crossing.items() if link.target == stage for name in names]
        gives = list(dict.fromkeys(n for link, names in crossing.items() if link.source == stage for n in names))
        by_name = {node.name: node for node in self._graph.nodes}
        for name in takes:
            made[by_name[name]] = graph.placeholder(name)
        if stage == 0:
            for node in self._graph.nodes:
                if node.op == "placeholder":
                    made[node] = graph.node_copy(node)

        def value(node: fx.Node) -> fx.Node:
            if node not in made and node.op == "get_attr":
                made[node] = graph.node_copy(node)
            return made[node]

        for node in self._nodes:
            if stage_of[node] == stage:
                made[node] = graph.node_copy(node, value)
        results: Any = {name: made[by_name[name]] for name in gives}
        if stage == last:
            (output,) = (node for node in self._graph.nodes if node.op == "output")
            results[OUTPUT] = fx.map_arg(output.args[0], value)
        graph.output(results)
        graph.lint()
        return _Operations(fx.GraphModule(self._model, graph), takes, has_inputs=stage == 0)


def _crossing(stage_of: Mapping[fx.Node, int], last: int) -> dict[Link, tuple[str, ...]]:
    """Return the names of the values that go along each link."""
    found: dict[Link, list[str]] = {}
    for node, stage in stage_of.items():
        for user in node.users:
            other = last if user.op == "output" else stage_of[user]
            if other != stage:
                names = found.setdefault(Link(stage, other), [])
                if node.name not in names:
                    names.append(node.name)
    return {link: tuple(found[link]) for link in sorted(found)}


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
