"""recipes/bench.py, run as a user runs it, on tiny models; what it measures is not tested, but that it does."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import recipe_environ
from tiny import input_ids, tiny

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

from bench import BenchArguments, check  # noqa: E402
from common import RecipeError  # noqa: E402
from measure import interleaved, ratio, saved_bytes  # noqa: E402

TINY = ["--hidden_size", "64", "--num_layers", "2", "--batch_size", "1", "--block_size", "8", "--rounds", "1"]


def bench(folder, *options):
    command = [sys.executable, str(ROOT / "recipes/bench.py"), "--output_dir", str(folder / "out"), *options]
    return subprocess.run(command, env=recipe_environ(folder), text=True, capture_output=True)


def test_bench(tmp_path):
    schemes = ["mhc", "mhc:recompute=false,num_streams=2", "attnres", "peer_deepseek_v4", "peer_stacked_attnres"]
    works = ["step", "prefill", "decode"]
    done = bench(tmp_path, *TINY, "--schemes", *schemes, "--works", *works, "--growth", "streams")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out/bench.json").read_text())
    rows = {(row["scheme"], row["work"]): row for row in record["results"]}
    assert set(rows) == {(scheme, work) for scheme in ["residual", *schemes] for work in works}
    assert all(row["milliseconds"] > 0 for row in rows.values())
    assert {row["ratio"] for key, row in rows.items() if key[0] == "residual"} == {1.0}
    assert rows["mhc", "step"]["saved_ratio"] > rows["residual", "step"]["saved_ratio"] == 1.0
    assert rows["peer_deepseek_v4", "step"]["saved_ratio"] > rows["mhc", "step"]["saved_ratio"]
    assert [row["size"] for row in record["growth"] if row["scheme"] == "mhc"] == [2, 4, 8]
    assert (tmp_path / "out/bench.png").stat().st_size > 10_000
    assert "peer_deepseek_v4" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schemes": ["nhc"]}, "--schemes nhc; allowed: "),
        ({"kernels": ["fast"]}, "--kernels fast; allowed: auto, eager, compile"),
        ({"hidden_size": 100}, "--hidden_size a multiple of 64"),
    ],
)
def test_what_cannot_be_measured(options, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        check(BenchArguments(**options))


def test_saved_bytes_counts_each_storage_once():
    x = torch.randn(8, 16, requires_grad=True)
    y = x.exp()  # saves its result
    assert saved_bytes(torch.nn.Identity(), lambda: y.view(-1).square().sum() + y.square().sum()) == 8 * 16 * 4
    model, ids = tiny("llama"), input_ids()
    assert saved_bytes(model, lambda: model(ids, use_cache=False).logits) > 0


def test_rounds_are_interleaved(monkeypatch):
    monkeypatch.setattr("gc.collect", lambda: 0)  # slow after many tests
    calls = []
    seconds = interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3, warmup=1)
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    assert all(sorted(calls[i : i + 3]) == ["a", "b", "c"] for i in range(0, 12, 3))
    assert ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == 2.0
