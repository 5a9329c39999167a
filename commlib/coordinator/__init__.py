"""Run named operations that ranks ask for in any order, once all have agreed on them."""

from commlib.coordinator.coordinator import Coordinator
from commlib.coordinator.pending import Pending
from commlib.coordinator.request import Request

__all__ = ["Coordinator", "Pending", "Request"]
