"""Function transforms (torch.func): communication does not support them; errors say so."""

from __future__ import annotations

from commlib.errors import UsageError


def explain(error: RuntimeError, what: str) -> Exception:
    """Return the exception for an error of PyTorch: a UsageError if a torch.func transform surrounds communication.

    what: the operations that do not support transforms, for the message.
    """
    if "functorch transforms" in f"{error}" or "doesn't have storage" in f"{error}":
        return UsageError(
            f"function transforms (torch.func.grad, vmap, jvp, ...) do not support {what}, because these communicate. "
            "Use torch.autograd.grad, with create_graph=True for gradients of gradients"
        )
    return error
