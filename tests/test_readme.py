"""The code in the README runs as it stands; only the pretrained model is a tiny one."""

import re
from pathlib import Path

import pytest
import torch
from tiny import tiny
from transformers import AutoModelForCausalLM

import resswap
from resswap.cli import app
from resswap.schemes import base

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.fixture
def pretrained(tmp_path, monkeypatch):
    """A folder that from_pretrained finds under the name of the model on the Hub."""
    # What the README registers is gone afterwards.
    monkeypatch.setattr(base, "_SCHEMES", dict(base._SCHEMES))
    tiny("llama", vocab_size=256).save_pretrained(tmp_path / "HuggingFaceTB/SmolLM2-135M")
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


def test_the_commands_are_those_that_there_are():
    described = set(re.findall(r"^\| `resswap (\w+)", README, re.MULTILINE))
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert described == set(commands)


def test_the_diff_is_what_resswap_shows():
    shown = re.search(r"```diff\n(.*?)```", README, re.DOTALL)[1]
    assert shown.strip() in resswap.diff(resswap.convert(tiny("llama")))


def test_every_scheme_is_in_the_table():
    for scheme in resswap.available_schemes():
        assert f"| `{scheme}` |" in README


def test_logits_stay(pretrained):
    model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
    ids = torch.arange(20)[None]
    before = model(ids).logits
    torch.testing.assert_close(resswap.convert(model, scheme="mhc", num_streams=4)(ids).logits, before)
