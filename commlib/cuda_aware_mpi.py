"""MPI on GPUs: agree on all ranks whether MPI is CUDA-aware, that is, sends and receives GPU memory directly.

Each rank that may have a GPU queries the MPI library and sends the answer with its settings. If no library answers no,
the first such rank of each host tests it (`cuda_probe`), and the ranks exchange the results.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from commlib.config.settings import Config

if TYPE_CHECKING:  # importing these costs a millisecond in every job
    from commlib.transport.base import Transport
    from commlib.transport.cuda_aware import Answer

    NodeAnswer = tuple[str, Answer]
    """The report of a rank that may have a GPU: its host and the library's answer."""

# Device files of NVIDIA's drivers: on servers, under Windows (WSL), on embedded boards.
_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")

_COPIED = "GPU data goes through host memory"
_OVERRIDE = "COMMLIB_CUDA_AWARE=yes uses it nevertheless, COMMLIB_CUDA_AWARE=no skips the probe"


def may_have_gpu(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process may use a GPU through CuPy, by a rough check that takes microseconds."""
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    if not any(map(os.path.exists, _NODES)):
        return False
    from importlib.util import find_spec

    return "cupy" in sys.modules or find_spec("cupy") is not None


def list_device_kinds(settings: Config) -> set[str]:
    """Return the kinds of devices whose memory MPI accepts according to the settings."""
    named = {kind for kind in settings.mpi_devices.replace(" ", "").split(",") if kind}
    if settings.cuda_aware == "auto":
        return named
    return named | {"cuda"} if settings.cuda_aware == "yes" else named - {"cuda"}


def report(settings: Config) -> NodeAnswer | None:
    """Return this rank's report; None if it has no GPU or the settings decide."""
    if settings.cuda_aware != "auto" or "cuda" in list_device_kinds(settings):
        return None
    if not may_have_gpu():
        return None
    from mpi4py import MPI

    from commlib.transport.cuda_aware import query_loaded

    return os.uname().nodename, query_loaded(MPI)


def agree(everyone: Sequence[NodeAnswer | None], transport: Transport) -> bool:
    """Return whether MPI accepts GPU memory, the same on all ranks. Collective; free if no rank has a GPU.

    everyone: the reports of the ranks. Rank 0 logs the result.
    """
    rank, with_gpu = transport.rank, {number: item for number, item in enumerate(everyone) if item is not None}
    if not with_gpu:
        return False
    answers = [answer for _, answer in with_gpu.values()]
    if refusal := next((answer.how for answer in answers if answer.is_supported is False), ""):
        _log(rank, "info", f"{_COPIED}: MPI cannot use GPU memory ({refusal})")
        return False
    from commlib.group.gathering import gather_objects

    failure = ""
    if rank in {host: number for number, (host, _) in reversed(with_gpu.items())}.values():  # first of its host
        from commlib.transport.cuda_probe import probe  # only when needed: importing it costs milliseconds

        failure = probe().failure
    failures = [f"rank {number}: {text}" for number, text in enumerate(gather_objects(failure, transport)) if text]
    how = answers[0].how
    if not failures:
        _log(rank, "info", f"MPI sends and receives GPU memory directly ({how}; a probe confirmed it)")
    elif all(answer.is_supported for answer in answers):
        claim = f"MPI claims to accept GPU memory ({how}), but a probe failed: {'; '.join(failures)}"
        _log(rank, "warning", f"{claim}. {_COPIED}; {_OVERRIDE}")
    else:
        _log(rank, "info", f"{_COPIED}: {how}, and a probe failed: {'; '.join(failures)}; {_OVERRIDE}")
    return not failures


def _log(rank: int, level: str, text: str) -> None:
    if rank == 0:
        import logging  # keep it out of `import commlib`, as in `world`

        getattr(logging.getLogger("commlib"), level)("%s", text)
