"""What compare.py shows: tables of means and spreads over seeds, and a figure."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import need
from models import PLAIN

COLUMNS = (
    "scheme",
    "rate",
    "added parameters",
    "time per step",
    "saved bytes",
    "loss, equal steps",
    "less than plain",
    "steps in plain's time",
    "loss, equal time",
    "less than plain",
)


@dataclass
class Study:
    """The runs of one model: each scheme with its rate out of `rates`, `steps` long and, if given, `in_time` long."""

    name: str
    steps: int
    rates: list[float]
    rate_of: dict[str, float]
    in_time: dict[str, int]
    runs: list[dict[str, Any]]


def summarise(studies: list[Study], costs: dict[str, dict[str, float]], frequency_loss: float) -> dict[str, Any]:
    """Everything that the tables and the figure show, by study and scheme."""
    report: dict[str, Any] = {"byte_frequency_loss": frequency_loss}
    for study in studies:
        report[study.name] = rows = {}
        for scheme, rate in study.rate_of.items():
            rows[scheme] = {"learning_rate": rate, "edge": len(study.rates) > 1 and rate in _ends(study.rates)}
            rows[scheme]["equal_steps"] = _outcome(study, scheme, study.steps, study.steps)
            if study.in_time:
                rows[scheme] |= {"costs": costs[scheme]}
                rows[scheme]["equal_time"] = _outcome(study, scheme, study.in_time[scheme], study.steps)
    return report


def _ends(rates: list[float]) -> tuple[float, float]:
    return min(rates), max(rates)


def _outcome(study: Study, scheme: str, steps: int, plain_steps: int) -> dict[str, Any]:
    """The losses of one scheme after `steps`, seed by seed, and how much less that is than the plain model's."""
    runs, plain = _by_seed(study, scheme, steps), _by_seed(study, PLAIN, plain_steps)
    losses = [run["eval_loss"] for run in runs.values()]
    outcome = {"steps": steps, "losses": losses, "curves": [run["curve"] for run in runs.values()]}
    if None not in losses:
        gains = [plain[seed]["eval_loss"] - run["eval_loss"] for seed, run in runs.items()]
        outcome |= {"mean": statistics.mean(losses), "spread": _spread(losses)}
        outcome |= {"gains": gains, "gain": statistics.mean(gains), "gain_spread": _spread(gains)}
    return outcome


def _by_seed(study: Study, scheme: str, steps: int) -> dict[int, dict[str, Any]]:
    wanted = (scheme, steps)
    return {r["run"]["seed"]: r for r in study.runs if (r["run"]["scheme"], r["run"]["steps"]) == wanted}


def _spread(values: list[float]) -> float | None:
    """The standard deviation over the seeds; None for one seed."""
    return statistics.stdev(values) if len(values) > 1 else None


def _number(value: float, spread: float | None, sign: str = "") -> str:
    return f"{value:{sign}.3f}" + ("" if spread is None else f" ± {spread:.3f}")


def _cells(report: dict[str, Any]) -> Iterator[list[str]]:
    plain = report["main"][PLAIN]["costs"]
    for scheme, row in report["main"].items():
        costs = row["costs"]
        cells = [
            scheme,
            f"{row['learning_rate']:g}{'*' if row['edge'] else ''}",
            f"{costs['added']:,}",
            f"{costs['time_ratio']:.2f} ×",
            f"{costs['saved_bytes'] / plain['saved_bytes']:.2f} ×",
        ]
        for name in ("equal_steps", "equal_time"):
            outcome = row[name]
            if name == "equal_time":
                cells.append(str(outcome["steps"]))
            if "mean" not in outcome:
                cells += ["not finite", "–"]
                continue
            cells.append(_number(outcome["mean"], outcome["spread"]))
            cells.append("–" if scheme == PLAIN else _number(outcome["gain"], outcome["gain_spread"], "+"))
        yield cells


def _deep_cells(report: dict[str, Any]) -> Iterator[list[str]]:
    for scheme, row in report.get("deep", {}).items():
        outcome = row["equal_steps"]
        loss = _number(outcome["mean"], outcome["spread"]) if "mean" in outcome else "not finite"
        yield [scheme, f"{row['learning_rate']:g}{'*' if row['edge'] else ''}", str(outcome["steps"]), loss]
    if "deep" in report:
        yield ["byte frequencies", "–", "–", f"{report['byte_frequency_loss']:.3f}"]


DEEP_COLUMNS = ("deep model", "rate", "steps", "loss")


