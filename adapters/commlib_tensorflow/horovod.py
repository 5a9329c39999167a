"""Horovod's API on TensorFlow's tensors: `import commlib_tensorflow.horovod as hvd` replaces `horovod.tensorflow`.

Operations have names, and ranks may call them in any order. `allreduce` averages, as Horovod's does;
`commlib_tensorflow.all_reduce` sums. For Keras see `commlib_tensorflow.keras`.
"""

import typing as _typing

from commlib import __version__
from commlib import horovod as _core
from commlib.arguments import missing_attribute as _missing_attribute
from commlib.horovod import *
from commlib_tensorflow import elastic
from commlib_tensorflow.broadcast import *
from commlib_tensorflow.broadcast import __all__ as _broadcast_names
from commlib_tensorflow.compression import Compression
from commlib_tensorflow.gradient_tape import DistributedGradientTape, PartialDistributedGradientTape
from commlib_tensorflow.named_verbs import operations as _operations
from commlib_tensorflow.named_verbs import queries as _queries
from commlib_tensorflow.named_verbs.operations import *
from commlib_tensorflow.named_verbs.queries import *
from commlib_tensorflow.optimizer import DistributedOptimizer
from commlib_tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "__version__",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "elastic",
]
__all__ += _core.__all__
__all__ += _broadcast_names
__all__ += _operations.__all__
__all__ += _queries.__all__

if not _typing.TYPE_CHECKING:  # type checkers have the names

    def __getattr__(name: str) -> object:
        raise _missing_attribute(f"module {__name__!r}", name, __all__)
