"""Horovod's API on PyTorch tensors: `import commlib_torch.horovod as hvd` replaces `import horovod.torch as hvd`.

Operations have names, and ranks may call them in any order. `allreduce` averages, as Horovod's does;
`commlib_torch.all_reduce` sums.
"""

import typing as _typing

from commlib import __version__
from commlib import horovod as _core
from commlib.arguments import missing_attribute as _missing_attribute
from commlib.horovod import *
from commlib_torch import elastic
from commlib_torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from commlib_torch.compression import Compression
from commlib_torch.gradients import join
from commlib_torch.named_verbs import movement as _movement
from commlib_torch.named_verbs import reductions as _reductions
from commlib_torch.named_verbs.movement import *
from commlib_torch.named_verbs.reductions import *
from commlib_torch.named_verbs.sparse import sparse_allreduce_async
from commlib_torch.optimizer import DistributedOptimizer
from commlib_torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "__version__",
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "join",
    "sparse_allreduce_async",
]
__all__ += _core.__all__
__all__ += _movement.__all__
__all__ += _reductions.__all__

if not _typing.TYPE_CHECKING:  # type checkers have the names

    def __getattr__(name: str) -> object:
        raise _missing_attribute(f"module {__name__!r}", name, __all__)
