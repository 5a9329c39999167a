"""Checking: hold a plan of a PyTorch model against the rules, before it is divided or at its first call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from commlib.errors import UsageError
from commlib.functional.checks import check_call
from commlib.functional.runs import Outputs, Run
from commlib.tensor.styles import Style
from commlib.tensor.trace import Trace
from commlib_torch.tensor.layers import find_layer
from commlib_torch.tensor.tracing import attempted, styles_in
from commlib_torch.tensor.verify import ran


class Traced:
    """A model of PyTorch for `commlib.functional.checks`: a call is (arguments, options)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def attempt(self, call: Any, styles: Collection[str]) -> tuple[Trace, Exception | None]:
        """Return the model's trace."""
        args, options = call
        return attempted(self._model, args, options, styles)

    def run(self, call: Any, styles: Collection[str], outputs: Outputs) -> Run:
        """Run the model forward and backward."""
        return ran(self._model, call, styles, outputs)

    def styles(self) -> dict[str, Style]:
        """Return the styles of the layers that are divided."""
        return styles_in(self._model)

    def able(self, name: str, style: Style) -> bool:
        """Return whether a layer can be divided in a style."""
        try:
            return find_layer(name, self._model.get_submodule(name), style) is not None
        except UsageError:
            return False


class AtFirstCall:
    """A hook that checks a divided model's plan at its first call, and goes. It runs the model once more."""

    @classmethod
    def of(cls, model: nn.Module, *, divided_output: bool, warns: bool) -> None:
        """Put one on a model."""
        hook = cls(divided_output, warns)
        hook._handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)

    def __init__(self, divided_output: bool, warns: bool) -> None:
        self._divided_output, self._warns = divided_output, warns
        self._handle: Any = None  # copied with the model and its hooks

    def __call__(self, model: nn.Module, args: Any, options: Any) -> None:
        """Check the plan for this call."""
        if torch.compiler.is_compiling():
            return  # the first call that is not compiled is checked
        self._handle.remove()
        check_call(Traced(model), (args, options), divided_output=self._divided_output, warns=self._warns)
