"""Embeddings by trial: find out whether a subclass of `nn.Embedding` processes only the rows that it looks up."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from commlib_torch._trial_run import preserve_model


def goes_on_with_rows(module: nn.Embedding) -> bool:
    """Return whether a layer's forward processes each row from `super().forward` separately, as scaled embeddings do.

    Such a layer may be sharded by vocabulary, because rows are complete. It is tried with random rows and a weight of
    NaN.
    """
    plain, extra = type(module), [name for name, _ in module.named_parameters() if name != "weight"]
    if extra or any(True for _ in module.children()) or module._forward_hooks or module._forward_pre_hooks:
        return False
    dtype, device, own = module.weight.dtype, module.weight.device, module._parameters["weight"]
    if module.weight.is_meta or plain.forward is nn.Embedding.forward:
        return False
    trial: Any = subclass_beneath(plain, _TrialEmbedding)  # type: ignore[arg-type]  # types have a hash
    words = torch.zeros(2, 3, dtype=torch.long, device=device)
    with preserve_model(module), torch.no_grad():
        rows = torch.randn(2, 3, module.embedding_dim, device=device).to(dtype)
        try:
            module.__class__ = trial
            module._parameters["weight"] = nn.Parameter(torch.full((1, 1), torch.nan, dtype=dtype, device=device))
            vars(module)["_rows"] = rows
            output: Any = module(words)
            vars(module)["_rows"] = rows[:, 1:]
            fewer: Any = module(words[:, 1:])
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return False
        finally:
            module.__class__, module._parameters["weight"] = plain, own
            vars(module).pop("_rows", None)
    if not (isinstance(output, Tensor) and output.shape == rows.shape and isinstance(fewer, Tensor)):
        return False
    return bool(output.isfinite().all()) and torch.equal(output[:, 1:], fewer)


class _TrialEmbedding(nn.Embedding):
    _rows: Tensor

    def forward(self, words: Tensor) -> Tensor:
        return self._rows


@cache
def subclass_beneath(plain: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `plain` whose `super().forward` is `kind.forward`."""
    return type(f"{kind.__name__}{plain.__name__}", (plain, kind), {"__doc__": plain.__doc__})
