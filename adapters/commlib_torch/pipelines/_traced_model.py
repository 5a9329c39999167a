"""Traced models: split any module between its operations, as torch.fx traces them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import fx, nn

from commlib.errors import UsageError
from commlib.pipeline.schedule import Link
from commlib.pipeline.split import check_names, counts_between
from commlib_torch._tracer import GRADIENTS
from commlib_torch.pipelines._functionalization import settle
from commlib_torch.pipelines._mode_tracer import ANYWHERE, ModeTracer
from commlib_torch.pipelines._operations import Operations, disable_gradients, state_names
from commlib_torch.pipelines._parts import OUTPUT, SplitModel

_SEVERAL = 4
"""The desired number of units per stage, for even stages."""


class TracedModel:
    """A model's operations, in units with as few values as possible between them.

    example: the arguments of its calls, as `commlib_torch._signature.describe_arguments` returns them, or None. leaves:
    names of submodules that stay in one stage.
    """

    def __init__(self, model: nn.Module, stages: int, example: Any = None, leaves: Collection[str] = ()) -> None:
        self._model, self._leaves = model, leaves
        traced = ModeTracer(model, leaves).settled(example)
        self._graph, self._constants, self._call = traced.graph, traced.constants, traced.call
        self._whole = traced.whole
        self.readings = traced.readings
        """Values that the graph has fixed."""
        together = settle(self._graph, model, self._constants)
        fixed = ("placeholder", "output", "get_attr")
        self._nodes = [node for node in self._graph.nodes if node.op not in fixed and ANYWHERE not in node.meta]
        self._order = {node: number for number, node in enumerate(self._nodes)}
        self._closed = {
            place for first, last in together for place in range(self._order[first] + 1, self._order[last] + 1)
        }
        self._places = self._find_places(stages)

    def _find_places(self, stages: int) -> list[int]:
        """Return the boundaries of units and the end: more of them if few values cross everywhere."""
        crossing = {
            number: count
            for number, count in enumerate(self._crossing_counts())
            if number not in self._closed and number
        }
        places = [0, len(self._nodes)]
        for most in sorted(set(crossing.values())):
            places = [0, *(number for number, count in crossing.items() if count <= most), len(self._nodes)]
            if len(places) > _SEVERAL * stages:
                break
        if len(places) <= stages:
            raise UsageError(
                f"pipeline: {len(self._nodes)} operations cannot be split into {stages} stages{self._why_whole()}"
            )
        return places

    def _why_whole(self) -> str:
        whole = [f"{kind.__name__}, whose forward {why}" for kind, why in self._whole.items()]
        text = f"; some modules are kept in one stage: {'; '.join(whole)}" if whole else ""
        return text + ("; modules named in checkpoint= are kept in one stage, too" if self._leaves else "")

    def _crossing_counts(self) -> list[int]:
        """For each operation, return the number of values made before it and used by it or later."""
        counts = [0] * (len(self._nodes) + 1)
        for node in self._graph.nodes:
            if node.op in ("get_attr", "output") or ANYWHERE in node.meta:
                continue
            uses = [self._order.get(user, len(self._nodes)) for user in node.users]
            if uses:
                counts[self._order.get(node, -1) + 1] += 1
                counts[min(max(uses) + 1, len(self._nodes))] -= 1
        return list(accumulate(counts))[: len(self._nodes)]

    def sizes(self) -> list[float]:
        """Return the parameter bytes of each unit. A parameter counts at its first use."""
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
        if node.target in self._constants:
            return None
        return operator.attrgetter(str(node.target))(self._model)

    def count_of(self, split: Sequence[Any], stages: int) -> tuple[int, ...]:
        """Return the numbers of units between the first operations of the named submodules."""
        check_names(split, stages)
        starts = [self._first_of(name) for name in split]
        for name, start in zip(split, starts, strict=True):
            if start in self._closed:
                raise UsageError(
                    f"pipeline: split: the model cannot be split before {name!r}: a value used on both sides is "
                    "changed in place around it"
                )
        self._places = sorted({*self._places, *starts})
        return counts_between([self._places.index(start) for start in starts], len(self._places) - 1, split)

    def _first_of(self, name: str) -> int:
        for node, number in self._order.items():
            path = str(node.target) if node.op == "call_module" else ""
            stack = [where for where, _ in node.meta.get("nn_module_stack", {}).values()]
            if any(place == name or place.startswith(f"{name}.") for place in [path, *stack]):
                return number
        inside = f" as a separate operation{self._why_whole()}" if self._why_whole() else ""
        raise UsageError(f"pipeline: split: forward does not use a submodule {name!r}{inside}")

    def cut(self, counts: Sequence[int]) -> SplitModel:
        """Return stages with these numbers of units."""
        starts = [self._places[start] for start in accumulate(counts)][:-1]
        last = len(counts) - 1
        stage_of = {node: 0 for node in self._graph.nodes if node.op == "placeholder"}
        stage_of |= {node: sum(start <= number for start in starts) for node, number in self._order.items()}
        crossing = _crossing(stage_of, last)
        graphs = [self._stage(stage, last, stage_of, crossing) for stage in range(last + 1)]
        parts = [self._part(graph, takes, stage) for stage, (graph, takes) in enumerate(graphs)]
        used = {name for part in parts for name in state_names(part)}
        if unused := [name for name in state_names(self._model) if name not in used]:
            parts[0] = self._part(*graphs[0], 0, unused=unused)
        return SplitModel(tuple(parts), crossing, tuple(counts))

    def _part(self, graph: fx.Graph, takes: Sequence[str], stage: int, unused: Sequence[str] = ()) -> Operations:
        call = self._call if stage == 0 else None
        return Operations(self._model, graph, takes, call=call, constants=self._constants, unused=unused)

    def _stage(
        self, stage: int, last: int, stage_of: Mapping[fx.Node, int], crossing: Mapping[Link, tuple[str, ...]]
    ) -> tuple[fx.Graph, list[str]]:
        """Return the graph of a stage, and the names of the values it takes from others."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        takes = [name for link, names in crossing.items() if link.target == stage for name in names]
        gives = list(dict.fromkeys(n for link, names in crossing.items() if link.source == stage for n in names))
        by_name = {node.name: node for node in self._graph.nodes}
        for name in takes:
            copies[by_name[name]] = graph.placeholder(name)
        if stage == 0:
            for node in self._graph.nodes:
                if node.op == "placeholder":
                    copies[node] = graph.node_copy(node)

        def value(node: fx.Node) -> fx.Node:
            if node not in copies:  # values that each stage reads or computes itself
                copies[node] = graph.node_copy(node, value)
            return copies[node]

        own = [node for node in self._nodes if stage_of[node] == stage]
        for node in own:
            copies[node] = graph.node_copy(node, value)
        disable_gradients(graph, [(copies[node], node.meta.get(GRADIENTS, True)) for node in own])
        results: Any = {name: copies[by_name[name]] for name in gives}
        if stage == last:
            (output,) = (node for node in self._graph.nodes if node.op == "output")
            results[OUTPUT] = fx.map_arg(output.args[0], value)
        graph.output(results)
        return graph, takes


def _crossing(stage_of: Mapping[fx.Node, int], last: int) -> dict[Link, tuple[str, ...]]:
    """Return the names of the values of each link."""
    links: dict[Link, list[str]] = {}
    for node, stage in stage_of.items():
        for user in node.users:
            other = last if user.op == "output" else stage_of[user]
            if other != stage:
                names = links.setdefault(Link(stage, other), [])
                if node.name not in names:
                    names.append(node.name)
    return {link: tuple(links[link]) for link in sorted(links)}
