"""Schemes of users: the README's example in a file of its own, and what registering refuses."""

import copy
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from processes import run_python
from tiny import input_ids, load_by_own_code, logits, new_parameters, randomise_connections, tiny
from transformers import AutoModelForCausalLM

import resswap
from resswap.schemes import base

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLE = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "@register_scheme" in block)


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(base, "_SCHEMES", dict(base._SCHEMES))


@pytest.fixture
def rezero(tmp_path, monkeypatch):
    """The README's example as a module."""
    (tmp_path / "rezero.py").write_text(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    import rezero

    yield rezero
    del sys.modules["rezero"]


def test_the_example_is_short():
    assert len(EXAMPLE.splitlines()) < 40


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_example_converts_trains_saves_and_loads(rezero, tmp_path, per_channel):
    model, ids = tiny(), input_ids()
    before = logits(model, ids)
    resswap.convert(model, "rezero", per_channel=per_channel)
    assert torch.equal(logits(model, ids), before)
    groups = resswap.param_groups(model, lr=1e-2, residual_lr=1e-1)
    optimizer, losses = torch.optim.AdamW(groups), []
    for _ in range(5):
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert len(new_parameters(model)) == 6
    assert all((gate - 1).abs().max() > 1e-3 for gate in new_parameters(model).values())
    model.save_pretrained(tmp_path / "model")
    expected = logits(model, ids)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.config.residual["options"] == {"per_channel": per_channel}
    assert torch.equal(logits(loaded, ids), expected)
    assert torch.equal(logits(load_by_own_code(tmp_path / "model"), ids), expected)
    assert "class ReZero(" in (tmp_path / "model" / "rezero.py").read_text()
    assert torch.equal(logits(copy.deepcopy(model), ids), expected)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, ids), expected, rtol=1e-5, atol=1e-5)
    resswap.revert(model, discard_trained=True)
    assert type(model).__name__ == "LlamaForCausalLM" and not resswap.connections(model)


def test_gradient_checkpointing_and_selection(rezero):
    model, ids = resswap.convert(tiny(), "rezero", sites="mlp"), input_ids()
    assert set(new_parameters(model)) == {f"model.layers.{i}.mlp_connection.gate" for i in range(3)}
    randomise_connections(model)
    gradients = []
    for reentrant in (None, True, False):
        model.zero_grad()
        if reentrant is not None:
            model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-6)


def test_without_the_module_a_saved_model_names_the_remedy(rezero, tmp_path):
    resswap.convert(tiny(), "rezero").save_pretrained(tmp_path / "model")
    del base._SCHEMES["rezero"]
    with pytest.raises(resswap.CheckpointError, match="no scheme 'rezero'.*once the module that defines it.*imported"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")


IN_A_SCRIPT = """
    import json, sys
    import resswap, transformers
    from transformers import AutoModelForCausalLM, LlamaConfig

    {example}
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    config = LlamaConfig(**sizes)
    model = AutoModelForCausalLM.from_config(config)
    resswap.convert(model, "rezero")
    model.save_pretrained(sys.argv[1])
    loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    print(json.dumps([len(resswap.connections(loaded)), "auto_map" in open(sys.argv[1] + "/config.json").read()]))
"""


def test_a_scheme_in_a_script_is_saved_without_code(tmp_path):
    script = IN_A_SCRIPT.format(example=EXAMPLE.replace("\n", "\n    "))
    assert run_python(script, tmp_path / "model") == [2, False]
    assert not list((tmp_path / "model").glob("*.py"))


def test_a_scheme_without_a_file_is_saved_without_code_and_says_so(monkeypatch):
    warnings = []
    monkeypatch.setattr("resswap.conversion.logger.warning", warnings.append)
    exec(compile(EXAMPLE, "<cell>", "exec"), {"__name__": "__main__"})
    model = resswap.convert(tiny(), "rezero")
    assert model.config._residual_code is None
    assert len(warnings) == 1 and "define schemes in a file of their own" in warnings[0]


def test_a_cell_can_run_again():
    for _ in range(2):
        exec(compile(EXAMPLE, "<cell>", "exec"), {"__name__": "__main__"})
    assert "rezero" in resswap.available_schemes()


def make(name="own", frozen=True, bases=(resswap.SchemeConfig,), **members):
    members = {"__module__": __name__, "scheme": name, "__annotations__": {"scheme": ClassVar[str]}, **members}
    cls = type("OwnConfig", bases, members)
    return dataclass(frozen=frozen)(cls)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: object, "not a class derived from resswap.SchemeConfig"),
        (lambda: make(""), "needs a name"),
        (lambda: type("OwnConfig", (resswap.SchemeConfig,), {"scheme": "own"}), "not a frozen dataclass"),
        (lambda: make("mhc"), "The scheme 'mhc' is resswap.schemes.mhc.MHCConfig"),
        (
            lambda: make(width=3, __annotations__={"scheme": ClassVar[str], "width": int}),
            "OwnConfig.width is not made by resswap.option",
        ),
        (
            lambda: make(width=field(default=3), __annotations__={"scheme": ClassVar[str], "width": int}),
            "OwnConfig.width is not made by resswap.option",
        ),
        (
            lambda: make(
                layers=resswap.option(3, "Layers.", "a number"),
                __annotations__={"scheme": ClassVar[str], "layers": int},
            ),
            "OwnConfig.layers: resswap.convert has an argument of this name",
        ),
    ],
)
def test_what_cannot_be_registered(config, message):
    before = resswap.available_schemes()
    with pytest.raises(resswap.OptionError, match=message):
        resswap.register_scheme(config())
    assert resswap.available_schemes() == before


def test_annotations_as_text_are_checked_too(tmp_path, monkeypatch):
    (tmp_path / "postponed.py").write_text(
        "from __future__ import annotations\n\n" + EXAMPLE.replace("rezero", "late")
    )
    monkeypatch.syspath_prepend(tmp_path)
    import postponed  # noqa: F401

    with pytest.raises(resswap.OptionError, match="late: per_channel=3; allowed: True or False"):
        resswap.convert(tiny(), "late", per_channel=3)
    resswap.convert(tiny(), "late", per_channel=True)


def with_lost_buffer(place):
    connection = resswap.Connection(place.index)
    connection.register_buffer("steps", torch.ones(1), persistent=False)
    return connection


@pytest.mark.parametrize(
    ("connection", "message"),
    [
        (
            lambda self, place: torch.nn.Linear(1, 1),
            "connection.. of OwnConfig gives Linear, which is not derived from",
        ),
        (lambda self, place: None, "gives NoneType"),
        (lambda self, place: resswap.Connection(7), "Connection.index is not 0"),
        (lambda self, place: with_lost_buffer(place), "the buffer 'steps' of Connection is not saved"),
    ],
)
def test_a_wrong_connection_leaves_the_model_as_it_was(connection, message):
    resswap.register_scheme(make(connection=connection))
    model, ids = tiny(), input_ids()
    expected, classes = logits(model, ids), [type(module) for module in model.modules()]
    with pytest.raises(resswap.OptionError, match=message):
        resswap.convert(model, "own")
    assert [type(module) for module in model.modules()] == classes
    assert not hasattr(model.config, "residual")
    assert torch.equal(logits(model, ids), expected)
