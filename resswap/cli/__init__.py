"""The command line `resswap`."""

from .commands import app, main

__all__ = ["app", "main"]
