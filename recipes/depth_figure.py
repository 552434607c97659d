"""The figure of depth_study.py."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"none": "C3", "post_norm": "C1", "residual": "C0", "hc": "C4", "mhc": "C2", "attnres": "C5"}
NAMES = {"none": "no shortcut", "post_norm": "post-norm", "residual": "pre-norm"}  # others are named as their scheme
MARK = 0.996  # of the distance from doubly stochastic is gone; the mark in (d)
MARK_ROUNDS = 20


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw all panels of a record of depth_study.py, and write them as a PNG."""
    need("matplotlib").use("Agg")
    pyplot = need("matplotlib.pyplot")
    layers = record["arguments"]["compare_layers"]
    runs = {name.rpartition("-")[0]: r for name, r in record["runs"].items() if r["layers"] == layers}
    single_stream = {name: runs[name] for name in ("residual", "mhc", "attnres")}
    several_streams = {name: runs[name] for name in ("hc", "mhc")}
    figure, axes = pyplot.subplots(3, 3, figsize=(15, 12.5), layout="constrained")
    (curves, losses, rounds), (before, after, gains), (sizes, shares, noisy) = axes
    draw_curves(curves, record)
    draw_losses(losses, record)
    draw_sinkhorn(rounds, record["sinkhorn"])
    gradients = {name: runs[name] for name in ("none", "post_norm", "residual", "mhc", "attnres")}
    for axis, when in ((before, "initial"), (after, "trained")):
        for name, found in gradients.items():
            values = numbers(found[when]["measures"][:-1], "gradient_norm")
            # At initialisation three lines lie on each other: the later ones are thinner.
            plot(axis, name, values, linewidth=3.5 if name == "residual" else 1.3)
    title = f"(b) gradient at each branch's output, {layers} layers"
    finish(before, f"{title},\nat initialisation", "norm of the gradient", log=True)
    finish(after, f"{title},\nafter training", "norm of the gradient", log=True)
    for name, found in single_stream.items():
        width = 3.5 if name == "residual" else 1.3
        plot(sizes, name, [size(m) for m in found["trained"]["measures"]], linewidth=width)
        plot(shares, name, [nan(share) for share in found["shares"]], linewidth=width)
    initial = [size(m) for m in runs["residual"]["initial"]["measures"]]
    plot(sizes, "residual", initial, "pre-norm, at initialisation", linestyle=":")
    finish(sizes, f"(c) size of the stream, {layers} layers,\nafter training", "root mean square", log=True)
    finish(shares, "(c) share of the newest branch in what the next reads,\nafter training", "share", log=True)
    for axis, when in ((gains, "trained"), (noisy, "disturbed")):
        for name, found in several_streams.items():
            for way, style in (("forward", "-"), ("backward", "--")):
                values = numbers(found[when]["measures"][:-1], f"composite_gain_{way}")
                plot(axis, name, values, f"{name}, {way}", linestyle=style)
    title = f"(e) gain of the product of mixing matrices, {layers} layers,\n"
    finish(gains, f"{title}after training", "largest row or column sum")
    noise = record["arguments"]["noise"]
    finish(
        noisy, f"{title}the same with noise of σ = {noise} on the connections", "largest row or column sum", log=True
    )
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def draw_curves(axis: "Axes", record: dict[str, Any]) -> None:
    """Training loss by step, with and without a shortcut."""
    depths = record["arguments"]["depths"]
    for name in ("none", "residual"):
        for index, layers in enumerate(depths):
            history = record["runs"][f"{name}-{layers}"]["history"]
            axis.plot(
                [point["step"] for point in history],
                [nan(point["train_loss"]) for point in history],
                color=COLORS[name],
                linestyle=["-", "--", "-.", ":"][index % 4],
                label=f"{NAMES[name]}, {layers} layers",
            )
    axis.set_ylim(top=1.5 * record["unigram_loss"])  # the first steps are off the panel
    finish(axis, "(a) training without and with a shortcut", "training loss (nats per byte)", xlabel="step")
    axis.legend(fontsize=8, ncols=2)


def draw_losses(axis: "Axes", record: dict[str, Any]) -> None:
    """Held-out loss by depth; schemes that were trained at one depth only are points."""
    for name, color in COLORS.items():
        found = [r for r in record["runs"].values() if r["scheme"] == name]
        axis.plot(
            [r["layers"] for r in found],
            [nan(r["eval_loss"]) for r in found],
            color=color,
            marker="o" if len(found) > 1 else "D",
            linestyle="-" if len(found) > 1 else "",
            label=NAMES.get(name, name),
        )
    axis.axhline(record["unigram_loss"], color="grey", linestyle=":", label="counting bytes")
    axis.set_xscale("log")
    axis.set_xticks(record["arguments"]["depths"], record["arguments"]["depths"])
    axis.minorticks_off()
    finish(axis, "(a) loss after training", "held-out loss (nats per byte)", xlabel="layers")


def draw_sinkhorn(axis: "Axes", distances: dict[str, list[float]]) -> None:
    """What is left of the distance from doubly stochastic, by rounds."""
    for index, (name, values) in enumerate(distances.items()):
        left = [nan(value) / nan(values[0]) for value in values]
        color = COLORS["mhc"] if name.endswith("mhc") else f"{0.75 - 0.2 * index}"
        axis.plot(left, color=color, marker=".", markersize=4, label=f"{name}")
    axis.axhline(1 - MARK, color="C3", linewidth=0.8, linestyle="--")
    axis.axvline(
        MARK_ROUNDS, color="C3", linewidth=0.8, linestyle="--", label=f"{MARK:.1%} gone; {MARK_ROUNDS} rounds"
    )
    axis.set_ylim(1e-9, 2)
    title = "(d) Sinkhorn-Knopp: distance from doubly stochastic,\nby that of the softmax it starts from"
    finish(axis, title, "what is left", xlabel="rounds", log=True)


def plot(axis: "Axes", name: str, values: Sequence[float], label: str | None = None, **style: Any) -> None:
    """One line over depth, in the scheme's colour."""
    axis.plot(values, color=COLORS[name], label=label or NAMES.get(name, name), **style)


def finish(axis: "Axes", title: str, ylabel: str, xlabel: str = "sublayer (connection)", log: bool = False) -> None:
    """Title, labels, grid, legend."""
    if log:
        axis.set_yscale("log")
    axis.set_title(title, fontsize=11)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def numbers(measures: Sequence[dict[str, Any]], name: str) -> list[float]:
    """One measure of all connections; what is not finite is a gap."""
    return [nan(measure[name]) for measure in measures]


def size(measure: dict[str, Any]) -> float:
    """Root mean square of all streams, or sources, together."""
    each = [nan(value) for value in measure["stream_rms"]]
    return math.hypot(*each) / math.sqrt(len(each)) if each else math.nan


def nan(value: float | str | None) -> float:
    """A number of a report, which writes "NaN" and "Infinity" as text."""
    return math.nan if value is None else float(value)
