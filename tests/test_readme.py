"""The code in the README and in docs/ runs as it stands; only the pretrained model is a tiny one."""

import re
import shlex
from pathlib import Path

import peft
import pytest
import torch
from tiny import tiny
from transformers import AutoModelForCausalLM, ByT5Tokenizer, Trainer, TrainingArguments
from typer.testing import CliRunner

import resswap
from resswap.cli import app
from resswap.schemes import base

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture
def pretrained(tmp_path, monkeypatch):
    """A folder that from_pretrained finds under the name of the model on the Hub."""
    # What the README registers is gone afterwards.
    monkeypatch.setattr(base, "_SCHEMES", dict(base._SCHEMES))
    folder = tmp_path / "HuggingFaceTB/SmolLM2-135M"
    tiny("llama", vocab_size=300).save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)


def test_python_blocks_run_one_after_the_other(pretrained, capsys):
    namespace, schemes = {}, resswap.available_schemes()
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert all(name in printed for name in schemes)
    assert "model.layers.0.attn_connection" in printed
    assert "read" in printed and Path("report.html").read_text().count("<svg") == 1
    assert len(resswap.connections(AutoModelForCausalLM.from_pretrained("smollm2-mhc"))) == 6


@pytest.mark.parametrize("page", sorted(path.name for path in ROOT.glob("docs/*.md")))
def test_python_blocks_of_a_page_run_one_after_the_other(pretrained, page, tmp_path):
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL):
        exec(compile(block, page, "exec"), namespace)
    if "model" in namespace:  # the last one is a converted model, which computes what the plain one does
        ids = torch.arange(20)[None]
        plain = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
        assert resswap.connections(namespace["model"])
        torch.testing.assert_close(namespace["model"](ids).logits, plain(ids).logits)


def test_the_training_loops_of_the_recipes_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"torch": torch, "peft": peft, "resswap": resswap, "Trainer": Trainer}
    given |= {"args": TrainingArguments(output_dir="out", max_steps=1, logging_steps=1, report_to=[], use_cpu=True)}
    given |= {"dataset": [{"input_ids": torch.arange(9), "labels": torch.arange(9)}]}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "recipes/README.md").read_text(), re.DOTALL):
        given |= {"model": resswap.convert(tiny()), "base_model": tiny()}
        exec(compile(block, "recipes/README.md", "exec"), given)
    given["trainer"].train()
    assert Path("small/connections.safetensors").is_file() and Path("adapter/adapter_config.json").is_file()
    assert any("residual/gain_forward" in entry for entry in given["trainer"].state.log_history)


def test_command_lines_run(pretrained):
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("resswap ")]
    for line in lines:
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output
    assert len(lines) == 2 and "residual" in Path("report.html").read_text()


def test_the_commands_are_those_that_there_are():
    described = set(re.findall(r"^\| `resswap (\w+)", README, re.MULTILINE))
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert described == set(commands)


def test_the_diff_is_what_resswap_shows():
    shown = re.search(r"```diff\n(.*?)```", README, re.DOTALL)[1]
    assert shown.strip() in resswap.diff(resswap.convert(tiny("llama")))


def test_every_scheme_is_in_the_table():
    for scheme, config in resswap.available_schemes().items():
        row = re.search(rf"^\| `{scheme}` \|.*", README, re.MULTILINE)[0]
        assert f"| {'yes' if config.preserves_function else 'no'} |" in row


def test_logits_stay(pretrained):
    model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
    ids = torch.arange(20)[None]
    before = model(ids).logits
    torch.testing.assert_close(resswap.convert(model, scheme="mhc", num_streams=4)(ids).logits, before)
