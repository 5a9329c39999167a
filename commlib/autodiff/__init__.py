"""The backward of every verb: rules, and calls that return their backward.

A verb is a linear map from the arrays of all ranks to the results of all ranks. Its backward, in `TRANSPOSED`, is the
transposed map, which gives the gradient of the sum of all ranks' losses. `HOROVOD` has the other convention, which
Horovod's operations by name keep for their users.

    y, backward = apply(comm, VerbCall("all_gather"), x)
    gradient_of_x, _ = apply(comm, backward, gradient_of_y)
"""

from __future__ import annotations

from commlib.autodiff.calls import VerbCall, apply
from commlib.autodiff.reversed_ranks import reversed_ranks
from commlib.autodiff.rules import HOROVOD, TRANSPOSED, Rule, Rules, find_rule

__all__ = ["HOROVOD", "TRANSPOSED", "VerbCall", "Rule", "Rules", "apply", "find_rule", "reversed_ranks"]
