"""Compare the runs of train.py: one table, one figure.

python recipes/report.py runs/residual runs/mhc --output runs/comparison.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

from common import RecipeError, need, run


def load_run(folder: str) -> dict[str, Any]:
    """The run.json that train.py left in `folder`."""
    path = Path(folder) / "run.json"
    if not path.is_file():
        raise RecipeError(f"there is no {path}; give folders that train.py wrote")
    try:
        record = json.loads(path.read_text())
        record["final"]["eval_loss"]
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{path} is not the record of a finished run of train.py") from error
    return record


def print_table(records: dict[str, dict[str, Any]]) -> None:
    """One row per run; the last column compares its time per step with that of the first plain run."""
    console = need("rich.console").Console()
    if not console.is_terminal:
        console.width = 140  # a file or a pipe has no width of its own
    table = need("rich.table").Table(title="Runs")
    table.add_column("run")
    table.add_column("scheme")
    for title in ("steps", "eval loss", "perplexity", "parameters", "added", "ms/step", "× plain"):
        table.add_column(title, justify="right")
    plain = next((r["final"]["seconds_per_step"] for r in records.values() if r["scheme"] == "residual"), None)
    for name, record in records.items():
        final = record["final"]
        seconds = final["seconds_per_step"]
        table.add_row(
            name,
            record["scheme"],
            f"{final['steps']}",
            f"{final['eval_loss']:.4f}",
            f"{final['perplexity']:.2f}",
            f"{final['parameters']:,}",
            f"{final['connection_parameters']:,}",
            f"{1000 * seconds:.0f}",
            f"{seconds / plain:.2f}" if plain else "–",
        )
    console.print(table)


def plot_runs(records: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the training loss (thin) and the evaluation loss (thick) of each run by step."""
    need("matplotlib").use("Agg")
    pyplot = need("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for index, (name, record) in enumerate(records.items()):
        points, evaluations = record["history"], record["evaluations"]
        color = f"C{index}"
        axes.plot(
            [point["step"] for point in points],
            [point["train_loss"] for point in points],
            color=color,
            linewidth=0.8,
            alpha=0.5,
            label=f"{name}, training",
        )
        axes.plot(
            [point["step"] for point in evaluations],
            [point["eval_loss"] for point in evaluations],
            color=color,
            linewidth=2,
            marker="o",
            markersize=3,
            label=f"{name}, held out ({record['final']['eval_loss']:.3f})",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    """Read the runs, print the table, draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="folder that train.py wrote")
    parser.add_argument("--output", default="comparison.png", help="file for the figure (default: %(default)s)")
    args = parser.parse_args()
    records = {Path(folder).name: load_run(folder) for folder in args.runs}
    if len(records) < len(args.runs):
        records = {folder: load_run(folder) for folder in args.runs}  # folders of the same name: tell them apart
    print_table(records)
    plot_runs(records, Path(args.output))
    print(f"figure: {args.output}")


if __name__ == "__main__":
    run(main)
