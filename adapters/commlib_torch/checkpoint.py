"""Checkpoint: models, optimizers and whatever else has a `state_dict`, saved by all ranks and resumed exactly."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from commlib import checkpoint as core
from commlib.checkpoint import generators
from commlib.checkpoint.checkpoint import Part
from commlib.checkpoint.packed import Packed
from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib_torch.expert.rebalance import owners_of, put_owners
from commlib_torch.optimizer import KEY

__all__ = ["Checkpoint"]

RANDOM = "random"


class Stateful(Protocol):
    """What `Checkpoint` saves: modules, optimizers, schedulers, scalers and samplers of torch are such."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class Checkpoint(core.Checkpoint):
    """Checkpoints in a folder that all ranks see: `Checkpoint("run", model=model, optimizer=optimizer)`.

    Every value must have `state_dict` and `load_state_dict`. States of random generators (Python's, numpy's, torch's
    on the CPU and on this rank's GPU) are saved as well. So training that is interrupted between two steps and resumed
    on as many ranks computes the same bits; data must go on where it was, which the step says.

    What ranks hold alike is written once, what they hold apart by each. `save(step)` and `resume()` are collective.
    On another number of ranks a job resumes only what was alike on all. keep: how many checkpoints stay. comm: the
    ranks that save together, by default all. Raises UsageError for values without a state.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int = 2, comm: Communicator | None = None, **values: Stateful
    ) -> None:
        parts: dict[str, Part] = {}
        for name, value in values.items():
            if name == RANDOM or not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise UsageError(
                    f"Checkpoint: {name}= must have state_dict and load_state_dict, and another name than '{RANDOM}', "
                    f"got {type(value).__name__}"
                )
            parts |= _parts(name, value)
        if parts:
            parts[RANDOM] = Part(_generators, _load_generators, is_needed=False)
        super().__init__(folder, parts, keep=keep, comm=comm)


def _parts(name: str, value: Stateful) -> dict[str, Part]:
    """Return the parts of one value. What compression remembers of an optimizer is apart: it is each rank's own."""
    if not isinstance(value, torch.optim.Optimizer):
        found = {}
        if isinstance(value, nn.Module) and owners_of(value):  # before values, which do not say of which experts
            found[f"{name}.experts"] = Part(lambda: owners_of(value), lambda saved: put_owners(value, saved))
        found[name] = Part(lambda: packed(value.state_dict(), name), _loading(value.load_state_dict))
        return found
    remembered: dict[str, Any] = {}

    def own() -> Any:
        return packed({key: state for key, state in value.state_dict().items() if key != KEY}, name)

    def compression() -> Any:
        return packed(value.state_dict().get(KEY, {}), name)

    def load_compression(state: Any) -> None:
        remembered.update(unpacked(state))

    def load(state: Any) -> None:
        value.load_state_dict({**unpacked(state), **({KEY: remembered} if remembered else {})})

    return {f"{name}.compression": Part(compression, load_compression, is_needed=False), name: Part(own, load)}


def _loading(load: Callable[[Any], Any]) -> Callable[[Any], None]:
    def loading(state: Any) -> None:
        load(unpacked(state))

    return loading


def _generators() -> dict[str, Any]:
    found = {**generators.state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return dict(packed(found, RANDOM))


def _load_generators(saved: dict[str, Any]) -> None:
    generators.load(saved)
    torch.set_rng_state(unpacked(saved["torch"]))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(unpacked(saved["cuda"]))


def packed(value: Any, at: str) -> Any:
    """Return nested state with the bytes of its tensors in their place. Raises UsageError for those without."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise UsageError(f"checkpoint: {at} has a tensor with layout {value.layout}: expected dense ones")
        host = value.detach().cpu().contiguous()
        name = str(value.dtype).removeprefix("torch.")
        return Packed(name, tuple(value.shape), host.reshape(-1).view(torch.uint8).numpy())
    if isinstance(value, dict):
        return {key: packed(one, f"{at}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple):
        items = [packed(one, f"{at}[{number}]") for number, one in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def unpacked(value: Any) -> Any:
    """Return nested state with tensors again, on the host."""
    if isinstance(value, Packed):
        dtype = getattr(torch, value.dtype)
        if not value.data.size:  # which has no stride that fits
            return torch.empty(value.shape, dtype=dtype)
        return torch.from_numpy(value.data).view(dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: unpacked(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        items = [unpacked(one) for one in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value
