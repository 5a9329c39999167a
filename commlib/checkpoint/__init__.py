"""Checkpoints of a job: what every rank holds, in one folder that is there as a whole or not at all."""

from commlib.checkpoint.checkpoint import Checkpoint

__all__ = ["Checkpoint"]