def notes(report: dict[str, Any]) -> list[str]:
    """What one has to know to read the tables, from the run itself."""
    plain, arguments = report["main"][PLAIN]["costs"], report["arguments"]
    seeds = len(arguments["seeds"])
    return [
        f"Held-out loss in nats per byte: mean ± standard deviation over {seeds} seed(s). 'less than plain': the "
        "plain model's loss less this one, seed by seed (same first weights, same data order); above 0 is better.",
        f"Equal steps: {report['main'][PLAIN]['equal_steps']['steps']} steps. Equal time: a training of its own with "
        "as many steps as fit in the plain model's time, and a schedule that ends with them.",
        f"Time: the median over interleaved rounds of a whole step against the plain model's "
        f"({1000 * plain['seconds_per_step']:.0f} ms) in the same round, not the clock of the runs; the smaller the "
        "model, the more a connection costs beside its branch. Saved bytes: kept for the backward, "
        f"{plain['saved_bytes'] / 2**20:.1f} MiB in the plain model.",
        f"Rates: the best of {', '.join(f'{rate:g}' for rate in arguments['learning_rates'])} by the loss of one "
        f"{arguments['sweep_steps']}-step run on tuning blocks; * marks an end of that list.",
    ]


def print_tables(report: dict[str, Any]) -> None:
    """The tables on the terminal, and the notes."""
    console = need("rich.console").Console()
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width of its own
    for columns, rows in ((COLUMNS, list(_cells(report))), (DEEP_COLUMNS, list(_deep_cells(report)))):
        table = need("rich.table").Table()
        for index, title in enumerate(columns):
            table.add_column(title, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        if rows:
            console.print(table)
    for note in notes(report):
        print(note)


def write_markdown(report: dict[str, Any], path: Path) -> None:
    """The same in Markdown."""
    lines = []
    for columns, rows in ((COLUMNS, list(_cells(report))), (DEEP_COLUMNS, list(_deep_cells(report)))):
        if rows:
            lines += [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
            lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    path.write_text("\n".join(lines + [f"- {note}" for note in notes(report)]) + "\n")


def draw(report: dict[str, Any], path: Path) -> None:
    """Loss by step; what each scheme gains over the plain model, seed by seed; the deep model."""
    need("matplotlib").use("Agg")
    pyplot = need("matplotlib.pyplot")
    panels = 3 if "deep" in report else 2
    figure, axes = pyplot.subplots(1, panels, figsize=(5 * panels, 4.6), layout="constrained")
    others = [scheme for scheme in report["main"] if scheme != PLAIN]
    colors = {PLAIN: "black", **{scheme: f"C{index}" for index, scheme in enumerate(others)}}
    _curves(axes[0], report["main"], colors)
    axes[0].set_title("main model, equal steps")
    _gains(axes[1], report["main"])
    if "deep" in report:
        _curves(axes[2], report["deep"], {**colors, "none": colors.get("none", "C0")})
        axes[2].axhline(report["byte_frequency_loss"], color="gray", linestyle=":", label="byte frequencies")
        axes[2].set_title("deep model")
    for axis in axes[::2]:
        axis.set_xlabel("step")
        axis.set_ylabel("held-out loss (nats per byte)")
        axis.legend(fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(axis: Any, rows: dict[str, dict[str, Any]], colors: dict[str, str]) -> None:
    """The mean over the seeds by step, and the range from the least to the most."""
    for scheme, row in rows.items():
        curves = row["equal_steps"]["curves"]
        steps = [step for step, _ in curves[0]]
        points = [[math.nan if loss is None else loss for _, loss in curve] for curve in curves]
        by_step = list(zip(*points, strict=True))
        means = [statistics.mean(losses) for losses in by_step]
        axis.plot(steps, means, label=scheme, color=colors[scheme], linewidth=2 if scheme == PLAIN else 1.2)
        low, high = ([extreme(losses) for losses in by_step] for extreme in (min, max))
        axis.fill_between(steps, low, high, alpha=0.15, color=colors[scheme], linewidth=0)


def _gains(axis: Any, rows: dict[str, dict[str, Any]]) -> None:
    """A dot for each seed: what the scheme gains at equal steps (filled) and at equal time (open)."""
    schemes = [scheme for scheme in rows if scheme != PLAIN]
    for name, shift, face in (("equal_steps", 0.15, "C0"), ("equal_time", -0.15, "none")):
        label: str | None = name.replace("_", " ")
        for index, scheme in enumerate(schemes):
            gains = rows[scheme][name].get("gains", [])
            heights = [len(schemes) - index + shift] * len(gains)
            axis.scatter(
                gains, heights, s=28, facecolors=face, edgecolors="C0" if face != "none" else "C3", label=label
            )
            label = None
    axis.axvline(0, color="black", linewidth=1)
    axis.set_xscale("symlog", linthresh=0.1)
    axis.set_yticks(range(len(schemes), 0, -1), schemes)
    axis.set_xlabel("nats per byte less than the plain model (right: better)")
    axis.set_title("gain over the plain model, a dot per seed")
    axis.legend(fontsize=8)
