"""Examples in the docstrings of TensorFlow's adapter are correct: doctest runs them on two ranks."""

from __future__ import annotations

import doctest
import inspect
import io
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as ct
import commlib_tensorflow.keras as hvd

pytestmark = pytest.mark.ranks(min=2, max=2)

PARSER = doctest.DocTestParser()
HOLDERS = {
    "commlib_tensorflow": ct,
    "commlib_tensorflow.tensor": ct.tensor,
    "commlib_tensorflow.context": ct.context,
    "commlib_tensorflow.keras": hvd,
}
EXAMPLES = {
    f"{holder}.{name}": inspect.getdoc(getattr(module, name))
    for holder, module in HOLDERS.items()
    for name in module.__all__
    if callable(getattr(module, name)) and ">>> " in (inspect.getdoc(getattr(module, name)) or "")
}


def test_verbs_and_layers_have_examples() -> None:
    assert len(EXAMPLES) > 25
    assert {
        "commlib_tensorflow.allreduce",
        "commlib_tensorflow.tensor.gather",
        "commlib_tensorflow.context.shard_sequence",
    } <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(comm: Any, name: str) -> None:
    names = {"ct": ct, "comm": comm, "tf": tf, "hvd": hvd, "np": np}
    test, output = PARSER.get_doctest(EXAMPLES[name] or "", names, name, None, 0), io.StringIO()
    results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=output.write)
    assert results.failed == 0, output.getvalue()
