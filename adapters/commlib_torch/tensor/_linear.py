"""Linear layers by trial: find out whether a subclass of `nn.Linear` only computes `F.linear` with its weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from commlib_torch._trial_run import preserve_model


def is_plain_linear(module: nn.Linear) -> bool:
    """Return whether a layer has only a weight and a bias, and the results and gradients of `F.linear`.

    Some models write out the product, so a sharded layer may replace theirs: it is tried on random inputs.
    """
    extra = [
        name for name, _ in (*module.named_parameters(), *module.named_buffers()) if name not in ("weight", "bias")
    ]
    weight = module.weight
    if extra or any(True for _ in module.children()) or weight.is_meta or not weight.is_floating_point():
        return False
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    with preserve_model(module), torch.enable_grad():
        try:
            x = torch.randn(2, 3, module.in_features, device=weight.device).to(weight.dtype).requires_grad_()
            y = F.linear(x, weight, module.bias)
            factors = torch.randn_like(y)
            own = module(x)
            wanted = [one for one in (x, weight, module.bias) if one is not None and one.requires_grad]
            gradients = [torch.autograd.grad((out * factors).sum(), wanted) for out in (own, y)]
        except RuntimeError:
            return False
    tolerance = 100 * torch.finfo(weight.dtype).eps
    return all(
        float((one - other).detach().abs().max()) <= tolerance * max(float(other.detach().abs().max()), tolerance)
        for one, other in [(own, y), *zip(*gradients, strict=True)]
    )
