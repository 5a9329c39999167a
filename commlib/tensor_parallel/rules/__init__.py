"""Rules: refuse a plan that would give wrong numbers, by the placements of values while a model runs. [pure]

Sharded values are followed from the layer that shards them to the layer that gathers or reduces them. Values that they
combine with must be sharded in the same way. An unknown step is neither verified nor refused: that is a doubt.
"""

from __future__ import annotations

from commlib.tensor_parallel.rules.check import CheckedPlan, check
from commlib.tensor_parallel.rules.compare import compare
from commlib.tensor_parallel.rules.plan_error import RULES, PlanError
from commlib.tensor_parallel.rules.value_tracker import Doubt

__all__ = ["RULES", "CheckedPlan", "Doubt", "PlanError", "check", "compare"]
