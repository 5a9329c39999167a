"""Checkpoints of mixtures of experts, the same in every framework: full stacks by the global numbers of experts.

A layer is a mapping of arrays by names: "router" [experts, width], "experts.0", "experts.1", ... [experts, ...], in the
order of the parameters of one expert, matrices as [outputs, inputs]; "shared.0", ...; "expert_bias" [experts].
Layers are identified by their order.

Optimizer state of a parameter has the parameter's name as prefix. Adam's state has the same names in all frameworks:
"router/first", "router/second", and with amsgrad "router/largest". SGD's momentum has two forms: "router/momentum" is a
sum of gradients (PyTorch), and "router/update" is -rate times that sum (Keras). All other state is named after its
framework and class, such as "router/keras.RMSprop.velocities", and no other framework can load it.
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

from commlib.checkpoint.packed_state import open_npz
from commlib.comparison.agreement import run_together
from commlib.comparison.parameter_check import check_agreement
from commlib.dtypes import NUMPY, Array
from commlib.errors import UsageError
from commlib.expert.expert_ranks import ExpertRanks

Layer = Mapping[str, Array]
ArrayMakers = dict[str, Callable[[], Array]]
"""Functions that make the arrays of a layer, by name; most are collective."""
Path = str | PathLike[str]
_T = TypeVar("_T")

FIRST, SECOND, LARGEST, MOMENTUM, UPDATE, STEP = "first", "second", "largest", "momentum", "update", "step"

_KINDS = "kinds"


def write(ranks: ExpertRanks, path: Path, layers: Sequence[Layer]) -> None:
    """Write layers to a file (npz), on the first rank. Collective. Raises write errors as UsageError."""

    def writing() -> None:
        if ranks.data.rank or (ranks.tensor is not None and ranks.tensor.rank):
            return
        named = {f"{place}/{name}": array for place, layer in enumerate(layers) for name, array in layer.items()}
        kinds = {name: array.dtype.name for name, array in named.items()}
        arrays: dict[str, Any] = {name: _bits(array) for name, array in named.items()}
        arrays[_KINDS] = np.frombuffer(json.dumps(kinds).encode(), np.uint8)
        new_path = pathlib.Path(f"{os.fspath(path)}.new")
        try:
            with open(new_path, "wb") as file:
                np.savez(file, **arrays)
            os.replace(new_path, path)  # keep the previous file until the new one is complete
        except OSError as error:
            new_path.unlink(missing_ok=True)
            raise UsageError(f"save_experts: cannot write {path}: {error}") from error

    _on_all(ranks, writing)


def read(path: Path) -> list[dict[str, Array]]:
    """Return the layers in a file. Raises UsageError if it is not a file of `write`."""
    try:
        with open(path, "rb") as file, open_npz(file) as archive:
            kinds = json.loads(bytes(archive[_KINDS]))
            layers: list[dict[str, Array]] = [{} for _ in {name.partition("/")[0] for name in kinds}]
            for name, kind in kinds.items():
                place, _, own = name.partition("/")
                layers[int(place)][own] = archive[name].view(NUMPY[kind])
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(f"load_experts: {path} is not a file written by save_experts: {error}") from error
    return layers


def check(layers: Sequence[Layer], shapes: Sequence[Mapping[str, tuple[int, ...]]], titles: Sequence[str] = ()) -> None:
    """Raise UsageError unless the layers read match the model: the same number, with these shapes.

    titles: the model's names of its layers, for errors.
    """
    if len(layers) != len(shapes):
        raise UsageError(f"load_experts: the file has {len(layers)} mixtures of experts, the model {len(shapes)}")
    for place, (layer, wanted) in enumerate(zip(layers, shapes, strict=True)):
        for name, shape in wanted.items():
            if name not in layer:
                raise UsageError(
                    f"load_experts: {_title(place, titles)}: the file has no {name}: it has another kind of expert"
                )
            if layer[name].shape != shape:
                raise UsageError(
                    f"load_experts: {_title(place, titles)}: {name} has shape {list(layer[name].shape)}, expected "
                    f"{list(shape)}"
                )


def _title(place: int, titles: Sequence[str]) -> str:
    return f"layer {place} ({titles[place]})" if titles else f"layer {place}"


def optimizer_names(layer: Layer, name: str) -> set[str]:
    """Return the names of the optimizer state of `name` in a layer that was read, except the step count."""
    return {key.removeprefix(f"{name}/") for key in layer if key.startswith(f"{name}/")} - {STEP}


def check_states(
    layers: Sequence[Layer],
    saved: Sequence[Mapping[str, Collection[str]]],
    optimizer: str,
    titles: Sequence[str] = (),
) -> None:
    """Raise UsageError unless the layers read have the optimizer state that this optimizer keeps.

    saved: names of optimizer state, such as "first", for each name of each layer. optimizer: its class, for errors.
    titles: the model's names of its layers, for errors.
    """
    for place, (layer, names) in enumerate(zip(layers, saved, strict=True)):
        for name, wanted in names.items():
            stored = {_one(key) for key in optimizer_names(layer, name)}
            if stored != (own := {_one(key) for key in wanted}):
                raise UsageError(
                    f"load_experts: {_title(place, titles)}: the optimizer state of {name} in the file is "
                    f"{_join_names(stored)}, but {optimizer} keeps {_join_names(own)}. Give the optimizer that was "
                    "saved, with the same settings, or no optimizer, to start from fresh state"
                )


def _one(key: str) -> str:
    return MOMENTUM if key == UPDATE else key


def _join_names(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def momentum(layer: Layer, name: str, form: str, rate: float) -> Array:
    """Return SGD's momentum in a form, MOMENTUM or UPDATE. rate: the learning rate of the next step.

    Raises UsageError if the file has the other form and the rate is 0, which would erase the momentum.
    """
    if f"{name}/{form}" in layer:
        return layer[f"{name}/{form}"]
    if not rate:
        raise UsageError(
            f"load_experts: {name}: momentum of another framework is converted with the learning rate, which is 0 now. "
            "Give the optimizer the rate of its next step"
        )
    result: Array = layer[f"{name}/{UPDATE}"] / -rate if form == MOMENTUM else layer[f"{name}/{MOMENTUM}"] * -rate
    return result


def save_together(ranks: ExpertRanks, path: Path, find: Callable[[], Sequence[ArrayMakers]]) -> None:
    """Write the layers that `find` returns, on the first rank. Collective.

    Raises an error of one rank on all ranks, and MismatchError unless all ranks have the same names in each layer,
    because every layer is assembled from the shards of all ranks.
    """
    layers = _on_all(ranks, find)
    lines = [f"layer {place}: {name}" for place, layer in enumerate(layers) for name in layer]
    for comm in (ranks.data, None if ranks.tensor is None else ranks.tensor.comm):
        if comm is not None:
            check_agreement(comm, "save_experts", lines)
    write(ranks, path, [{name: make() for name, make in layer.items()} for layer in layers])


def load_together(ranks: ExpertRanks, path: Path, convert: Callable[[list[dict[str, Array]]], _T]) -> _T:
    """Read a file, and return the result of `convert` for its layers. Raises an error of one rank on all. Collective.

    Change nothing before this has returned on all ranks.
    """
    return _on_all(ranks, lambda: convert(read(path)))


def _on_all(ranks: ExpertRanks, run: Callable[[], _T]) -> _T:
    """Run it on all ranks and agree on errors, including the ranks among which each expert is sharded."""
    if ranks.tensor is None:
        return run_together(ranks.data, run)
    return run_together(ranks.tensor.comm, lambda: run_together(ranks.data, run))


def _bits(array: Array) -> Array:
    """Return the array with a dtype that numpy's files support."""
    return array.view(np.uint16) if array.dtype.kind == "V" else array
