"""The backward of every verb: the rules, and calls that come with theirs.

A verb is a linear map from the arrays of all ranks to the results of all ranks. Its backward, in `TRANSPOSED`, is the
transposed map: with it the gradient is that of the sum over ranks of their losses. `HOROVOD` has the other convention,
which Horovod's operations by name keep for their users.

    y, backward = apply(comm, Call("all_gather"), x)
    gradient_of_x, _ = apply(comm, backward, gradient_of_y)
"""

from __future__ import annotations

from commlib.autodiff.calls import Call, apply
from commlib.autodiff.rules import HOROVOD, TRANSPOSED, Rule, Rules, find_rule

__all__ = ["HOROVOD", "TRANSPOSED", "Call", "Rule", "Rules", "apply", "find_rule"]
