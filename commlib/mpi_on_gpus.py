"""MPI on GPUs: let all ranks agree whether MPI sends and receives memory of GPUs as it is. Never assumed.

A rank that may have a GPU asks the library, and tells that with its settings. Only where none of them hears no, the
first of them on each host tries it (`cuda_probe`), and tells what it has found.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from commlib.config.settings import Config

if TYPE_CHECKING:  # an import of these would cost every job a millisecond
    from commlib.transport.base import Transport
    from commlib.transport.cuda_aware import Answer

    Told = tuple[str, Answer]
    """What a rank that may have a GPU tells: its host, and what the library has answered there."""

# Drivers of NVIDIA's GPUs: on servers, under Windows, on boards with one chip.
_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")

_COPIED = "MPI gets data of GPUs by way of host memory"
_OVERRIDE = "COMMLIB_CUDA_AWARE=yes uses it nevertheless, COMMLIB_CUDA_AWARE=no asks no more"


def may_have_gpu(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process may use a GPU through CuPy, without looking closely: it takes microseconds."""
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    if not any(map(os.path.exists, _NODES)):
        return False
    from importlib.util import find_spec

    return "cupy" in sys.modules or find_spec("cupy") is not None


def kinds(settings: Config) -> set[str]:
    """Return the kinds of devices whose memory MPI takes by the settings' word."""
    named = {kind for kind in settings.mpi_devices.replace(" ", "").split(",") if kind}
    if settings.cuda_aware == "auto":
        return named
    return named | {"cuda"} if settings.cuda_aware == "yes" else named - {"cuda"}


def tell(settings: Config) -> Told | None:
    """Return what this rank has to say; None if it has no GPU, or if it is settled."""
    if settings.cuda_aware != "auto" or "cuda" in kinds(settings):
        return None
    if not may_have_gpu():
        return None
    from mpi4py import MPI

    from commlib.transport.cuda_aware import ask_loaded

    return os.uname().nodename, ask_loaded(MPI)


def agree(everyone: Sequence[Told | None], transport: Transport) -> bool:
    """Return whether MPI takes memory of GPUs, the same on all ranks. Collective, and free where no rank has a GPU.

    everyone: what the ranks have told. Rank 0 logs what was found.
    """
    rank, with_gpu = transport.rank, {number: told for number, told in enumerate(everyone) if told is not None}
    if not with_gpu:
        return False
    answers = [answer for _, answer in with_gpu.values()]
    if refusal := next((answer.how for answer in answers if answer.says is False), ""):
        _log(rank, "info", f"{_COPIED}: it takes none ({refusal})")
        return False
    from commlib.group.gathering import gather_objects

    failure = ""
    if rank in {host: number for number, (host, _) in reversed(with_gpu.items())}.values():  # the first of its host
        from commlib.transport.cuda_probe import (
            probe,  # not before somebody needs it: processes cost milliseconds to import
        )

        failure = probe().failure
    failures = [f"rank {number}: {text}" for number, text in enumerate(gather_objects(failure, transport)) if text]
    how = answers[0].how
    if not failures:
        _log(rank, "info", f"MPI sends and receives memory of GPUs as it is ({how}; a probe has shown it)")
    elif all(answer.says for answer in answers):
        said = f"MPI says that it takes memory of GPUs ({how}), but a probe failed: {'; '.join(failures)}"
        _log(rank, "warning", f"{said}. {_COPIED}; {_OVERRIDE}")
    else:
        _log(rank, "info", f"{_COPIED}: {how}, and a probe failed: {'; '.join(failures)}; {_OVERRIDE}")
    return not failures


def _log(rank: int, level: str, text: str) -> None:
    if rank == 0:
        import logging  # as in `world`: `import commlib` brings none

        getattr(logging.getLogger("commlib"), level)("%s", text)
