"""Only some residual adds are swapped: which, what the others do, and that it is kept."""

import copy
import re

import numpy as np
import pytest
import torch
from test_all_types import build
from tiny import EXACT, input_ids, load_by_own_code, logits, new_parameters, randomise_connections, tiny
from transformers import AutoModelForCausalLM

import resswap

CHOICES = [{"layers": [1]}, {"sites": "mlp"}, {"layers": slice(1, None), "sites": "attention"}]


def swapped(model):
    return [name for name, connection in resswap.connections(model).items() if connection.swapped]


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
@pytest.mark.parametrize("scheme", EXACT)
def test_exact(scheme, chosen):
    for family in ("llama", "olmo2", "granite"):
        model, ids = tiny(family, torch.float64), input_ids()
        before = logits(model, ids)
        resswap.convert(model, scheme, **chosen)
        assert (logits(model, ids) - before).abs().max() <= 1e-12 * before.abs().max().clamp(min=1)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"layers": [1]}, ["1.attn", "1.mlp"]),
        ({"layers": [np.int64(-1), 0]}, ["0.attn", "0.mlp", "2.attn", "2.mlp"]),
        ({"layers": range(2), "sites": "mlp"}, ["0.mlp", "1.mlp"]),
        ({"layers": slice(None, None, 2), "sites": "attention"}, ["0.attn", "2.attn"]),
        ({"layers": slice(0, 99)}, [f"{i}.{site}" for i in range(3) for site in ("attn", "mlp")]),
    ],
)
def test_what_is_swapped(chosen, expected):
    model = resswap.convert(tiny(), "mhc", **chosen)
    assert swapped(model) == [f"model.layers.{name}_connection" for name in expected]
    assert {name.rpartition(".")[0] for name in new_parameters(model)} == set(swapped(model))
    residual = model.config.residual
    assert residual.get("sites", "all") == chosen.get("sites", "all")
    layers = sorted({int(name[0]) for name in expected})
    assert residual.get("layers", [0, 1, 2]) == layers


