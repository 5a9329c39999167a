"""What all communicators of one process share."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from typing import Any

from commlib.config import Config
from commlib.progress import Progress


@dataclass(slots=True)
class Runtime:
    """Settings, the progress thread, and the state of the process. One for each process (each thread in loopback)."""

    config: Config = field(default_factory=Config)
    progress: Progress = field(default_factory=Progress)
    ranks_on_node: int = 1
    closing: bool = False  # waits that still last must end
    groups: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # all communicators, to be told of the end

    @property
    def spins(self) -> int:
        """How often a waiting rank polls before it gives its core away."""
        if self.config.spins >= 0:
            return self.config.spins
        # The peer that is waited for may need this very core; then every poll delays it.
        return 2000 if self.ranks_on_node <= (os.cpu_count() or 1) else 20
