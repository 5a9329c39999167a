"""Checkpoint: models, optimizers and other objects with a `state_dict`, saved by all ranks and resumed exactly."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from commlib import checkpoint as core
from commlib.checkpoint import generators
from commlib.checkpoint.checkpoint import CheckpointPart
from commlib.checkpoint.packed_state import PackedTensor
from commlib.errors import UsageError
from commlib.horovod.pytree import map_leaves
from commlib.ranks import Ranks
from commlib_torch.expert.rebalance import owners_of, put_owners
from commlib_torch.optimizer import KEY

__all__ = ["Checkpoint"]

RANDOM = "random"


class Stateful(Protocol):
    """An object that `Checkpoint` saves: torch's modules, optimizers, schedulers, scalers and samplers."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class Checkpoint(core.Checkpoint):
    """Save and resume objects in a folder that all ranks see.

    The states of random generators (Python's, numpy's, torch's on the CPU and on this rank's GPU) are saved as well, so
    training that is interrupted between two steps and resumed on the same number of ranks computes the same bits. The
    data must continue at the saved step.

    Values that are equal on all ranks are written once, the others by each rank. `save(step)` and `resume()` are
    collective. On another number of ranks a job resumes only the values that were equal on all.

        checkpoint = ct.Checkpoint("run", model=model, optimizer=optimizer)
        start = checkpoint.resume()

    Args:
        folder: A folder that all ranks see.
        keep: The number of checkpoints to keep.
        ranks: The ranks that save together; a mesh means all its ranks; None: all.
        **values: What is saved, by name: objects with `state_dict` and `load_state_dict`.

    Raises:
        UsageError: For values without a state.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int = 2, ranks: Ranks | None = None, **values: Stateful
    ) -> None:
        parts: dict[str, CheckpointPart] = {}
        for name, value in values.items():
            if name == RANDOM or not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise UsageError(
                    f"Checkpoint: {name}= must have state_dict and load_state_dict, and a name other than '{RANDOM}', "
                    f"got {type(value).__name__}"
                )
            parts |= _parts(name, value)
        if parts:
            parts[RANDOM] = CheckpointPart(_generators, _load_generators, is_needed=False)
        super().__init__(folder, parts, keep=keep, ranks=ranks)


def _parts(name: str, value: Stateful) -> dict[str, CheckpointPart]:
    """Return the parts of one value. An optimizer's compression state is a separate part, local to each rank."""
    if not isinstance(value, torch.optim.Optimizer):
        parts = {}
        if isinstance(value, nn.Module) and owners_of(value):  # before values, which do not identify their experts
            parts[f"{name}.experts"] = CheckpointPart(lambda: owners_of(value), lambda saved: put_owners(value, saved))
        parts[name] = CheckpointPart(lambda: pack(value.state_dict(), name), _loading(value.load_state_dict))
        return parts
    remembered: dict[str, Any] = {}

    def own() -> Any:
        return pack({key: state for key, state in value.state_dict().items() if key != KEY}, name)

    def compression() -> Any:
        return pack(value.state_dict().get(KEY, {}), name)

    def load_compression(state: Any) -> None:
        remembered.update(unpack(state))

    def load(state: Any) -> None:
        value.load_state_dict({**unpack(state), **({KEY: remembered} if remembered else {})})

    return {
        f"{name}.compression": CheckpointPart(compression, load_compression, is_needed=False),
        name: CheckpointPart(own, load),
    }


def _loading(load: Callable[[Any], Any]) -> Callable[[Any], None]:
    def loading(state: Any) -> None:
        load(unpack(state))

    return loading


def _generators() -> dict[str, Any]:
    states = {**generators.state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return dict(pack(states, RANDOM))


def _load_generators(saved: dict[str, Any]) -> None:
    generators.load(saved)
    torch.set_rng_state(unpack(saved["torch"]))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(unpack(saved["cuda"]))


def pack(value: Any, at: str) -> Any:
    """Return nested state with tensors replaced by their bytes. Raises UsageError for tensors without bytes."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise UsageError(f"checkpoint: {at} has a tensor with layout {value.layout}: expected dense tensors")
        host = value.detach().cpu().contiguous()
        name = str(value.dtype).removeprefix("torch.")
        return PackedTensor(name, tuple(value.shape), host.reshape(-1).view(torch.uint8).numpy())
    if isinstance(value, dict):
        return {key: pack(one, f"{at}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple):
        items = [pack(one, f"{at}[{number}]") for number, one in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def unpack(value: Any) -> Any:
    """Return nested state with tensors again, on the host."""
    return map_leaves(value, lambda leaf: _tensor_of(leaf) if isinstance(leaf, PackedTensor) else leaf)


def _tensor_of(packed: PackedTensor) -> Tensor:
    dtype = getattr(torch, packed.dtype)
    if not packed.data.size:  # without a matching stride
        return torch.empty(packed.shape, dtype=dtype)
    return torch.from_numpy(packed.data).view(dtype).reshape(packed.shape)
