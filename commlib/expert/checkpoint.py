"""Checkpoints of mixtures of experts, the same in every framework: whole stacks by the global numbers of experts.

A layer is a mapping of arrays by names: "router" [experts, width], "experts.0", "experts.1", ... [experts, ...], in the
order in which one expert has its parameters, matrices as [outputs, inputs]; "shared.0", ...; "expert_bias" [experts].
Layers are told apart by their order.

What an optimizer keeps for one is behind its name, as the optimizer has it. Adam's has the same names in all
frameworks: "router/first", "router/second", and with amsgrad "router/largest". So has that of SGD, in two forms:
"router/momentum" is a sum of gradients, as PyTorch keeps it, and "router/update" is Keras': -rate times that. All else
has the name of its framework and its class, such as "router/keras.RMSprop.velocities", and is of no use to others.
"router/step" counts updates.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from typing import Any, TypeVar

import numpy as np

from commlib.comparison.agreement import together
from commlib.comparison.parameter_check import check_agreement
from commlib.dtypes import NUMPY, Array
from commlib.errors import UsageError
from commlib.expert.ranks import ExpertRanks

Layer = Mapping[str, Array]
Path = str | PathLike[str]
_T = TypeVar("_T")
_Named = TypeVar("_Named", bound=Mapping[str, Any])

FIRST, SECOND, LARGEST, MOMENTUM, UPDATE, STEP = "first", "second", "largest", "momentum", "update", "step"

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


def of_optimizer(layer: Layer, name: str) -> set[str]:
    """Return the names of what a layer that was read has of an optimizer for `name`, apart from steps."""
    return {key.removeprefix(f"{name}/") for key in layer if key.startswith(f"{name}/")} - {STEP}


def check_states(layers: Sequence[Layer], kept: Sequence[Mapping[str, Collection[str]]], optimizer: str) -> None:
    """Raise UsageError unless layers that were read have of an optimizer what this one keeps.

    kept: the names of that, such as "first", for each name of each layer. optimizer: its class, for errors.
    """
    for place, (layer, names) in enumerate(zip(layers, kept, strict=True)):
        for name, wanted in names.items():
            found = {_one(key) for key in of_optimizer(layer, name)}
            if found != (own := {_one(key) for key in wanted}):
                raise UsageError(
                    f"load_experts: layer {place}: for {name} the file has {_listed(found)} of an optimizer, and "
                    f"{optimizer} keeps {_listed(own)}: give the optimizer that was saved, with the same settings, or "
                    "none, and begin anew"
                )


def _one(key: str) -> str:
    return MOMENTUM if key == UPDATE else key


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def momentum(layer: Layer, name: str, form: str, rate: float) -> Array:
    """Return SGD's momentum in a form, MOMENTUM or UPDATE, by the rate that it will be used with next.

    Raises UsageError where the file has it in the other form, and the rate is 0: nothing would be left of it.
    """
    if f"{name}/{form}" in layer:
        return layer[f"{name}/{form}"]
    if not rate:
        raise UsageError(
            f"load_experts: {name}: momentum of another framework goes over by the learning rate, which is 0 now: give "
            "the optimizer the rate of its next step"
        )
    found: Array = layer[f"{name}/{UPDATE}"] / -rate if form == MOMENTUM else layer[f"{name}/{MOMENTUM}"] * -rate
    return found


def agreed(ranks: ExpertRanks, verb: str, find: Callable[[], Sequence[_Named]]) -> Sequence[_Named]:
    """Return what `find` finds to write here. Collective.

    Raises on all ranks what is wrong on one, and MismatchError unless all have the same names in each layer: these are
    made of the parts of all of them.
    """
    found = _on_all(ranks, find)
    lines = [f"layer {place}: {name}" for place, layer in enumerate(found) for name in layer]
    for comm in (ranks.data, None if ranks.tensor is None else ranks.tensor.comm):
        if comm is not None:
            check_agreement(comm, verb, lines)
    return found


def load_together(ranks: ExpertRanks, path: Path, found: Callable[[list[dict[str, Array]]], _T]) -> _T:
    """Read a file, and return what `found` makes of its layers. Raises on all ranks what is wrong on one. Collective.

    Nothing is to be changed before this has returned on all ranks.
    """
    return _on_all(ranks, lambda: found(read(path)))


def _on_all(ranks: ExpertRanks, run: Callable[[], _T]) -> _T:
    """Run it together on all ranks: also on those among which each expert is divided."""
    if ranks.tensor is None:
        return together(ranks.data, run)
    return together(ranks.tensor.comm, lambda: together(ranks.data, run))


def _bits(array: Array) -> Array:
    """Return an array whose dtype numpy's files know."""
    return array.view(np.uint16) if array.dtype.kind == "V" else array