@pytest.mark.parametrize("scheme", [*EXACT, "none", "post_norm"])
def test_the_other_layers_stay_as_they_were(scheme):
    """The layer before computes the same to the bit; the one after does to what it gets what the original does."""
    plain, ids = tiny(), input_ids()
    model = resswap.convert(copy.deepcopy(plain), scheme, layers=[1])
    with torch.no_grad():
        for connection in resswap.connections(model).values():
            for parameter in connection.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
        before = plain(ids, output_hidden_states=True).hidden_states
        after = model(ids, output_hidden_states=True)
        assert torch.equal(after.hidden_states[0], before[0]) and torch.equal(after.hidden_states[1], before[1])
        assert not torch.allclose(after.hidden_states[2], before[2], atol=1e-2)
        positions = plain.model.rotary_emb(before[0], torch.arange(16)[None])
        mask = torch.full((16, 16), -torch.inf).triu(1)[None, None]
        last = plain.model.layers[2](after.hidden_states[2], position_embeddings=positions, attention_mask=mask)
        torch.testing.assert_close(after.logits, plain.lm_head(plain.model.norm(last)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
@pytest.mark.parametrize("scheme", ["mhc", "attnres", "delta_attnres", "denseformer", "post_norm"])
def test_kept_in_every_way(scheme, chosen, tmp_path):
    base, ids = tiny(), input_ids()
    model = resswap.convert(copy.deepcopy(base), scheme, **chosen)
    randomise_connections(model)
    expected = logits(model, ids)
    model.save_pretrained(tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "the residual adds of" in card and ("of type mlp" in card) == (chosen.get("sites") == "mlp")
    resswap.save_connections(model, tmp_path / "connections")
    for other in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        load_by_own_code(tmp_path / "model"),
        resswap.load_connections(copy.deepcopy(base), tmp_path / "connections"),
        copy.deepcopy(model),
    ):
        assert torch.equal(logits(other, ids), expected)
        assert other.config.residual == model.config.residual
    resswap.revert(model, discard_trained=True)
    assert torch.equal(logits(model, ids), logits(base, ids)) and not hasattr(model.config, "residual")
    assert not resswap.connections(resswap.revert(resswap.convert(model, scheme, **chosen)))


@pytest.mark.parametrize("scheme", ["mhc", "block_attnres", "denseformer"])
def test_trains_with_checkpointing(scheme):
    model, ids = resswap.convert(tiny(), scheme, layers=[0, 2]).train(), input_ids()
    randomise_connections(model)
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


# Of parallel branches there is one add; recurrences mix tokens; BERT adds in submodules; and Mixtral has plain names.
@pytest.mark.parametrize(
    ("model_type", "attention", "mlp"),
    [
        ("gptj", {"mlp_connection"}, {"mlp_connection"}),
        ("falcon_h1", {"mamba_connection"}, {"feed_forward_connection"}),
        ("rwkv", {"attention_connection"}, {"feed_forward_connection"}),
        ("bert", {"attention.self_connection"}, {"output_connection"}),
        ("lfm2", {"conv_connection", "attn_connection"}, {"feed_forward_connection"}),
        ("bart", {"attn_connection", "encoder_attn_connection"}, {"fc1_connection"}),
        ("gemma4_text", {"attn_connection"}, {"experts_connection", "per_layer_input_gate_connection"}),
        ("mixtral", {"connection"}, {"connection_1"}),
    ],
)
def test_sites_of_other_families(model_type, attention, mlp):
    for sites, expected in (("attention", attention), ("mlp", mlp)):
        model, inputs = build(model_type)
        with torch.no_grad():
            before = logits_of(model, inputs)
            resswap.convert(model, "mhc", sites=sites)
            found = {re.sub(r"^.*?\.\d+\.", "", name) for name in swapped(model)}
            assert found == expected
            assert (logits_of(model, inputs) - before).abs().max() <= 1e-5 * before.abs().max()


def logits_of(model, inputs):
    return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"layers": [3]}, r"layers=\[3\]: the model has 3 layers, so 3 is out of range; allowed: -3 to 2"),
        ({"layers": [-4]}, "-4 is out of range"),
        ({"layers": []}, r"layers=\[\] chooses none of the model's 3 layers"),
        ({"layers": slice(5, 9)}, "chooses none"),
        ({"layers": slice("a", 2)}, "slice indices must be integers"),
        ({"layers": slice(0, 2, 0)}, "slice step cannot be zero"),
        ({"layers": "0"}, "allowed: a list of indices such as"),
        ({"layers": 3}, "such as"),
        ({"layers": [True]}, "True is not the index of a layer"),
        ({"layers": [1.5]}, "1.5 is not the index of a layer"),
        ({"sites": "ffn"}, "sites='ffn'; allowed: 'all', 'attention', 'mlp'"),
        ({"sites": ["mlp"]}, "allowed: 'all'"),
        ({"sites": None}, "sites=None; allowed"),
    ],
)
def test_errors(chosen, message):
    model = tiny()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(resswap.OptionError, match=message):
        resswap.convert(model, "mhc", **chosen)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert not hasattr(model.config, "residual")


def test_nothing_left():
    model, _ = build("mamba")
    with pytest.raises(resswap.OptionError, match="sites='mlp': the model has no such residual add"):
        resswap.convert(model, "mhc", sites="mlp")


def test_sites_that_cannot_be_told():
    model, _ = build("longcat_flash")
    with pytest.raises(resswap.UnsupportedModelError, match="cannot be told.*layers= alone"):
        resswap.convert(model, "mhc", sites="mlp")
    resswap.convert(model, "mhc", layers=[0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": [0, 9]}, "out of range|has 3 layers"),
        ({"layers": [1, 0]}, "ascending indices"),
        ({"layers": [-1]}, "ascending indices"),
        ({"layers": []}, "ascending indices"),
        ({"layers": ["0"]}, "ascending indices"),
        ({"layers": 1}, "residual.layers is 1, not a list"),
        ({"sites": "ffn"}, "residual.sites is 'ffn'; allowed: all, attention, mlp"),
    ],
)
def test_a_config_that_chooses_what_is_not_there(changed, message):
    config = copy.deepcopy(resswap.convert(tiny(), "mhc", layers=[0]).config)
    config.residual = {**config.residual, **changed}
    with pytest.raises(resswap.CheckpointError, match=message):
        AutoModelForCausalLM.from_config(config)
