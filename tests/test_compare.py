"""recipes/compare.py, run as a user runs it, on tiny models and the corpus that Python carries."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from processes import recipe_environ

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

from common import RecipeError  # noqa: E402
from compare import CompareArguments, check_settings, parse  # noqa: E402

SIZE = "hidden_size=16,intermediate_size=32,num_attention_heads=2,num_hidden_layers="
OPTIONS = ["--config_overrides", f"{SIZE}2", "--deep_config_overrides", f"{SIZE}3", "--block_size", "32"]
OPTIONS += ["--learning_rates", "1e-2", "1e-3", "--max_train_steps", "8", "--sweep_steps", "2", "--deep_steps", "3"]
OPTIONS += ["--eval_steps", "4", "--timing_rounds", "3", "--seeds", "1", "2", "--schemes", "mhc", "attnres"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def compare(folder):
    """Run compare.py; returns what it printed."""

    def compare(*options):
        command = [sys.executable, str(ROOT / "recipes" / "compare.py"), *OPTIONS, "--output_dir", "out", *options]
        result = subprocess.run(command, cwd=folder, env=recipe_environ(folder), text=True, capture_output=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return compare


@pytest.fixture(scope="module")
def printed(compare):
    return compare()


@pytest.fixture(scope="module")
def report(printed, folder):
    return json.loads((folder / "out" / "comparison.json").read_text())


@pytest.fixture(scope="module")
def runs(printed, folder):
    return [json.loads(line) for line in (folder / "out" / "runs.jsonl").read_text().splitlines()]


def losses(runs, **wanted):
    """The losses of the runs that are as wanted, by what else tells them apart."""
    found = [r for r in runs if all(r["run"][name] == value for name, value in wanted.items())]
    return [record["eval_loss"] for record in found]


def test_each_run_is_there_once(runs, report):
    keys = [json.dumps(record["run"]) for record in runs]
    assert len(set(keys)) == len(keys)
    lengths = [{8, report["main"][scheme]["equal_time"]["steps"]} for scheme in ("residual", "mhc", "attnres")]
    assert len(keys) == 2 * 2 + 2 * 2 + 3 * 2 + 2 * sum(map(len, lengths))  # sweeps and seeds; deep, then main


def test_the_rate_is_the_best_of_the_sweep(runs, report):
    for study, scheme in (("main", "residual"), ("main", "mhc"), ("main", "attnres"), ("deep", "none")):
        best = min(losses(runs, study=study, scheme=scheme, split="tuning"))
        rate = report[study][scheme]["learning_rate"]
        assert losses(runs, study=study, scheme=scheme, split="tuning", learning_rate=rate) == [best]


def test_means_and_gains(runs, report):
    plain = losses(runs, study="main", scheme="residual", split="test", steps=8)
    assert len(plain) == 2 and plain[0] != plain[1]
    for scheme in ("mhc", "attnres"):
        row = report["main"][scheme]
        for name, steps in (("equal_steps", 8), ("equal_time", max(1, round(8 / row["costs"]["time_ratio"])))):
            outcome, own = row[name], losses(runs, study="main", scheme=scheme, split="test", steps=steps)
            assert outcome["steps"] == steps
            assert outcome["mean"] == pytest.approx(statistics.mean(own))
            assert outcome["spread"] == pytest.approx(statistics.stdev(own))
            assert outcome["gains"] == pytest.approx([a - b for a, b in zip(plain, own, strict=True)])


def test_all_start_from_the_same_function(report):
    for scheme in ("mhc", "attnres"):
        for own, plain in zip(
            *(report["main"][name]["equal_steps"]["curves"] for name in (scheme, "residual")), strict=True
        ):
            assert own[0] == pytest.approx(plain[0], abs=1e-5)
            assert own[-1][1] < own[0][1]
            assert [step for step, _ in own] == [0, 4, 8]


def test_what_is_shown(printed, report, folder):
    rows = {cells[1].strip(): cells for cells in (line.split("│") for line in printed.splitlines()) if len(cells) > 9}
    markdown = (folder / "out" / "comparison.md").read_text()
    for scheme, row in report["main"].items():
        loss = f"{row['equal_steps']['mean']:.3f} ± {row['equal_steps']['spread']:.3f}"
        assert rows[scheme][6].strip() == loss
        assert f"| {loss} |" in markdown
        assert rows[scheme][3].strip() == f"{row['costs']['added']:,}"
    assert report["main"]["residual"]["costs"]["added"] == 0
    assert (folder / "out" / "comparison.png").stat().st_size > 10_000


def test_a_killed_comparison_goes_on(compare, runs, report, folder):
    path = folder / "out" / "runs.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]) + lines[-2][:40])  # the last run is gone, the one before cut in the middle
    compare()
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["run"] for record in again] == [record["run"] for record in runs]
    assert [record["eval_loss"] for record in again] == [record["eval_loss"] for record in runs]
    unchanged = [record["seconds"] == old["seconds"] for record, old in zip(again, runs, strict=True)]
    assert unchanged == [True] * (len(runs) - 2) + [False] * 2
    assert json.loads((folder / "out" / "comparison.json").read_text())["main"] == report["main"]


def test_other_settings_need_another_folder(printed, folder, monkeypatch):
    path = folder / "out" / "settings.json"
    monkeypatch.setattr(sys, "argv", ["compare.py", *OPTIONS, "--output_dir", "out", "--block_size", "16"])
    with pytest.raises(RecipeError, match="have --block_size 32, not 16; give another --output_dir"):
        check_settings(path, parse())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": [1, 0]}, "must not hold 0"),
        ({"learning_rates": [0.0]}, "above 0"),
        ({"batch_size": 0}, "at least 1"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(RecipeError, match=message):
        CompareArguments("out", **options)
