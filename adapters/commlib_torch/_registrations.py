"""Registrations: tell whether modules may have got other parameters or layers, without looking through them."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module


class Registrations:
    """Counts the parameters and layers that any module was given since `start`."""

    def __init__(self) -> None:
        self.count = 0
        self._is_counting = False

    def start(self) -> None:
        """Begin to count, once for all."""
        if not self._is_counting:
            self._is_counting = True
            module.register_module_parameter_registration_hook(self._note)
            module.register_module_module_registration_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.count += 1


registrations = Registrations()
"""torch has one set of such hooks per process, so this is one per process too."""
