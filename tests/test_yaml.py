"""Every YAML file of the repository is loaded: launch files by Accelerate, experiments by train.py up to the data."""

import re
from pathlib import Path

import accelerate.commands.launch as launcher
import pytest
import yaml
from tiny import tiny
from transformers import ByT5Tokenizer

ROOT = Path(__file__).parents[1]
EXPERIMENTS = sorted((ROOT / "recipes" / "experiments").glob("*.yaml"))
LAUNCH_FILES = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
PARAMETERS = {"gpt2_124m": 124e6, "llama_10m_cpu": 10e6, "llama_350m": 350e6}  # without the connections


def test_no_yaml_is_left_out():
    elsewhere = {".venv", ".venv-oldest", "runs", "mkdocs.yml"}  # `make docs` reads the last one
    found = {path for path in ROOT.rglob("*.y*ml") if not elsewhere & set(path.relative_to(ROOT).parts)}
    assert found == {*EXPERIMENTS, *LAUNCH_FILES}
    assert set(PARAMETERS) <= {path.stem for path in EXPERIMENTS}
    assert {"cpu", "ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"} == {path.stem for path in LAUNCH_FILES}


@pytest.fixture(scope="module")
def pretrained(recipes):
    """What stands in for models of the Hub."""
    folder = recipes.folder / "pretrained"
    tiny("llama", vocab_size=300, max_position_embeddings=4096).save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_dry_run(recipes, pretrained, path):
    options = yaml.safe_load(path.read_text())
    local = [
        text
        for name in ("model_name_or_path", "tokenizer_name")
        if name in options
        for text in (f"--{name}", pretrained)
    ]
    printed = recipes.run("--config", path, *local, "--mixed_precision", "no", "--dry_run")
    line = next(line for line in printed.splitlines() if line.startswith(f"{options['scheme']}: "))
    parameters, added, trained = (int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d", line)[:3])
    assert added > 0
    assert (trained < parameters) == ("lora_r" in options)
    assert f"{options['max_train_steps']} steps of " in line
    assert f"blocks of {options['block_size']} tokens" in line
    if path.stem in PARAMETERS:
        assert parameters - added == pytest.approx(PARAMETERS[path.stem], rel=0.05)
    assert not (recipes.folder / options["output_dir"]).exists()


def test_the_command_line_wins_over_the_file(recipes):
    path = ROOT / "recipes" / "experiments" / "llama_10m_cpu.yaml"
    printed = recipes.run("--config", path, "--max_train_steps", 7, "--scheme", "hc", "--dry_run")
    assert "hc: " in printed and " 7 steps of " in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: mhc\noutput_dir: a\nmodel_type: llama", "there is no option --schema"),
        ("- a", "one option per line"),
        ("a: [1]", "one option per line"),
        ("a: b: c", "cannot read the options"),
    ],
)
def test_a_bad_file_is_one_line(recipes, text, message):
    path = recipes.folder / "bad.yaml"
    path.write_text(text)
    done = recipes.start("--config", path)
    assert done["statuses"] == [2]
    assert message in done["output"].splitlines()[-1]


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.stem)
def test_accelerate_accepts_the_launch_file(path):
    args = launcher.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, _, _ = launcher._validate_launch_command(args)
    assert args.num_processes == (2 if path.stem == "cpu" else 8)
    assert args.use_fsdp == (path.stem == "fsdp2")
    assert args.use_deepspeed == path.stem.startswith("deepspeed")
    assert args.multi_gpu == (path.stem in ("cpu", "ddp"))
    assert args.mixed_precision == ("no" if path.stem == "cpu" else "bf16")
    if args.use_fsdp:
        assert str(args.fsdp_version) == "2"
    if args.use_deepspeed:
        assert f"zero{args.zero_stage}" in path.stem
        assert str(args.zero3_init_flag).lower() == "false"  # else the model is partitioned before it is converted
