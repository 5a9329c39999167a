"""Mixtures of experts, once for both frameworks: who goes where (`routing`), and the ways there and back."""

from commlib.expert.experts import Experts

__all__ = ["Experts"]
