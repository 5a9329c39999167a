"""Loading: compare a state with the names and shapes of all stages, equally on every rank, before a weight changes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from commlib.errors import UsageError

Shapes = dict[str, tuple[int, ...]]
"""Shapes of the values that a state must have, by name."""


@dataclass(frozen=True, slots=True)
class _StageSnapshot:
    """A stage of some rank at the time of the split; its rank may have changed it since."""

    number: int
    rank: int
    names: frozenset[str]
    shapes: Shapes

    @property
    def title(self) -> str:
        return f"of stage {self.number}, on rank {self.rank}"


class Loading:
    """Checks a state of the whole model: missing values and other shapes.

    parts: the modules of all stages, by number; placement: the rank of each. loss: part of the last stage, if it has
    parameters; its names begin with `prefix`.
    """

    def __init__(
        self, parts: Sequence[nn.Module], placement: Sequence[int], rank: int, *, loss: nn.Module | None, prefix: str
    ) -> None:
        modules = [(number, "", part) for number, part in enumerate(parts)]
        modules += [] if loss is None else [(len(parts) - 1, prefix, loss)]
        self._rank = rank
        self._own = [one for one in modules if placement[one[0]] == rank]
        others = (one for one in modules if placement[one[0]] != rank)
        self._others = [_stage(number, placement[number], before, part) for number, before, part in others]

    def check(self, state: Mapping[str, Any], known: Collection[str], *, strict: bool) -> list[str]:
        """Return the missing names of a state. Raises UsageError, in torch's words, for an error in any stage.

        A state with a value of another rank's stage is one of the whole model and must be complete: all ranks that load
        it raise the same error. known: all names of the model.
        """
        stages = [_stage(number, self._rank, before, part) for number, before, part in self._own]
        mine = {name for stage in stages for name in stage.names}
        if any(name in state for stage in self._others for name in stage.names - mine):
            stages = sorted([*stages, *self._others], key=lambda stage: stage.number)
        missing: dict[str, str] = {}
        misfits: dict[str, str] = {}
        for stage in stages:
            for name, shape in stage.shapes.items():
                if name not in state:
                    missing.setdefault(name, stage.title)
                elif isinstance(value := state[name], Tensor) and _differs(tuple(value.shape), shape):
                    misfits.setdefault(name, _misfit(name, value, shape, stage.title))
        errors = list(misfits.values())
        if strict:
            unexpected = [name for name in state if name not in known]
            for what, names in (("Missing", [f"{n} ({at})" for n, at in missing.items()]), ("Unexpected", unexpected)):
                if names:
                    errors.insert(0, f"{what} key(s) in state_dict: {', '.join(names)}.")
        if errors:
            raise UsageError("\n\t".join(["pipeline: load_state_dict: no weight has been changed.", *errors]))
        return list(missing)


def _stage(number: int, rank: int, prefix: str, part: nn.Module) -> _StageSnapshot:
    shapes = {prefix + name: shape for name, shape in _shapes(part).items()}
    return _StageSnapshot(number, rank, frozenset(prefix + name for name in part.state_dict()), shapes)


def _differs(given: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return given != expected and not (expected == () and given == (1,))  # torch accepts them, as in its first versions


def _misfit(name: str, value: Tensor, shape: tuple[int, ...], where: str) -> str:
    return (
        f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, the shape in current "
        f"model is {torch.Size(shape)} ({where})."
    )


def _shapes(part: nn.Module) -> Shapes:
    """Return the shapes that a stage loads; modules that customise loading check their values themselves."""
    return {
        f"{path}.{name}".removeprefix("."): tuple(value.shape)
        for path, module in _plain(part, "")
        for name, value in (*module._parameters.items(), *module._buffers.items())
        if value is not None and name not in module._non_persistent_buffers_set and not is_lazy(value)
        if name != "num_batches_tracked"  # older states lack them
    }


def _plain(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that load by torch's default method and whose parents do so, too, with their paths."""
    loads = type(module)._load_from_state_dict
    if loads not in (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict):
        return
    if module._load_state_dict_pre_hooks or module._state_dict_hooks:
        return
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _plain(child, f"{path}.{name}".removeprefix("."))
