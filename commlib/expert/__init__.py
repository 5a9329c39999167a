"""Mixtures of experts for both frameworks: `routing` assigns tokens to experts, dispatchers exchange them."""

from commlib.expert.experts import Experts

__all__ = ["Experts"]
