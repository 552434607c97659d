"""Draw reports with matplotlib: panels over depth, and heat maps of who reads and who writes."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .measures import Measures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .report import Report

COLUMNS = 3


def draw(reports: Sequence["Report"]) -> "Figure":
    """All panels for which there are measures: curves of every report, then the heat maps of each.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'resswap[report]'.") from error
    curves = [panel for panel in _curves() if panel.has_values(reports)]
    maps = [
        (report, kind)
        for report in reports
        for kind in ("read", "write")
        if any(len(getattr(m, kind) or ()) > 1 for m in report.measures)
    ]
    rows = math.ceil((len(curves) + len(maps)) / COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axis, panel in zip(axes, curves, strict=False):
        panel.draw(axis, reports)
    for axis, (report, kind) in zip(axes[len(curves) :], maps, strict=False):
        _draw_map(figure, axis, report, kind)
    for axis in axes[len(curves) + len(maps) :]:
        axis.remove()
    return figure


class Panel:
    """Curves over depth.

    Args:
        title: with the unit, if there is one.
        lines: label -> what to draw of each connection's measures.
        log: whether the axis is logarithmic where values differ by a factor of 10 on.
    """

    def __init__(self, title: str, lines: dict[str, Callable[[Measures], float | None]], log: bool = False) -> None:
        self.title, self.lines, self.log = title, lines, log

    def has_values(self, reports: Sequence["Report"]) -> bool:
        return any(line(m) is not None for report in reports for line in self.lines.values() for m in report.measures)

    def draw(self, axis: "Axes", reports: Sequence["Report"]) -> None:
        styles = ["-", "--", ":", "-."]
        for position, report in enumerate(reports):
            for index, (label, line) in enumerate(self.lines.items()):
                values = [line(m) for m in report.measures]
                points = [(depth, value) for depth, value in enumerate(values) if value is not None]
                if points:
                    axis.plot(
                        *zip(*points, strict=True),
                        color=f"C{index if len(self.lines) > 1 else position}",
                        linestyle=styles[position % len(styles)],
                        marker=".",
                        label=_label(report, reports, label),
                    )
        low, high = axis.dataLim.intervaly
        if self.log and 0 < 10 * low < high:
            axis.set_yscale("log")
        axis.set(title=self.title, xlabel="connection")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        if len(self.lines) > 1 or len(reports) > 1:
            axis.legend(fontsize="small")


def _label(report: "Report", reports: Sequence["Report"], label: str) -> str:
    return ": ".join(part for part in (report.scheme if len(reports) > 1 else "", label) if part)


def _ratio(measures: Measures) -> float | None:
    """What a branch adds, relative to what it read: small where the stream dilutes it."""
    return measures.output_rms / measures.input_rms if measures.output_rms and measures.input_rms else None


def _curves() -> list[Panel]:
    return [
        Panel(
            "size (root mean square)",
            {
                "streams": lambda m: m.size,
                "branch input": lambda m: None if m.output_rms is None else m.input_rms,
                "branch output": lambda m: m.output_rms,
            },
            log=True,
        ),
        Panel("branch output / branch input", {"": _ratio}),
        Panel("gradient norm at the branch output", {"": lambda m: m.gradient_norm}, log=True),
        Panel("spread of the streams", {"": lambda m: m.spread}),
        Panel("entropy of use (1: all alike)", {"read": lambda m: m.read_entropy, "write": lambda m: m.write_entropy}),
        Panel("largest share of use", {"read": lambda m: m.read_dominance, "write": lambda m: m.write_dominance}),
        Panel(
            "gain of the mixing, one and composite",
            {
                "forward": lambda m: m.gain_forward,
                "backward": lambda m: m.gain_backward,
                "composite forward": lambda m: m.composite_gain_forward,
                "composite backward": lambda m: m.composite_gain_backward,
            },
            log=True,
        ),
        Panel("distance from doubly stochastic", {"": lambda m: m.doubly_stochastic_error}, log=True),
    ]


def _draw_map(figure: "Figure", axis: "Axes", report: "Report", kind: str) -> None:
    """One row for each connection, one column for each stream or source."""
    weights: list[tuple[float, ...]] = [getattr(m, kind) or () for m in report.measures]
    width = max(map(len, weights))
    grid = [[*row, *([math.nan] * (width - len(row)))] for row in weights]
    known = [abs(value) for row in weights for value in row if math.isfinite(value)]
    negative = any(value < 0 for row in weights for value in row)
    top = max(known, default=1.0) or 1.0
    colours: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -top, "vmax": top} if negative else {"vmin": 0, "vmax": top}
    image = axis.imshow(grid, aspect="auto", interpolation="nearest", **colours)
    figure.colorbar(image, ax=axis)
    verb = {"read": "who reads what", "write": "who writes where"}[kind]
    axis.set(title=f"{verb} ({report.scheme})", xlabel="stream or source", ylabel="connection")
    for side in (axis.xaxis, axis.yaxis):
        side.get_major_locator().set_params(integer=True)
