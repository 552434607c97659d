"""The errors that resswap raises for what a user can mend."""


class ResswapError(Exception):
    """Base class of every error that resswap raises on purpose."""


class OptionError(ResswapError, ValueError):
    """A scheme or an option of one does not exist, or its value is not allowed."""


class UnsupportedModelError(ResswapError, ValueError):
    """The model, or the state it is in, cannot be converted; it is left exactly as it was."""


class CheckpointError(ResswapError, ValueError):
    """A saved model's description or tensors do not fit each other."""
