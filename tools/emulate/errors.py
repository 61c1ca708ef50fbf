"""What can go wrong, by who has to act."""

from __future__ import annotations


class NotAvailable(Exception):
    """The emulator cannot be had here; the text is one line that says why. Not a failure of what is tested."""


class EmulationFailed(Exception):
    """The emulator was there and did not do its part; the text holds its last words."""
