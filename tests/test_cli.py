"""The command line: what it prints and writes, and how it fails."""

import json
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from loopback_hub import TOKEN, LoopbackHub
from processes import environ, run_python
from tiny import input_ids, logits, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GenerationConfig, LlamaForCausalLM
from transformers import LlamaForSequenceClassification as Classifier
from typer.testing import CliRunner

import resswap
from resswap.cli import app, main


def run(*arguments, status=0):
    """What the command prints, in one line if it fails."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert status == 0 or "Traceback" not in result.output
    return result.stdout if status == 0 else " ".join(result.stderr.replace("│", " ").split())


def run_json(*arguments):
    return json.loads(run(*arguments, "--json"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A plain model with a tokenizer of bytes and a generation config."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    torch.manual_seed(0)
    model = tiny(vocab_size=300)
    model.generation_config = GenerationConfig(max_new_tokens=7)
    model.save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return folder


def test_the_entry_point_is_the_app():
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    module, name = re.search(r'^resswap = "(.+):(.+)"$', project, re.MULTILINE).groups()
    assert getattr(import_module(module), name) is main
    result = subprocess.run(
        [sys.executable, "-m", "resswap", "--version"], capture_output=True, text=True, env=environ()
    )
    assert result.stdout.strip() == resswap.__version__, result.stderr


@pytest.mark.parametrize("command", ["schemes", "support", "convert", "diff", "inspect", "push"])
def test_help(command):
    assert "--json" in run(command, "--help")
    assert command in run("--help")


def test_schemes():
    listed = {entry["scheme"]: entry for entry in run_json("schemes")}
    assert listed.keys() == resswap.available_schemes().keys()
    options = {option["name"]: option for option in listed["mhc"]["options"]}
    assert options["num_streams"]["default"] == 4 and listed["mhc"]["preserves_function"] is True
    shown = run("schemes")
    assert all(scheme in shown for scheme in listed) and "num_streams" in shown


def test_support(saved):
    assert run_json("support", "llama")["supported"] is True
    assert run_json("support", saved)["model_type"] == "llama"
    assert "adds in the layer" in run("support", "llama")
    run("support", "deepseek_v4", status=1)
    assert "language model of type 'lama'" in run("support", "lama", status=2)


def test_convert(saved, tmp_path):
    done = run_json("convert", saved, tmp_path / "mhc", "-o", "num_streams=2", "-o", "pre_peak=0.6", "--verify")
    assert done["scheme"] == "mhc" and done["options"]["num_streams"] == 2 and done["options"]["pre_peak"] == 0.6
    assert done["connections"] == 6 and done["logit_difference"] < 1e-5 and done["reloaded_difference"] == 0
    model, plain = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "mhc", saved))
    assert done["new_parameters"] == sum(p.numel() for p in resswap.added_parameters(model).values())
    torch.testing.assert_close(logits(model, input_ids()), logits(plain, input_ids()), rtol=1e-4, atol=1e-4)
    assert model.generation_config.max_new_tokens == 7
    assert AutoTokenizer.from_pretrained(tmp_path / "mhc")("abc") == AutoTokenizer.from_pretrained(saved)("abc")


def test_convert_says_what_it_did(saved, tmp_path):
    shown = run(
        "convert", saved, tmp_path / "out", "--scheme", "block_attnres", "--option", "num_blocks=2", "--verify"
    )
    assert "6 connections" in shown and "logit difference after conversion" in shown and "read back: 0 " in shown
    assert "difference" not in run("convert", saved, tmp_path / "out", "--overwrite")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.residual["scheme"] == "mhc"


def test_convert_keeps_head_and_dtype(saved, tmp_path):
    config = LlamaForCausalLM.from_pretrained(saved).config
    Classifier(config).to(torch.bfloat16).save_pretrained(tmp_path / "classifier")
    done = run_json("convert", tmp_path / "classifier", tmp_path / "out", "--verify")
    assert done["tokenizer"] is False and done["reloaded_difference"] == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForSequenceClassification"] and written["dtype"] == "bfloat16"


def test_convert_stops_at_a_difference(saved, tmp_path, monkeypatch):
    convert = resswap.convert

    def wrong(model, *args, **kwargs):
        with torch.no_grad():
            model.model.norm.weight *= 1.01
        return convert(model, *args, **kwargs)

    monkeypatch.setattr(resswap, "convert", wrong)
    assert "Nothing was written" in run("convert", saved, tmp_path / "out", "--verify", status=1)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_unasked(saved, tmp_path):
    (tmp_path / "out").mkdir()
    run("convert", saved, tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert "--overwrite" in run("convert", saved, tmp_path / "out", "--scheme", "hc", status=1)
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert "the model itself" in run("convert", saved, saved, "--overwrite", status=1)
    (tmp_path / "file").write_text("mine")
    assert "is a file" in run("convert", saved, tmp_path / "file", "--overwrite", status=1)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (["SAVED", "OUT", "--scheme", "mch"], "no scheme 'mch'; available", 2),
        (["SAVED", "OUT", "-o", "streams=4"], "no option 'streams'; its options: num_streams", 2),
        (["SAVED", "OUT", "-o", "num_streams=1"], "num_streams=1; allowed: a whole number from 2", 2),
        (["SAVED", "OUT", "-o", "num_streams=four"], "num_streams='four'; allowed", 2),
        (["SAVED", "OUT", "-o", "num_streams"], "NAME=VALUE", 2),
        (["SAVED", "OUT", "-o", "num_streams=2", "-o", "num_streams=4"], "num_streams is given twice", 2),
        (["SAVED"], "DST", 2),
        (["SAVED", "OUT", "--schema", "hc"], "--schema", 2),
        (["./no/where", "OUT"], "no such folder", 1),
        (["EMPTY", "OUT"], "has no config that can be read", 1),
        (["DAMAGED", "OUT"], "cannot be loaded", 1),
        (["LACKING", "OUT"], "the weights lack model.norm.weight", 1),
        (["CONVERTED", "OUT"], "already converted", 1),
        (["ENCODER", "OUT"], "not a decoder", 1),
    ],
)
def test_mistakes_in_convert(saved, tmp_path, arguments, message, status, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, made = tmp_path / "made", arguments[0]
    if made == "EMPTY":
        folder.mkdir()
    elif made == "DAMAGED":
        tiny().save_pretrained(folder)
        (folder / "model.safetensors").write_bytes(b"not weights")
    elif made == "LACKING":
        model = tiny()
        state = {name: value for name, value in model.state_dict().items() if name != "model.norm.weight"}
        model.save_pretrained(folder, state_dict=state)
    elif made == "CONVERTED":
        resswap.convert(tiny()).save_pretrained(folder)
    elif made == "ENCODER":
        from transformers import DistilBertConfig, DistilBertModel

        DistilBertModel(DistilBertConfig(vocab_size=50, dim=32, n_layers=1, n_heads=2, hidden_dim=32)).save_pretrained(
            folder
        )
    names = {"SAVED": saved, "OUT": tmp_path / "out"} | ({made: folder} if made.isupper() and made != "SAVED" else {})
    shown = run("convert", *(names.get(argument, argument) for argument in arguments), status=status)
    assert message in shown
    assert not (tmp_path / "out").exists()


def test_diff(saved, tmp_path):
    run("convert", saved, tmp_path / "out")
    expected = resswap.diff(resswap.convert(LlamaForCausalLM.from_pretrained(saved)))
    for name, converted in ((saved, False), (tmp_path / "out", True), ("llama", False)):
        data = run_json("diff", name)
        assert data["converted"] is converted and data["diff"] == expected
    assert run("diff", saved).strip() == expected.strip()
    assert "no causal language model" in run("diff", "lama", status=2)
    assert "Reformer" in run("diff", "reformer", status=1)


def test_inspect(saved, tmp_path):
    run("convert", saved, tmp_path / "mhc")
    (tmp_path / "text").write_text("Ein Text. " * 30)
    page = tmp_path / "pages" / "report.html"
    data = run_json("inspect", tmp_path / "mhc", "--text", tmp_path / "text", "--baseline", saved, "--out", page)
    assert data["scheme"] == "mhc" and data["baseline"]["scheme"] == "residual"
    assert data["batch"] == [1, 128] and data["loss"] == pytest.approx(data["baseline"]["loss"], rel=1e-5)
    assert "who reads what (mhc)" in page.read_text() and "residual" in page.read_text()
    shown = run("inspect", saved, "--max-tokens", "20")
    assert "1 × 20 tokens" in shown and "2.mlp" in shown


def test_mistakes_in_inspect(saved, tmp_path):
    tiny(vocab_size=300).save_pretrained(tmp_path / "bare")
    tiny(vocab_size=50).save_pretrained(tmp_path / "small")
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes("für".encode("latin-1"))
    assert "name one with --tokenizer" in run("inspect", tmp_path / "bare", status=1)
    assert "there is no such folder" in run("inspect", tmp_path / "no" / "where", status=1)
    assert "1 × 10 tokens" in run("inspect", tmp_path / "bare", "--tokenizer", saved, "--max-tokens", "10")
    assert "the model has 50 tokens" in run("inspect", tmp_path / "small", "--tokenizer", saved, status=1)
    assert "at least 2" in run("inspect", saved, "--text", tmp_path / "empty", status=2)
    assert "UTF-8" in run("inspect", saved, "--text", tmp_path / "latin", status=2)
    assert "No such file" in run("inspect", saved, "--text", tmp_path / "lost", status=1)
    assert "is a directory" in run("inspect", saved, "--out", tmp_path, status=2)


def test_without_matplotlib(saved, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = run("inspect", saved, "--max-tokens", "8", "--out", tmp_path / "page.html", status=1)
    assert "pip install 'resswap[report]'" in message
    assert "2.mlp" in run("inspect", saved, "--max-tokens", "8")


HUB = """
    import json, os
    from typer.testing import CliRunner
    from resswap.cli import app

    def run(*arguments, status=0):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == status, result.output
        return result.stdout if status == 0 else " ".join(result.stderr.split())

    run("convert", "base/llama", "out", "--verify")
    found = json.loads(run("push", "out", "run", "--license", "mit", "--json"))
    found["lost"] = run("inspect", "base/lost", status=1)
    found["plain"] = run("push", "plain", "run", status=1)
    found["nothing"] = run("push", "lost", "run", status=1)
    found["name"] = run("push", "out", "bad name!", status=2)
    os.environ["HF_TOKEN"] = "hf_wrong"
    found["token"] = run("push", "out", "run", status=1)
    print(json.dumps(found))
"""


def test_the_hub(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, "plain")
    with LoopbackHub() as hub:
        hub.create("base/llama", {path.name: path.read_bytes() for path in saved.iterdir()})
        home = str(tmp_path / "home")
        found = run_python(HUB, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN, HF_HOME=home, HF_HUB_DISABLE_XET="1")
        files = hub.files("me/run")
    assert found["repo"] == "me/run" and found["commit"] in hub.repos["me/run"]
    assert {"config.json", "model.safetensors", "tokenizer_config.json", "generation_config.json"} <= files.keys()
    assert b"base_model: base/llama" in files["README.md"] and b"license: mit" in files["README.md"]
    assert "base/lost" in found["lost"] and "bad name!" in found["name"] and "401" in found["token"]
    assert "residual" in found["plain"] and "holds no config.json" in found["nothing"]
