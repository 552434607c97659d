"""What the residual connections of a model do while it runs."""

from .inspection import inspect
from .measures import Measures, summary
from .probe import Probe, connection_grad_norm, health
from .report import Report

__all__ = ["Measures", "Probe", "Report", "connection_grad_norm", "health", "inspect", "summary"]
