"""Examples in the docstrings of PyTorch's adapter are correct: doctest runs them on two ranks."""

from __future__ import annotations

import doctest
import inspect
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import commlib_torch as ct

pytestmark = pytest.mark.ranks(min=2, max=2)

PARSER = doctest.DocTestParser()
HOLDERS = {"commlib_torch": ct, "commlib_torch.tensor": ct.tensor, "commlib_torch.context": ct.context}
EXAMPLES = {
    f"{holder}.{name}": inspect.getdoc(getattr(module, name))
    for holder, module in HOLDERS.items()
    for name in module.__all__
    if callable(getattr(module, name)) and ">>> " in (inspect.getdoc(getattr(module, name)) or "")
}


def test_verbs_and_layers_have_examples() -> None:
    assert len(EXAMPLES) > 25
    assert {"commlib_torch.allreduce", "commlib_torch.tensor.gather", "commlib_torch.context.attention"} <= set(
        EXAMPLES
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(comm: Any, name: str) -> None:
    names = {"ct": ct, "comm": comm, "torch": torch, "nn": nn, "np": np}
    test, output = PARSER.get_doctest(EXAMPLES[name] or "", names, name, None, 0), io.StringIO()
    results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=output.write)
    assert results.failed == 0, output.getvalue()
