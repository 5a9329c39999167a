"""Operations: a stage that runs some operations of a traced module, with the model's names."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from commlib_torch._signature import ForwardCall
from commlib_torch.pipelines._options import options_of
from commlib_torch.pipelines._parts import INPUTS, Named


class Operations(nn.Module):
    """Some operations of a model, with the submodules, parameters and buffers they use, under the model's names.

    graph: takes the values `takes` and, in the first stage, the call's free values; returns named values. constants:
    tensors that the operations need and that are not state. unused: names of parameters and buffers that belong to the
    model but are used by no operation.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        takes: Sequence[str],
        *,
        call: ForwardCall | None,
        constants: dict[str, Any],
        unused: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.training = model.training
        called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        named = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
        for path in sorted(called, key=lambda path: path.count(".")):
            self._take_module(model, path)
        for path in [*named, *unused]:
            self._take_value(model, path, constants)
        # Not attributes of the module: a layer of the model may have the same name.
        vars(self)["_commlib"] = compile_graph(graph, type(model).__name__), tuple(takes), call, *options_of(graph)

    def forward(self, values: Named) -> Named:
        """Run the operations."""
        run, takes, call, *_ = vars(self)["_commlib"]
        named = {name: values[name] for name in takes}
        if call is not None:
            named |= call.values_of(*values[INPUTS])
        results: Named = run(self, **named)
        return results

    def _take_module(self, model: nn.Module, path: str) -> None:
        *around, name = path.split(".")
        holder, _ = self._holder(model, around)
        if name not in holder._modules:
            holder._modules[name] = model.get_submodule(path)

    def _take_value(self, model: nn.Module, path: str, constants: dict[str, Any]) -> None:
        """Take a parameter, a buffer, or another attribute, such as a tensor that is not state, or a mode."""
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
        """Return the module that holds a path here, and the model's; they are equal if all of the module is here."""
        here: nn.Module = self
        there = model
        for name in path:
            there = there.get_submodule(name)
            if name not in here._modules:
                here._modules[name] = nn.Module()
                here._modules[name].training = there.training  # type: ignore[union-attr]
            here = here.get_submodule(name)
        return here, there


def compile_graph(graph: fx.Graph, title: str) -> Callable[..., Named]:
    """Compile a graph to a function of a module and of the graph's placeholders, by name."""
    code = graph.python_code("self")
    file = f"<a stage of {title}, {id(code):x}>"
    linecache.cache[file] = len(code.src), None, code.src.splitlines(keepends=True), file  # for tracebacks
    namespace: dict[str, Any] = {**code.globals, "__name__": __name__}
    exec(compile(code.src, file, "exec"), namespace)
    return namespace["forward"]  # type: ignore[no-any-return]


def choose_by_mode(training: bool, in_training: Any, in_evaluation: Any) -> Any:
    """Return one of two constants: values that depend on a module's mode are chosen at the call."""
    return in_training if training else in_evaluation


def disable_gradients(graph: fx.Graph, nodes: Sequence[tuple[fx.Node, bool]]) -> None:
    """Run some nodes of a graph without gradients, as recorded for each node."""
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
    """Return the names of all parameters and buffers, including repeated ones."""
    tensors: list[tuple[str, Tensor]] = [*module.named_parameters(remove_duplicate=False)]
    return [name for name, _ in (*tensors, *module.named_buffers(remove_duplicate=False))]
