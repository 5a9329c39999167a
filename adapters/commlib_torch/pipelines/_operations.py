"""Operations: a stage that is some of the operations of a traced module, under the names that it has in the model."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from commlib_torch._signature import Call
from commlib_torch.pipelines._options import options_of
from commlib_torch.pipelines._parts import INPUTS, Named


class Operations(nn.Module):
    """Some of the operations of a model, over submodules, parameters and buffers under the names that they have there.

    graph: takes the values `takes` and, of a first stage, those of the call that may differ; gives named values.
    constants: tensors that the operations need and that are no state. kept: names of parameters and buffers
    that no operation uses, but which are the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        takes: Sequence[str],
        *,
        call: Call | None,
        constants: dict[str, Any],
        kept: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.training = model.training
        called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        named = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
        for path in sorted(called, key=lambda path: path.count(".")):
            self._take_module(model, path)
        for path in [*named, *kept]:
            self._take_value(model, path, constants)
        # No attributes of a module: a layer of the model may have the same name.
        vars(self)["_commlib"] = compiled(graph, type(model).__name__), tuple(takes), call, *options_of(graph)

    def forward(self, values: Named) -> Named:
        """Run the operations."""
        run, takes, call, *_ = vars(self)["_commlib"]
        taken = {name: values[name] for name in takes}
        if call is not None:
            taken |= call.taken(*values[INPUTS])
        results: Named = run(self, **taken)
        return results

    def _take_module(self, model: nn.Module, path: str) -> None:
        *around, name = path.split(".")
        holder, _ = self._holder(model, around)
        if name not in holder._modules:
            holder._modules[name] = model.get_submodule(path)

    def _take_value(self, model: nn.Module, path: str, constants: dict[str, Any]) -> None:
        """Take a parameter, a buffer, or any other attribute, such as a tensor that is no state, or a mode."""
        if path in constants:
            vars(self)[path] = constants[path]
            return
        *around, name = path.split(".")
        holder, source = self._holder(model, around)
        if holder is source or name == "training":
            return
        if name in source._parameters:
            holder._parameters[name] = source._parameters[name]
        elif name in source._buffers:
            holder.register_buffer(
                name, source._buffers[name], persistent=name not in source._non_persistent_buffers_set
            )
        elif name in source._modules:
            holder._modules[name] = source._modules[name]
        else:
            vars(holder)[name] = getattr(source, name)

    def _holder(self, model: nn.Module, path: Sequence[str]) -> tuple[nn.Module, nn.Module]:
        """Return what holds a path's values here, and in the model: the same where the whole module is here."""
        here: nn.Module = self
        there = model
        for name in path:
            there = there.get_submodule(name)
            if name not in here._modules:
                here._modules[name] = nn.Module()
                here._modules[name].training = there.training  # type: ignore[union-attr]
            here = here.get_submodule(name)
        return here, there


def compiled(graph: fx.Graph, title: str) -> Callable[..., Named]:
    """Return a graph as a function of a module and of its placeholders, by name."""
    code = graph.python_code("self")
    file = f"<a stage of {title}, {id(code):x}>"
    linecache.cache[file] = len(code.src), None, code.src.splitlines(keepends=True), file  # for tracebacks
    found: dict[str, Any] = {**code.globals, "__name__": __name__}
    exec(compile(code.src, file, "exec"), found)
    return found["forward"]  # type: ignore[no-any-return]


def by_mode(training: bool, in_training: Any, in_evaluation: Any) -> Any:
    """Return one of two constants: what a module's mode decides is decided when it is called."""
    return in_training if training else in_evaluation


def without_gradients(graph: fx.Graph, nodes: Sequence[tuple[fx.Node, bool]]) -> None:
    """Let some nodes of a graph compute without gradients, as given by whether each computes with them."""
    if all(wanted for _, wanted in nodes):
        return
    with graph.inserting_before(nodes[0][0]):
        outside = graph.call_function(torch.is_grad_enabled)
    current = True
    for node, wanted in nodes:
        if wanted != current:
            with graph.inserting_before(node):
                graph.call_function(torch._C._set_grad_enabled, (outside if wanted else False,))
            current = wanted
    if not current:
        with graph.inserting_after(nodes[-1][0]):
            graph.call_function(torch._C._set_grad_enabled, (outside,))


def state_names(module: nn.Module) -> list[str]:
    """Return the names of all parameters and buffers, of those that are several times there, too."""
    found: list[tuple[str, Tensor]] = [*module.named_parameters(remove_duplicate=False)]
    return [name for name, _ in (*found, *module.named_buffers(remove_duplicate=False))]
