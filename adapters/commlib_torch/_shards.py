"""Parameters that hold a shard: how one tells, and how copies do."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from commlib.functional.shards import Shard

_MARK = "commlib_shard"


def shard_of(parameter: Tensor) -> Shard | None:
    """Return what a parameter holds a part of; None if it is whole."""
    return getattr(parameter, _MARK, None)


def mark(parameter: nn.Parameter, shard: Shard) -> None:
    """Note what a parameter holds. Copies that `copy.deepcopy` makes have the note, too: PyTorch's would not."""
    reference = weakref.ref(parameter)

    def copied(memo: dict[int, Any]) -> nn.Parameter:
        original = reference()
        assert original is not None  # it is being copied
        found: nn.Parameter = nn.Parameter.__deepcopy__(original, memo)
        mark(found, shard)
        return found

    setattr(parameter, _MARK, shard)
    setattr(parameter, "__deepcopy__", copied)  # noqa: B010  # of this object, not of its class


def mark_in_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let tensors of a state dict know what they hold, as parameters do: a hook for `register_state_dict_post_hook`."""
    for name, parameter in module.named_parameters(recurse=False):
        if (shard := shard_of(parameter)) is not None and prefix + name in state:
            setattr(state[prefix + name], _MARK, shard)


def shards_in(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Shard]]:
    """Yield (name, parameter, shard) of each parameter that is divided, once."""
    for name, parameter in model.named_parameters():
        if (shard := shard_of(parameter)) is not None:
            yield name, parameter, shard
