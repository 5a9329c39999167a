"""CudaKernels: the CUDA kernels as the table that every device has. See `kernels.protocol`.

The host's kernels document the residuals, the layouts of payloads and the treatment of infinities and NaNs. They are
the same here.
"""

from __future__ import annotations

from commlib.kernels.cuda.arithmetic import ArithmeticKernels
from commlib.kernels.cuda.blocks import BlockKernels
from commlib.kernels.cuda.codes import CodecKernels
from commlib.kernels.cuda.low_rank import LowRankKernels
from commlib.kernels.cuda.places import PlaceKernels
from commlib.kernels.cuda.rows import RowKernels
from commlib.kernels.cuda.sparse import SparseKernels


class CudaKernels(
    ArithmeticKernels, CodecKernels, SparseKernels, PlaceKernels, BlockKernels, RowKernels, LowRankKernels
):
    """The kernels of a GPU. Each file of this folder implements its share, for any launcher."""
