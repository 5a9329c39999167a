"""Checkpoints of a job: the state of every rank, saved atomically in one folder."""

from commlib.checkpoint.checkpoint import Checkpoint

__all__ = ["Checkpoint"]
