"""Coordinator: run named operations, which ranks submit in any order, once all ranks have agreed on them."""

from commlib.coordinator.coordinator import Coordinator
from commlib.coordinator.op_request import OpRequest
from commlib.coordinator.pending_op import PendingOp

__all__ = ["Coordinator", "PendingOp", "OpRequest"]
