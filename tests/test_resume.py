"""A run that is killed and resumed goes on as if nothing had happened, bit for bit."""

import json

import pytest
from safetensors.torch import load_file

OPTIONS = (
    "--model_type gpt2 --config_overrides n_embd=32,n_layer=2,n_head=2,n_positions=32 --block_size 32 "
    "--max_eval_samples 5 --per_device_train_batch_size 3 --gradient_accumulation_steps 2 --learning_rate 1e-2 "
    "--max_train_steps 14 --eval_steps 6 --logging_steps 5 --checkpointing_steps 3 --lr_scheduler_type cosine"
).split()  # GPT-2 has dropout, so that the random numbers matter too
CASES = {
    "mhc": ["--scheme", "mhc", "--weight_decay", "0.1", "--residual_learning_rate", "3e-3"],
    "stream": ["--scheme", "attnres", "--streaming", "--shuffle_buffer_size", "20"],
    "lora": ["--scheme", "block_attnres", "--lora_r", "4", "--lora_dropout", "0.1", "--mixed_precision", "bf16"],
}
LATEST = ["--resume_from_checkpoint", "latest"]
DIE_WHILE_WRITING = """
import os, signal, accelerate
write = accelerate.Accelerator.save_state
def save_state(self, output_dir, **kwargs):
    if "-6" in output_dir:
        open(output_dir + "/model.safetensors", "wb").write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, output_dir, **kwargs)
accelerate.Accelerator.save_state = save_state
"""


@pytest.fixture(scope="module")
def text(recipes):
    """A text of 43 blocks, so that epochs end between and at checkpoints."""
    path = recipes.folder / "text.txt"
    path.write_text("".join(chr(65 + i * i % 50) for i in range(32 * 43)))
    return ["--train_file", str(path)]


def outcome(folder):
    record = json.loads((folder / "run.json").read_text())
    weights = next(folder.glob("*model.safetensors"))
    return record["history"], record["evaluations"], load_file(weights)


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_is_the_same_run(recipes, text, case):
    options = [*OPTIONS, *CASES[case], *text]
    recipes.run(*options, "--output_dir", f"{case}-whole")
    folder = recipes.folder / f"{case}-killed"
    killed = recipes.start(*options, "--output_dir", folder.name, kill=folder / "checkpoint-6")
    assert killed["statuses"] == [-9]
    assert not (folder / "run.json").exists()
    printed = recipes.run(*options, *LATEST, "--output_dir", folder.name)
    assert f"resumed {folder.name}/checkpoint-" in printed
    whole, resumed = outcome(recipes.folder / f"{case}-whole"), outcome(folder)
    assert [point["step"] for point in whole[0]] == [5, 6, 10, 12, 14]
    assert len({point["train_loss"] for point in whole[0]}) == 5
    assert resumed[0] == whole[0]
    assert resumed[1] == whole[1]
    assert resumed[2].keys() == whole[2].keys()
    assert all(resumed[2][name].equal(whole[2][name]) for name in whole[2])


def test_a_kill_in_the_middle_of_writing_leaves_the_checkpoint_before(recipes, text):
    options = [*OPTIONS, *CASES["mhc"], *text, "--output_dir", "half"]
    killed = recipes.start(*options, patch=DIE_WHILE_WRITING)
    assert killed["statuses"] == [-9]
    folder = recipes.folder / "half"
    assert {path.name for path in folder.iterdir()} == {"checkpoint-3", "checkpoint-6.partial"}
    assert "resumed half/checkpoint-3 at step 3" in recipes.run(*options, *LATEST)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-9"]
    if (recipes.folder / "mhc-whole").exists():
        assert outcome(folder)[0] == outcome(recipes.folder / "mhc-whole")[0]


def test_latest_starts_from_the_beginning_where_there_is_none(recipes, text):
    options = [*OPTIONS, *text, "--max_train_steps", "4", "--output_dir", "fresh"]
    assert "resumed" not in recipes.run(*options, *LATEST)
    # The same folder again, by mistake, or with other options.
    for more, message in (
        ([], "holds checkpoint-3 of another run"),
        ([*LATEST, "--per_device_train_batch_size", "2"], "per_device_train_batch_size 3 -> 2"),
        ([*LATEST, "--scheme", "mhc"], "residual None ->"),
        (["--resume_from_checkpoint", "nowhere"], "there is no checkpoint in nowhere"),
    ):
        refused = recipes.start(*options, *more)
        assert refused["statuses"] == [2]
        assert message in refused["output"].splitlines()[-1]
    refused = recipes.start(*options, *LATEST, processes=2)
    assert refused["statuses"] == [2, 2]
    assert "processes 1 -> 2" in refused["output"]
