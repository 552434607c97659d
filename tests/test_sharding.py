"""train.py on two processes (gloo) computes what it computes on one: DDP, and FSDP2 as Accelerate prepares it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny
from transformers import AutoModelForCausalLM

import resswap

ACCELERATE = Path(__file__).parents[1] / "recipes" / "accelerate"
OPTIONS = (
    "--model_type llama --config_overrides "
    "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1 "
    "--block_size 32 --max_eval_samples 7 --learning_rate 1e-2 --weight_decay 0.1 --max_train_steps 4 "
    "--eval_steps 2 --logging_steps 1"
).split()
CASES = {
    "mhc": ["--scheme", "mhc"],
    "attnres": ["--scheme", "attnres", "--gradient_checkpointing", "--gradient_accumulation_steps", "2"],
    "only connections": [
        "--scheme",
        "mhc",
        "--train_only_connections",
        "--gradient_checkpointing",
        "--learning_rate",
        "0.3",
    ],
    "lora": ["--scheme", "attnres", "--lora_r", "4", "--learning_rate", "3e-2"],
    "bf16": ["--scheme", "mhc", "--mixed_precision", "bf16", "--gradient_checkpointing"],
    "bf16 sources": ["--scheme", "block_attnres", "--mixed_precision", "bf16"],
}
FSDP = {"launch": ACCELERATE / "fsdp2.yaml", "processes": 2}


@pytest.fixture(scope="module")
def text(recipes):
    path = recipes.folder / "text.txt"
    path.write_text("".join(chr(65 + i * i % 50) for i in range(32 * 60)))
    return ["--train_file", str(path), "--validation_split_percentage", "20"]


@pytest.fixture(scope="module")
def single(recipes, text):
    """The run of a case on one process; each case runs once."""

    def run(case):
        folder = recipes.folder / f"{case}-single"
        if not folder.exists():
            recipes.run(*OPTIONS, *text, *CASES[case], "--per_device_train_batch_size", 4, "--output_dir", folder.name)
        return folder

    return run


def record(folder):
    return json.loads((folder / "run.json").read_text())


def losses(folder):
    run = record(folder)
    return torch.tensor(
        [point["train_loss"] for point in run["history"]] + [point["eval_loss"] for point in run["evaluations"]]
    )


def weights(folder):
    return load_file(next(folder.glob("*model.safetensors")))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(recipes, text, single, case, kind):
    one, two = single(case), recipes.folder / f"{case}-{kind}"
    where = FSDP if kind == "fsdp2" else {"processes": 2}
    precision = [] if "--mixed_precision" in CASES[case] else ["--mixed_precision", "no"]
    batch = ["--per_device_train_batch_size", 2]
    printed = recipes.run(*OPTIONS, *text, *CASES[case], *precision, *batch, "--output_dir", two.name, **where)
    assert "2 process(es), cpu" in printed
    bf16 = case.startswith("bf16")
    evaluations = losses(one)[4:]
    assert evaluations[0] - evaluations[-1] > (0.1 if bf16 else 0.01)  # there is something to compare
    torch.testing.assert_close(losses(two), losses(one), rtol=0, atol=2e-2 if bf16 else 1e-5)
    expected, got = weights(one), weights(two)
    assert got.keys() == expected.keys()
    off = {name: (got[name] - value).abs() for name, value in expected.items()}
    if bf16:
        # AdamW moves a weight by about the learning rate, whatever the size of its gradient: one near zero can change
        # its sign in bfloat16, so only most weights can agree.
        assert torch.cat([difference.flatten() for difference in off.values()]).mean() < 2e-3
    else:
        assert max((difference.max().item(), name) for name, difference in off.items()) < (1e-4, "")


@pytest.mark.parametrize("case", ["mhc"])
def test_sharded_checkpoints_resume_exactly(recipes, text, case):
    options = [*OPTIONS, *text, *CASES[case], "--mixed_precision", "no", "--checkpointing_steps", "2"]
    recipes.run(*options, "--output_dir", f"{case}-whole", **FSDP)
    whole, resumed = recipes.folder / f"{case}-whole", recipes.folder / f"{case}-resumed"
    assert (whole / "checkpoint-2" / "pytorch_model_fsdp_0").is_dir()  # a shard per process
    resumed.mkdir()
    shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
    recipes.run(*options, "--output_dir", resumed.name, "--resume_from_checkpoint", "latest", **FSDP)
    assert torch.equal(losses(resumed), losses(whole))
    assert all(weights(resumed)[name].equal(value) for name, value in weights(whole).items())


def test_what_was_gathered_loads_as_a_converted_model(recipes, single):
    model = AutoModelForCausalLM.from_pretrained(single("attnres").with_name("attnres-fsdp2"))
    assert len(resswap.connections(model)) == 4
    base = AutoModelForCausalLM.from_pretrained(single("only connections").with_name("only connections-fsdp2"))
    resswap.revert(base, discard_trained=True)
    tuned = resswap.load_connections(base, single("only connections").with_name("only connections-fsdp2"))
    trained = AutoModelForCausalLM.from_pretrained(single("only connections").with_name("only connections-fsdp2"))
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        assert torch.equal(tuned(ids).logits, trained(ids).logits)


@pytest.mark.parametrize("where", [{"processes": 2}, FSDP], ids=["ddp", "fsdp2"])
def test_when_one_process_dies_the_other_ends_with_an_error(recipes, text, where):
    die = """
import os, signal, torch
step = torch.optim.AdamW.step
def dying_step(self, *args, **kwargs):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)
torch.optim.AdamW.step = dying_step
"""
    options = ["--scheme", "mhc", "--mixed_precision", "no", "--output_dir", "dead"]
    done = recipes.start(*OPTIONS, *text, *options, patch=die, timeout=60, **where)
    assert done["statuses"][1] == -9
    assert done["statuses"][0] > 0, done["output"]  # not -9, with which the server ends what hangs
    assert not (recipes.folder / "dead" / "run.json").exists()


def test_a_model_that_is_sharded_already_is_refused_with_the_remedy():
    """As DeepSpeed ZeRO-3 and FSDP2 mark what they have sharded."""
    partitioned = tiny()
    partitioned.lm_head.weight.ds_id = 0
    before = dict(vars(partitioned.config))
    with pytest.raises(resswap.UnsupportedModelError, match="ZeRO-3: convert before deepspeed.initialize"):
        resswap.convert(partitioned)
    sharded = tiny()
    sharded.model.layers[0]._get_fsdp_state = None
    with pytest.raises(resswap.UnsupportedModelError, match="sharded by FSDP: convert first, then shard"):
        resswap.convert(sharded)
    assert resswap.connections(partitioned) == resswap.connections(sharded) == {}
    assert vars(partitioned.config) == before
