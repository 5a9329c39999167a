"""Function transforms (torch.func): communication does not support them; errors say so."""

from __future__ import annotations

from commlib.errors import UsageError

_OF_TRANSFORMS = ("functorch transforms", "doesn't have storage", "Batching rule not implemented")
"""Parts of PyTorch's errors."""


def explain(error: RuntimeError, what: str) -> Exception:
    """Return the exception for an error of PyTorch: a UsageError if a torch.func transform surrounds communication.

    what: the operations that do not support transforms, for the message.
    """
    if any(part in f"{error}" for part in _OF_TRANSFORMS):
        return UsageError(
            f"function transforms (torch.func.grad, vmap, jvp, is_grads_batched=True, ...) do not support {what}, "
            "because these communicate. Use torch.autograd.grad, once for each gradient, with create_graph=True for "
            "gradients of gradients"
        )
    return error
