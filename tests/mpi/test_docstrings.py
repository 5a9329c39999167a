"""Examples in the core's docstrings: doctest runs them on two ranks."""

from __future__ import annotations

import doctest
import io
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import commlib
from commlib import observing
from commlib.communicator import Communicator
from commlib.mesh_groups import Mesh
from commlib.p2p.channels.channel import Channel
from commlib.preemption import Preemption
from commlib.runtime.work import Work

pytestmark = [pytest.mark.ranks(min=2, max=2), pytest.mark.any_mpi]

HOLDERS: tuple[Any, ...] = (import_module("commlib.world"), observing, Communicator, Mesh, Work, Channel, Preemption)
FINDER = doctest.DocTestFinder(recurse=True)
EXAMPLES = {
    test.name: test
    for holder in HOLDERS
    for test in FINDER.find(holder, holder.__name__.rpartition(".")[2])
    if test.examples
}


def test_the_verbs_have_examples() -> None:
    assert len(EXAMPLES) > 35 and {"Communicator.all_reduce", "Mesh", "Channel.send", "world.init"} <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(comm: Any, name: str) -> None:
    test, output = EXAMPLES[name], io.StringIO()
    test.globs = {"comm": comm, "commlib": commlib, "np": np}
    results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(
        test, out=output.write, clear_globs=False
    )
    assert results.failed == 0, output.getvalue()


def test_a_wrong_example_is_detected(comm: Any) -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> comm.size\n3\n", {"comm": comm}, "wrong", None, 0)
    assert doctest.DocTestRunner().run(wrong, out=lambda text: None).failed == 1
