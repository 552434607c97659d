"""The recipes, run as a user runs them, on a tiny model and the corpus that Python carries."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import recipe_environ
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import resswap

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
sys.path.insert(0, str(RECIPES))

from data import load_blocks, load_texts  # noqa: E402
from models import block_losses  # noqa: E402

TINY = "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1"
MODEL = ["--model_type", "llama", "--config_overrides", TINY]
# 13 held-out blocks do not divide by 2 processes × 2 blocks: the last pass is filled up with some that must not count.
EVAL = ["--block_size", "64", "--max_eval_samples", "13", "--eval_steps", "4", "--logging_steps", "1"]
STEPS = ["--max_train_steps", "6", "--learning_rate", "1e-2", "--weight_decay", "0.1", "--num_warmup_steps", "2"]
MHC = ["--scheme", "mhc", "--scheme_options", "num_streams=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(scope="module")
def environment(folder):
    return recipe_environ(folder)


@pytest.fixture(scope="module")
def run(folder, environment):
    """Run a command in a folder of its own; returns what it printed."""

    def run(*command, status=0):
        result = subprocess.run(
            [sys.executable, *map(str, command)], cwd=folder, env=environment, text=True, capture_output=True
        )
        assert result.returncode == status, result.stdout + result.stderr
        return result.stdout if status == 0 else result.stderr

    return run


@pytest.fixture(scope="module")
def train(folder, run):
    """Run train.py; returns the output folder."""

    def train(name, *options, launcher=()):
        run(*launcher, RECIPES / "train.py", *EVAL, *STEPS, *options, "--output_dir", name)
        return folder / name

    return train


@pytest.fixture(scope="module")
def plain(train):
    return train("plain", *MODEL, "--scheme", "residual", "--gradient_accumulation_steps", 2)


@pytest.fixture(scope="module")
def text_file(folder):
    """A text of 19 blocks: one epoch of it is shorter than the training."""
    path = folder / "text.txt"
    path.write_text("".join(chr(65 + i * i % 50) for i in range(64 * 19 + 10)))
    return path


@pytest.fixture(scope="module")
def mhc(train, text_file):
    """One process, batches of 4; trains on a file, evaluates on another."""
    files = ["--train_file", text_file, "--validation_file", text_file, "--gradient_accumulation_steps", 2]
    return train("mhc", *MODEL, *MHC, *files, "--per_device_train_batch_size", 4, "--per_device_eval_batch_size", 5)


def record(folder):
    return json.loads((folder / "run.json").read_text())


def test_a_plain_run(plain):
    run = record(plain)
    assert run["scheme"] == "residual"
    assert run["residual"] is None
    assert [point["step"] for point in run["history"]] == [1, 2, 3, 4, 5, 6]
    assert [point["lr"] for point in run["history"]] == pytest.approx([0, 5e-3, 1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert [point["step"] for point in run["evaluations"]] == [0, 4, 6]
    losses = [point["eval_loss"] for point in run["evaluations"]]
    assert losses[0] > losses[1] > losses[2]
    final = run["final"]
    assert (final["steps"], final["eval_loss"], final["connection_parameters"]) == (6, losses[-1], 0)
    assert final["perplexity"] == pytest.approx(torch.tensor(losses[-1]).exp().item(), rel=1e-5)
    assert final["tokens_per_second"] == pytest.approx(2 * 8 * 64 / final["seconds_per_step"])
    assert (plain / "curves.png").stat().st_size > 10_000
    model = AutoModelForCausalLM.from_pretrained(plain)
    assert final["parameters"] == model.num_parameters()
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(plain)) == 259
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(plain).eos_token_id


def test_a_converted_run_loads_with_its_loss(mhc, text_file):
    model = AutoModelForCausalLM.from_pretrained(mhc).eval()
    assert model.config.residual["scheme"] == "mhc"
    assert model.config.residual["options"]["num_streams"] == 2
    assert len(resswap.connections(model)) == 4
    run = record(mhc)
    texts = load_texts(train_file=str(text_file), validation_file=str(text_file))
    _, held_out = load_blocks(texts, AutoTokenizer.from_pretrained(mhc), 64)
    with torch.no_grad():
        loss = block_losses(model, held_out[:13]["input_ids"]).mean().item()
    assert loss == pytest.approx(run["final"]["eval_loss"], abs=1e-5)
    assert loss < run["evaluations"][0]["eval_loss"]


def test_conversion_starts_from_the_same_function(mhc, train, text_file):
    files = ["--train_file", text_file, "--validation_file", text_file]
    plain = record(train("start", *MODEL, *files, "--max_train_steps", 1))
    mhc = record(mhc)
    assert mhc["evaluations"][0]["eval_loss"] == pytest.approx(plain["evaluations"][0]["eval_loss"], abs=1e-5)
    difference = mhc["final"]["parameters"] - plain["final"]["parameters"]
    assert mhc["final"]["connection_parameters"] == difference > 0


def test_only_the_connections_of_a_saved_model_train(mhc, train):
    options = ["--train_only_connections", "--gradient_checkpointing", "--max_train_steps", 2]
    tuned = train("tuned", "--model_name_or_path", mhc, *options)
    before, after = (load_file(folder / "model.safetensors") for folder in (mhc, tuned))
    assert before.keys() == after.keys()
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed
    assert all("connection" in name for name in changed)
    assert record(tuned)["final"]["connection_parameters"] == record(mhc)["final"]["connection_parameters"]


def test_report(plain, mhc, run, folder):
    output = run(RECIPES / "report.py", plain, mhc, "--output", "figures/comparison.png")
    rows = {cells[1].strip(): cells for cells in (line.split("│") for line in output.splitlines()) if len(cells) > 9}
    for name, scheme in (("plain", "residual"), ("mhc", "mhc")):
        final = record(folder / name)["final"]
        assert rows[name][2].strip() == scheme
        assert rows[name][4].strip() == f"{final['eval_loss']:.4f}"
        assert rows[name][7].strip() == f"{final['connection_parameters']:,}"
    assert rows["plain"][9].strip() == "1.00"
    assert "figures/comparison.png" in output
    assert (folder / "figures" / "comparison.png").stat().st_size > 10_000


def test_report_without_a_run(run, folder):
    error = run(RECIPES / "report.py", folder, status=2)
    assert error.startswith("error: there is no ") and error.count("\n") == 1


def test_pretrained(plain, run, folder):
    options = ["--steps", 2, "--block_size", 32, "--max_new_tokens", 4, "--max_eval_samples", 3, "--scheme", "mhc"]
    output = run(RECIPES / "pretrained.py", "--model_name_or_path", plain, *options, "--output_dir", "tuned-plain")
    assert "the same text" in output
    *_, converted, reloaded = (
        float(line.split()[-1]) for line in output.splitlines() if "difference of a logit" in line
    )
    assert converted < 1e-5
    assert reloaded == 0
    assert AutoModelForCausalLM.from_pretrained(folder / "tuned-plain").config.residual["scheme"] == "mhc"


ERRORS = {
    "no model": ([], "give one of --model_name_or_path, --model_type and --config_name"),
    "unknown option": ([*MODEL, "--batch", "1"], "no option --batch"),
    "unknown type": (["--model_type", "lama"], "did you mean llama"),
    "unknown override": (["--model_type", "llama", "--config_overrides", "hiden_size=8"], "has no hiden_size"),
    "bad override": (["--model_type", "llama", "--config_overrides", "hidden_size=33"], "not a multiple"),
    "no such model": (["--model_name_or_path", "absent/model"], "'absent/model'"),
    "no such file": ([*MODEL, "--train_file", "absent.txt"], "there is no file absent.txt"),
    "empty file": ([*MODEL, "--train_file", "empty.txt"], "empty.txt is empty"),
    "no column": ([*MODEL, "--train_file", "body.jsonl"], "no column 'text' (only: body)"),
    "short text": ([*MODEL, "--train_file", "short.txt"], "shorter than one block of 64"),
    "long block": ([*MODEL, "--block_size", "4096"], "longer than the model's context of 2048"),
    "large batch": ([*MODEL, "--per_device_train_batch_size", "10000"], "do not fill one pass of 10000"),
    "unknown scheme": ([*MODEL, "--scheme", "mch"], "no scheme 'mch'; available: "),
    "unknown scheme option": ([*MODEL, "--scheme", "mhc", "--scheme_options", "streams=2"], "no option 'streams'"),
    "scheme option without scheme": ([*MODEL, "--scheme_options", "num_streams=2"], "needs a --scheme"),
    "nothing to train": ([*MODEL, "--train_only_connections"], "--train_only_connections needs a --scheme"),
    "folder that is a file": ([*MODEL, "--output_dir", "short.txt"], "cannot write to the folder short.txt"),
    "negative rate": ([*MODEL, "--learning_rate", "-1"], "--learning_rate must be at least 0"),
    "another scheme": (["--model_name_or_path", "mhc", "--scheme", "hc"], "already converted to 'mhc', not 'hc'"),
    "options of a converted model": (
        ["--model_name_or_path", "mhc", "--scheme_options", "num_streams=4"],
        "cannot change a converted model",
    ),
}
# One process runs all command lines: most of the time of one is its imports.
DRIVER = """
import contextlib, io, json, runpy, sys
import accelerate, resswap  # what imports print is not what is tested
from accelerate.state import PartialState
PartialState()
for arguments in json.load(sys.stdin):
    sys.argv, error, status = arguments, io.StringIO(), 0
    with contextlib.redirect_stderr(error):
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as exit:
            status = exit.code
    print(json.dumps([status, error.getvalue()]))
"""


@pytest.fixture(scope="module")
def mistakes(mhc, folder, environment):
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("short")
    (folder / "body.jsonl").write_text('{"body": "text"}\n')
    lines = [[str(RECIPES / "train.py"), *EVAL, "--output_dir", "none", *options] for options, _ in ERRORS.values()]
    result = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=folder,
        env=environment,
        input=json.dumps(lines),
        text=True,
        capture_output=True,
    )
    assert result.returncode == 0, result.stderr
    return dict(zip(ERRORS, map(json.loads, result.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", ERRORS)
def test_mistakes_are_one_line(mistakes, case, folder):
    status, error = mistakes[case]
    assert status == 2
    assert error.startswith("error: ") and error.count("\n") == 1
    assert ERRORS[case][1] in error
    assert not (folder / "none").exists()
