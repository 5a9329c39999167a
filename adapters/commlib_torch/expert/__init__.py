"""Mixtures of experts for PyTorch: the layer, and the conversion of a plain model's MLPs."""

from commlib_torch.expert.checkpoint import load_experts, save_experts
from commlib_torch.expert.expertize import expertize
from commlib_torch.expert.losses import auxiliary_loss
from commlib_torch.expert.mlp import MLP
from commlib_torch.expert.moe import MoE, expert_stats
from commlib_torch.expert.rebalance import rebalance_experts
from commlib_torch.expert.verify import verify

__all__ = [
    "MLP",
    "MoE",
    "auxiliary_loss",
    "expert_stats",
    "expertize",
    "load_experts",
    "rebalance_experts",
    "save_experts",
    "verify",
]
