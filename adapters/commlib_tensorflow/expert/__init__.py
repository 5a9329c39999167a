"""Mixtures of experts for Keras: the layer, and the conversion of MLPs in a plain model."""

from commlib_tensorflow.expert.checkpoint import load_experts, save_experts
from commlib_tensorflow.expert.expertize import expertize
from commlib_tensorflow.expert.mlp import MLP
from commlib_tensorflow.expert.moe import MoE, expert_stats
from commlib_tensorflow.expert.rebalance import rebalance_experts
from commlib_tensorflow.expert.verify import verify

__all__ = ["MLP", "MoE", "expert_stats", "expertize", "load_experts", "rebalance_experts", "save_experts", "verify"]
