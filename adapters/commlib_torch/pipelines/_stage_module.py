"""Stage module: some stages of a model as one module, with the names of the whole model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from commlib_torch.pipelines._loss_module import NAME


class StageModule(nn.Module):
    """Stages of a model, by number. names: all in the state of the whole model. loss: a module, if it has parameters.

    Parameters and buffers have the names of the whole model in `named_parameters()`, `named_buffers()`, `state_dict()`
    and `load_state_dict()`, which takes this rank's values from a state of the whole model.
    """

    def __init__(self, parts: Mapping[int, nn.Module], names: Collection[str], loss: nn.Module | None = None) -> None:
        super().__init__()
        self._numbers, self._whole_names = tuple(parts), frozenset(names)
        self._loaded_at, self._load_errors = "", list[str]()
        for stage, part in parts.items():
            self.add_module(_prefix(stage)[:-1], part)
        if loss is not None:
            self.add_module(NAME, loss)
        self.register_state_dict_post_hook(_strip)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_numbers)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_report_names)  # type: ignore[no-untyped-call]

    @property
    def parts(self) -> list[nn.Module]:
        """The stages of this rank."""
        return [self.get_submodule(_prefix(stage)[:-1]) for stage in self._numbers]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's stages, under the names of the whole model."""
        return self._named("named_parameters", prefix, recurse=recurse, remove_duplicate=remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of this rank's stages, under the names of the whole model."""
        return self._named("named_buffers", prefix, recurse=recurse, remove_duplicate=remove_duplicate)

    def _named(self, what: str, prefix: str, **options: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        loss = self._modules.get(NAME)
        inner = f"{prefix}.{NAME}" if prefix else NAME
        for part, at in [*((part, prefix) for part in self.parts), *([] if loss is None else [(loss, inner)])]:
            for name, value in getattr(part, what)(at, **options):
                if id(value) not in seen or not options["remove_duplicate"]:
                    seen.add(id(value))
                    yield name, value


def _prefix(stage: int) -> str:
    return f"stage{stage}."


def _plain(module: StageModule, key: str, prefix: str) -> str:
    """Remove the stage number from a name, only once, because a layer may have the name of a stage."""
    inner = next((inner for stage in module._numbers if key.startswith(inner := prefix + _prefix(stage))), prefix)
    return prefix + key[len(inner) :] if key.startswith(prefix) else key


def _strip(module: Any, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Remove the stage numbers from names."""
    renamed = {_plain(module, key, prefix): value for key, value in state.items()}
    state.clear()
    state.update(renamed)


def _add_numbers(
    module: Any, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: list[str],
    errors: list[str],
) -> None:  # fmt: skip
    """Add the stage numbers to this rank's names, and drop the names of other ranks."""
    unexpected += [key for key in state if key.removeprefix(prefix) not in module._whole_names]
    renamed = {
        prefix + _prefix(stage) + name: state[prefix + name]
        for stage, part in zip(module._numbers, module.parts, strict=True)
        for name in part.state_dict()
        if prefix + name in state
    }
    if (loss := module._modules.get(NAME)) is not None:
        own = [f"{prefix}{NAME}.{name}" for name in loss.state_dict()]
        renamed |= {name: state[name] for name in own if name in state}
    module._loaded_at, module._load_errors = prefix, errors
    state.clear()
    state.update(renamed)


def _report_names(module: Any, keys: Any) -> None:
    """Report missing and mismatched names as those of the whole model."""
    keys.missing_keys[:] = [_plain(module, key, module._loaded_at) for key in keys.missing_keys]
    errors, module._load_errors = module._load_errors, []
    for place, text in enumerate(errors):
        for name in (f"{module._loaded_at}{_prefix(stage)}" for stage in module._numbers):
            text = re.sub(rf'(?<=[ "]){re.escape(name)}', module._loaded_at, text, count=1)
        errors[place] = text
