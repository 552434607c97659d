"""The version of resswap."""

__version__ = "0.1.0"
