"""Which parameters a conversion added, how they are grouped and frozen, and the file that holds just them."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TRAINABLE, input_ids, logits, new_parameters, randomise_connections, tiny
from torch import nn

import resswap


def by_name(groups):
    return {group["name"]: group for group in groups}


@pytest.mark.parametrize("scheme", TRAINABLE)
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_added_parameters(model_type, scheme):
    model = tiny(model_type)
    original = {name for name, _ in model.named_parameters()}
    assert resswap.added_parameters(model) == {}
    resswap.convert(model, scheme)
    added = resswap.added_parameters(model)
    assert set(added) == {name for name, _ in model.named_parameters()} - original != set()
    assert all(model.get_parameter(name) is parameter for name, parameter in added.items())


def test_added_parameters_of_a_wrapped_model():
    model = resswap.convert(tiny(), "attnres")
    wrapped = nn.Sequential(model)
    assert set(resswap.added_parameters(wrapped)) == {f"0.{name}" for name in resswap.added_parameters(model)}


@pytest.mark.parametrize("scheme", TRAINABLE)
def test_every_parameter_is_in_one_group_and_only_matrices_decay(scheme):
    model = resswap.convert(tiny("gpt2"), scheme)
    groups = resswap.param_groups(model, lr=1e-3, weight_decay=0.1, residual_lr=1e-2)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    added = set(resswap.added_parameters(model))
    for group in groups:
        for parameter in group["params"]:
            assert group["lr"] == (1e-2 if names[id(parameter)] in added else 1e-3)
            assert group["weight_decay"] == (0.1 if parameter.dim() > 1 else 0.0)


def test_biases_gates_queries_and_scales_do_not_decay_whatever_their_shape():
    model = resswap.convert(tiny(), "mhc")
    connection = next(iter(resswap.connections(model).values()))
    for name in ("key_bias", "gate", "query", "scale", "gate_up_proj"):
        connection.register_parameter(name, nn.Parameter(torch.ones(2, 2)))
    groups = by_name(resswap.param_groups(model, lr=1e-3, weight_decay=0.1))
    ids = {id(p) for p in groups["connections, no decay"]["params"]}
    undecayed = {name for name, p in connection.named_parameters() if id(p) in ids}
    assert undecayed == {"key_bias", "gate", "query", "scale", "base"}
    assert any(connection.gate_up_proj is p for p in groups["connections"]["params"])


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_the_connections_learn_at_their_own_rate(optimizer):
    def moved(residual_lr):
        torch.manual_seed(0)
        model = resswap.convert(tiny(), "attnres")
        before = copy.deepcopy(model.state_dict())
        groups = resswap.param_groups(model, lr=1e-3, residual_lr=residual_lr)
        model(input_ids(), labels=input_ids()).loss.backward()
        optimizer(groups, lr=1.0).step()  # the groups' own rates win
        return {name: (value - before[name]).norm().item() for name, value in model.state_dict().items()}

    slow, fast = moved(1e-4), moved(1e-3)
    added = resswap.added_parameters(resswap.convert(tiny(), "attnres"))
    for name in slow:
        ratio = 10 if name in added and slow[name] > 0 else 1
        assert fast[name] == pytest.approx(ratio * slow[name], rel=2e-2, abs=1e-9), name
    assert any(slow[name] > 0 for name in added)


def test_a_rate_for_connections_that_do_not_train_is_an_error():
    with pytest.raises(resswap.OptionError, match="residual_lr=0.1: the model has no connections"):
        resswap.param_groups(tiny(), lr=1e-3, residual_lr=0.1)
    model = resswap.convert(tiny(), "mhc")
    for parameter in resswap.added_parameters(model).values():
        parameter.requires_grad_(False)
    with pytest.raises(resswap.OptionError):
        resswap.param_groups(model, lr=1e-3, residual_lr=0.1)


def test_flattened_parameters_are_refused():
    model = nn.Module()
    model._flat_param = nn.Parameter(torch.zeros(4))
    with pytest.raises(resswap.UnsupportedModelError, match="before wrapping"):
        resswap.param_groups(model, lr=1e-3)


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("scheme", ["mhc", "attnres"])
def test_freeze_base(scheme, reentrant):
    model = resswap.freeze_base(resswap.convert(tiny(), scheme))
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(new_parameters(model))
    groups = by_name(resswap.param_groups(model, lr=1e-3))
    assert all(name.startswith("connections") for name in groups)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    if reentrant and scheme == "attnres":
        with pytest.raises(resswap.UnsupportedModelError, match="use_reentrant"):
            model(input_ids(), labels=input_ids())
        return
    model(input_ids(), labels=input_ids()).loss.backward()
    moving = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert moving and moving <= set(new_parameters(model))
    assert all(p.grad is None for name, p in model.named_parameters() if name not in new_parameters(model))
    assert all(p.grad is not None for p in new_parameters(model).values())


def test_nothing_to_freeze_or_save(tmp_path):
    for function in (resswap.freeze_base, lambda model: resswap.save_connections(model, tmp_path)):
        with pytest.raises(resswap.UnsupportedModelError, match="no connections"):
            function(tiny())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheme", TRAINABLE)
def test_connections_alone_are_saved_and_loaded_onto_the_base(scheme, tmp_path):
    base = tiny()
    model = resswap.convert(copy.deepcopy(base), scheme)
    randomise_connections(model)
    path = resswap.save_connections(model, tmp_path / "new")
    assert set(load_file(path)) == set(resswap.added_parameters(model))
    assert path.stat().st_size < 4 * sum(p.numel() for p in base.parameters())
    for source in (tmp_path / "new", path):
        loaded = resswap.load_connections(copy.deepcopy(base), source)
        assert loaded.config.residual == model.config.residual
        assert torch.equal(logits(loaded, input_ids()), logits(model, input_ids()))


def test_gathered_weights_are_what_is_saved(tmp_path):
    model = resswap.convert(tiny(), "attnres")
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    path = resswap.save_connections(model, tmp_path, state_dict=state)
    assert all(torch.equal(value, torch.ones_like(value)) for value in load_file(path).values())


def test_connections_of_another_model_leave_the_model_alone(tmp_path):
    base = tiny()
    path = resswap.save_connections(resswap.convert(tiny(hidden_size=32), "mhc"), tmp_path)
    before = logits(base, input_ids())
    with pytest.raises(resswap.CheckpointError, match="another model: .*fn is of shape"):
        resswap.load_connections(base, path)
    deeper = resswap.save_connections(resswap.convert(tiny(num_hidden_layers=4), "mhc"), tmp_path)
    with pytest.raises(resswap.CheckpointError, match="the model has no model.layers.3"):
        resswap.load_connections(base, deeper)
    shallower = resswap.save_connections(resswap.convert(tiny(num_hidden_layers=2), "mhc"), tmp_path)
    with pytest.raises(resswap.CheckpointError, match="layers.2.* is missing"):
        resswap.load_connections(base, shallower)
    assert resswap.connections(base) == {}
    assert not hasattr(base.config, "residual")
    assert torch.equal(logits(base, input_ids()), before)


def test_files_that_hold_no_connections(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(resswap.CheckpointError, match="no connections.safetensors in"):
        resswap.load_connections(tiny(), tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(resswap.CheckpointError, match="not a description"):
        resswap.load_connections(tiny(), tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"nonsense")
    with pytest.raises(resswap.CheckpointError, match="cannot be read"):
        resswap.load_connections(tiny(), tmp_path / "b.safetensors")
