"""Checkpoints of mixtures of experts, the same in every framework: whole stacks by the global numbers of experts.

A layer is a mapping of arrays by names: "router" [experts, width], "experts.0", "experts.1", ... [experts, ...], in the
order in which one expert has its parameters, matrices as [outputs, inputs]; "shared.0", ...; "expert_bias" [experts].
What an optimizer keeps for one is behind its name: "router/first" and "router/second" are Adam's moments, and
"router/momentum" is a sum of gradients; "router/step" counts updates. Layers are told apart by their order.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from commlib.dtypes import NUMPY, Array
from commlib.errors import UsageError
from commlib.expert.ranks import ExpertRanks
from commlib.functional.agreement import together

Layer = Mapping[str, Array]
Path = str | PathLike[str]

_KINDS = "kinds"


def write(ranks: ExpertRanks, path: Path, layers: Sequence[Layer]) -> None:
    """Write layers to a file (npz), on the first rank. Collective. Raises what writing raises as UsageError."""

    def writing() -> None:
        if ranks.data.rank or (ranks.tensor is not None and ranks.tensor.rank):
            return
        named = {f"{place}/{name}": array for place, layer in enumerate(layers) for name, array in layer.items()}
        kinds = {name: array.dtype.name for name, array in named.items()}
        arrays: dict[str, Any] = {name: _bits(array) for name, array in named.items()}
        arrays[_KINDS] = np.frombuffer(json.dumps(kinds).encode(), np.uint8)
        beside = pathlib.Path(f"{os.fspath(path)}.new")
        try:
            with open(beside, "wb") as file:
                np.savez(file, **arrays)
            os.replace(beside, path)  # what was there before is kept until all is written
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise UsageError(f"save_experts: cannot write {path}: {error}") from error

    _on_all(ranks, writing)


def read(path: Path) -> list[dict[str, Array]]:
    """Return the layers in a file. Raises UsageError for what is none."""
    try:
        with np.load(path) as found:
            kinds = json.loads(bytes(found[_KINDS]))
            layers: list[dict[str, Array]] = [{} for _ in {name.partition("/")[0] for name in kinds}]
            for name, kind in kinds.items():
                place, _, own = name.partition("/")
                layers[int(place)][own] = found[name].view(NUMPY[kind])
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(f"load_experts: {path} is no file that save_experts has written: {error}") from error
    return layers


def check(layers: Sequence[Layer], shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
    """Raise UsageError unless layers that were read are those of a model: as many, with these shapes."""
    if len(layers) != len(shapes):
        raise UsageError(f"load_experts: the file has {len(layers)} mixtures of experts, the model {len(shapes)}")
    for place, (layer, wanted) in enumerate(zip(layers, shapes, strict=True)):
        for name, shape in wanted.items():
            if name not in layer:
                raise UsageError(f"load_experts: layer {place}: the file has no {name}: was it another kind of expert?")
            if layer[name].shape != shape:
                raise UsageError(
                    f"load_experts: layer {place}: {name} has shape {list(layer[name].shape)}, expected {list(shape)}"
                )


def load_together(ranks: ExpertRanks, path: Path, put: Callable[[list[dict[str, Array]]], Any]) -> None:
    """Read a file and hand its layers to `put`. Raises on all ranks what is wrong on one. Collective."""
    _on_all(ranks, lambda: put(read(path)))


def _on_all(ranks: ExpertRanks, run: Callable[[], Any]) -> None:
    """Run it together on all ranks: also on those among which each expert is divided."""
    if ranks.tensor is None:
        together(ranks.data, run)
    else:
        together(ranks.tensor.comm, lambda: together(ranks.data, run))


def _bits(array: Array) -> Array:
    """Return an array whose dtype numpy's files know."""
    return array.view(np.uint16) if array.dtype.kind == "V" else array
