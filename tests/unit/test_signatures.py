"""Both adapters have the same parameters: names, order, kinds and defaults, for every public name that they share."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

import pytest

LIST = """
import importlib, inspect, json, sys

found = {}

def parameters(value):
    try:
        given = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # no Python function
        return []
    return [[one.name, one.kind.name, "" if one.default is one.empty else repr(one.default)] for one in given]

def visit(module, prefix):
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            visit(value, f"{prefix}{name}.")
        elif callable(value):
            found[prefix + name] = parameters(value)
            for method in vars(value) if inspect.isclass(value) else ():
                if not method.startswith("_") and callable(getattr(value, method)):
                    found[f"{prefix}{name}.{method}"] = parameters(getattr(value, method))

visit(importlib.import_module(sys.argv[1]), "")
print(json.dumps(found))
"""


class Parameter(NamedTuple):
    name: str
    kind: str
    default: str


Signatures = Mapping[str, list[Parameter]]

HOROVOD = "the arguments of horovod.torch and of horovod.tensorflow differ"
LAYERS = "layers and optimizers have the arguments of their framework's classes"
WRITES = "torch's verbs write to a tensor, TensorFlow's return one like it"
KERAS = "Keras' models have these methods, with more arguments"

# Why the parameters differ, and the keyword-only ones that only one adapter has. All others must be equal.
EXCEPTIONS: Mapping[str, tuple[str, set[str]]] = {
    **dict.fromkeys(
        (
            "DistributedOptimizer", "allgather", "allgather_object", "allreduce", "alltoall", "barrier", "broadcast",
            "broadcast_async", "broadcast_object", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter",
            "join", "reducescatter",
        ),
        (HOROVOD, set()),
    ),
    "broadcast_async": ("Horovod has it for torch only; for TensorFlow it is an ordered verb", {"root"}),
    "broadcast_": (f"{HOROVOD}: TensorFlow's takes several variables, in any order", {"root", "ranks", "algorithm"}),
    **dict.fromkeys(("recv", "recv_async", "send_recv", "send_recv_async"), (WRITES, set())),
    "MoE": ("Keras' layers infer the width", {"name"}),
    "MoE.logits": ("torch's modules know whether they train", {"training"}),
    "OneBitAdam": (f"{LAYERS}; Keras always decouples weight decay", {"decoupled_weight_decay", "name"}),
    "OneBitLAMB": (LAYERS, {"name"}),
    "Pipeline": ("made by `pipeline`, not by users", {"loss", "recompute", "codec", "weigh", "rows", "is_outline",
                                                      "optimizer", "why"}),
    "Pipeline.evaluate": (KERAS, {"cut", "details", "outputs", "verbose"}),
    "Pipeline.predict": (KERAS, {"cut", "verbose"}),
    "Pipeline.step": ("Keras scales losses in its optimizer, and weighs samples", {"scale"}),
    "tensor.ColumnEmbedding": (LAYERS, {"style"}),
    "tensor.VocabularyEmbedding": (LAYERS, set()),
    "tensor.streams.dropout": (LAYERS, set()),
    "streams.dropout": (LAYERS, set()),
}  # fmt: skip


def signatures(adapter: str) -> Signatures:
    """The parameters of an adapter's public functions, classes and methods, read in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", LIST, adapter], capture_output=True, text=True, timeout=120, check=True
    )
    text = re.sub(r"commlib_(torch|tensorflow)|tf\.| at 0x\w+", "", done.stdout.splitlines()[-1])
    # No process set is the set of all ranks.
    text = text.replace("ProcessSet(process_set_id=None, ranks=None, mpi_comm=None)", "None")
    return {name: [Parameter(*one) for one in given] for name, given in json.loads(text).items()}


@pytest.fixture(scope="module")
def both() -> tuple[Signatures, Signatures]:
    return signatures("commlib_torch"), signatures("commlib_tensorflow")


def settings(parameters: list[Parameter], without: set[str]) -> list[Parameter]:
    """The keyword-only parameters."""
    return [one for one in parameters if one.kind == "KEYWORD_ONLY" and one.name not in without]


def test_adapters_have_the_same_parameters(both: tuple[Signatures, Signatures]) -> None:
    torch, tensorflow = both
    common = torch.keys() & tensorflow.keys()
    assert {"Checkpoint", "Pipeline.clip_grad_norm", "all_reduce", "expertize", "parallelize", "pipeline"} <= common
    assert {"context.attention", "tensor.context.attention", "tensor.gather", "tensor.streams.seed"} <= common
    wrong = [
        f"{name}: {torch[name]} != {tensorflow[name]}"
        for name in sorted(common - EXCEPTIONS.keys())
        if torch[name] != tensorflow[name]
    ]
    for name, (_, own) in EXCEPTIONS.items():
        ours, theirs = settings(torch[name], own), settings(tensorflow[name], own)
        if ours != theirs:
            wrong.append(f"settings of {name}: {ours} != {theirs}")
    assert not wrong, "\n".join(wrong)


def test_each_exception_is_needed(both: tuple[Signatures, Signatures]) -> None:
    torch, tensorflow = both
    for name, (reason, own) in EXCEPTIONS.items():
        assert torch[name] != tensorflow[name], f"{name} needs no exception: {reason}"
        given = [{one.name for one in settings(side[name], set())} for side in both]
        assert own <= given[0] ^ given[1], f"{name}: not in one adapter only: {own - (given[0] ^ given[1])}"


OTHER_WORDS = {"comm", "axis", "group", "process_group"}
OTHERS = {
    "init": "Horovod's, of an MPI communicator",
    "Pipeline": "made by `pipeline`, not by users",
    "become": "a method that `parallelize` calls",
}
SEVERAL_AXES = {"DistributedOptimizer", "seed"}


@pytest.mark.parametrize("number", [0, 1], ids=["torch", "tensorflow"])
def test_ranks_are_always_called_ranks(number: int, both: tuple[Signatures, Signatures]) -> None:
    """`comm`, `axis`, `mesh` and `process_set` meant the same."""
    for name, parameters in both[number].items():
        given, last = {one.name for one in parameters}, name.split(".")[-1]
        assert last in OTHERS or not OTHER_WORDS & given, f"{name}: {OTHER_WORDS & given}"
        assert last in SEVERAL_AXES or "mesh" not in given, name
