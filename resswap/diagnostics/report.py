"""What `resswap.inspect` gives: a table, plain data, a figure, a page."""

import io
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.table import Table

from .measures import Measures, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = {
    "input": "input_rms",
    "output": "output_rms",
    "streams": "size",
    "spread": "spread",
    "read entropy": "read_entropy",
    "read dominance": "read_dominance",
    "write entropy": "write_entropy",
    "DS error": "doubly_stochastic_error",
    "gain →": "composite_gain_forward",
    "gain ←": "composite_gain_backward",
    "gradient": "gradient_norm",
}
"""What the table shows: title -> attribute of `Measures`. A column without a value is left out."""


@dataclass(frozen=True)
class Report:
    """What the residual connections of a model did with one batch. `print` shows the table.

    Attributes:
        model: the model's class.
        scheme: the scheme's name; "residual" for a plain model.
        options: the scheme's options.
        batch: (batch, seq).
        loss: None if there were no labels.
        measures: of each connection in the order of depth, then of the read-out.
    """

    model: str
    scheme: str
    options: dict[str, Any]
    batch: tuple[int, ...]
    loss: float | None
    measures: tuple[Measures, ...]

    @property
    def title(self) -> str:
        """One line that says what was measured."""
        size = " × ".join(str(length) for length in self.batch)
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        return f"{self.model}, {self.scheme}: {len(self.measures) - 1} connections, {size} tokens{loss}"

    def summary(self) -> dict[str, float]:
        """The measures summed up in a few numbers, as `ResidualCallback` logs them; see `Probe.values`."""
        return summary(self.measures)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in what JSON can hold: a number that is not finite is "NaN", "Infinity" or "-Infinity"."""
        return _plain({**asdict(self), "measures": [asdict(m) for m in self.measures], "summary": self.summary()})

    def rows(self) -> list[list[str]]:
        """The table: titles, then one row for each connection and the read-out."""
        columns = {title: [getattr(m, name) for m in self.measures] for title, name in COLUMNS.items()}
        shown = {title: values for title, values in columns.items() if any(v is not None for v in values)}
        titles = ["module", *shown]
        names = _without_common_ends([m.name for m in self.measures])
        return [titles, *([name, *map(_cell, row)] for name, *row in zip(names, *shown.values(), strict=True))]

    def __rich__(self) -> Group:
        table = Table(box=SIMPLE)
        titles, *rows = self.rows()
        for title in titles:
            justify = "left" if title == "module" else "right"
            table.add_column(title.replace(" ", "\n"), justify=justify, no_wrap=True)
        for row in rows:
            table.add_row(*row)
        return Group(self.title, table)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=200).print(self)
        return text.getvalue().rstrip()

    def figure(self, *others: "Report") -> "Figure":
        """The measures by depth, as a matplotlib figure.

        Args:
            others: reports to compare with, such as that of the plain model; drawn in the same panels.

        Raises:
            ImportError: matplotlib is not installed.
            TypeError: what is given to compare with is no report.
        """
        from .figures import draw

        return draw(self._with(others))

    def save_html(self, path: str | os.PathLike, *others: "Report") -> None:
        """Write everything into one page that needs nothing else, neither files nor network.

        Args:
            path: the file; folders on the way to it are made.
            others: as in `figure`.

        Raises:
            ImportError: matplotlib is not installed.
            TypeError: what is given to compare with is no report.
        """
        from .page import page

        text = page(self._with(others))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")

    def _with(self, others: tuple["Report", ...]) -> list["Report"]:
        for other in others:
            if not isinstance(other, Report):
                raise TypeError(f"{type(other).__name__} is not a report to compare with; resswap.inspect makes one.")
        return [self, *others]


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _without_common_ends(names: list[str]) -> list[str]:
    """`model.layers.0.attn_connection` as `0.attn`, where all connections are in `model.layers`."""
    *connections, readout = names
    prefix = os.path.commonprefix([name.split(".") for name in connections])
    return [".".join(name.split(".")[len(prefix) :]).removesuffix("_connection") or name for name in connections] + [
        readout.rpartition(".")[2]
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
