"""Registration counter: detects new parameters or layers of modules without walking them."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module


class RegistrationCounter:
    """Counts the parameters and layers that any module has registered since `start`."""

    def __init__(self) -> None:
        self.count = 0
        self._is_counting = False

    def start(self) -> None:
        """Begin to count; further calls do nothing."""
        if not self._is_counting:
            self._is_counting = True
            module.register_module_parameter_registration_hook(self._note)
            module.register_module_module_registration_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.count += 1


registrations = RegistrationCounter()
"""One per process: torch has one set of these hooks per process."""
