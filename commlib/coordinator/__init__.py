"""Named operations that arrive in any order on any rank: agreed on, then run."""

from commlib.coordinator.coordinator import Coordinator
from commlib.coordinator.pending import Pending
from commlib.coordinator.request import Request

__all__ = ["Coordinator", "Pending", "Request"]
