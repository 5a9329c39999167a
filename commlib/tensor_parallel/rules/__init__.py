"""Rules: refuse a plan that would give wrong numbers, by the states that values have while a model runs. [pure]

Whatever is divided is followed from the layer that divides it to the one that puts it together. What it meets on the
way must go with it. Where a step is unknown nothing is claimed, and nothing refused: that is a doubt.
"""

from __future__ import annotations

from commlib.tensor_parallel.rules.broken import RULES, PlanError
from commlib.tensor_parallel.rules.check import Checked, check
from commlib.tensor_parallel.rules.compare import compare
from commlib.tensor_parallel.rules.following import Doubt

__all__ = ["RULES", "Checked", "Doubt", "PlanError", "check", "compare"]
