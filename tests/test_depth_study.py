"""The depth study, small: what it writes, and the two quantities that it computes itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import recipe_environ
from tiny import input_ids, tiny

import resswap

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
sys.path.insert(0, str(RECIPES))

from depth_study import DepthArguments, RecipeError, distance, shares, unigram_loss  # noqa: E402

SMALL = "--hidden_size 16 --max_train_steps 4 --block_size 16 --batch_size 2 --max_eval_samples 5".split()


def study(folder, *options):
    command = [sys.executable, RECIPES / "depth_study.py", *SMALL, "--output_dir", folder / "out", *options]
    return subprocess.run(command, env=recipe_environ(folder), text=True, capture_output=True)


def test_what_it_writes(tmp_path):
    done = study(tmp_path, "--layers", "1,2")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "depth_study.json").read_text())
    runs = record["runs"]
    schemes = ("none", "post_norm", "residual", "hc", "mhc", "attnres")
    assert set(runs) == {"none-1", "residual-1", *(f"{scheme}-2" for scheme in schemes)}
    for name, found in runs.items():
        assert [point["step"] for point in found["history"]] == [1, 2, 3, 4], name
        assert found["scheme"] in done.stdout and f"{found['eval_loss']:.3f}" in done.stdout
        assert found["initial"]["loss"] != found["trained"]["loss"]
        assert len(found["shares"]) == (0 if found["scheme"] in ("none", "post_norm") else 2 * found["layers"])
    gradients = {name: [m["gradient_norm"] for m in found["initial"]["measures"][:-1]] for name, found in runs.items()}
    for scheme in ("hc", "mhc", "attnres"):  # the same model before training, and the same weights
        assert gradients[f"{scheme}-2"] == pytest.approx(gradients["residual-2"], rel=1e-3)
    assert gradients["none-2"] != pytest.approx(gradients["residual-2"], rel=0.1)
    for when in ("trained", "disturbed"):
        assert runs["mhc-2"][when]["summary"]["gain_forward"] == pytest.approx(1, abs=0.01)
    gains = [runs["hc-2"][when]["summary"]["gain_forward"] for when in ("initial", "trained", "disturbed")]
    assert 1 == gains[0] < gains[1] < gains[2]
    for name, values in record["sinkhorn"].items():
        assert f"{values[20]:.2g}" in done.stdout and values[0] > values[5] > values[20], name
    assert len(record["sinkhorn"]) == 5
    assert (tmp_path / "out" / "depth_study.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("scheme", ["hc", "mhc", "attnres"])
def test_shares_are_those_of_the_plain_model_at_conversion(scheme):
    model = tiny()
    plain = resswap.inspect(model, input_ids())
    ends = [m.size for m in plain.measures[1:]]
    expected = [m.output_rms / end for m, end in zip(plain.measures, ends, strict=False)]
    assert shares(plain.measures) == pytest.approx(expected, rel=1e-5)
    converted = resswap.inspect(resswap.convert(model, scheme), input_ids())
    assert shares(converted.measures) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("scheme", ["none", "post_norm"])
def test_no_share_where_the_next_branch_reads_something_else(scheme):
    assert shares(resswap.inspect(resswap.convert(tiny(), scheme), input_ids()).measures) == []


def test_distance():
    matrix = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64)  # the second column sums to 0.6
    assert distance(matrix.log()[None], 0) == pytest.approx(0.4)
    assert distance(matrix.log()[None], 50) == pytest.approx(0, abs=1e-12)


def test_unigram_loss():
    from datasets import Dataset

    blocks = Dataset.from_dict({"input_ids": [[0, 0, 0, 1]]}).with_format("torch")
    # Counts with one more for each of three tokens: 4, 2, 1 of 7. The first token of a block is not predicted.
    expected = -torch.tensor([4 / 7, 1 / 7]).log().mean().item()
    assert unigram_loss(blocks, torch.tensor([[1, 0, 2]]), 3) == pytest.approx(expected)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layers": "6;24"}, "whole numbers"),
        ({"layers": "0,6"}, "at least 1"),
        ({"compare_layers": 7}, "none of --layers"),
        ({"hidden_size": 40}, "multiple of 16"),
        ({"max_train_steps": 0}, "max_train_steps"),
        ({"block_size": 1}, "block_size"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(RecipeError, match=message):
        DepthArguments(output_dir="out", **options)
