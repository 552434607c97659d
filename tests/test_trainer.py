"""transformers' Trainer and TRL's SFTTrainer train a converted model as they train any other."""

import math

import pytest
import torch
from datasets import Dataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import SCHEMES, TRAINABLE, input_ids, logits, tiny
from transformers import AutoModelForCausalLM, ByT5Tokenizer, Trainer, TrainingArguments

import resswap
from resswap.schemes import ResidualModule

KEYS = {
    "mhc": {"stream_spread", "doubly_stochastic_error", "gain_forward", "gain_backward"},
    "hc": {"stream_spread", "doubly_stochastic_error", "gain_forward", "gain_backward"},
    "mhc_lite": {"stream_spread", "doubly_stochastic_error", "gain_forward", "gain_backward"},
    "attnres": {"read_entropy", "read_entropy_last", "read_dominance"},
    "block_attnres": {"read_entropy", "read_entropy_last", "read_dominance"},
    "delta_attnres": {"read_entropy", "read_entropy_last", "read_dominance"},
    "denseformer": {"read_entropy", "read_entropy_last", "read_dominance"},
}
COMMON = {
    "grad_norm",
    "gradient_first",
    "gradient_last",
    "input_rms_max",
    "output_rms_max",
    "stream_rms_first",
    "stream_rms_last",
    "stream_rms_max",
}


def arguments(folder, kind=TrainingArguments, **options):
    return kind(
        output_dir=str(folder),
        use_cpu=True,
        disable_tqdm=True,
        **{
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "max_steps": 4,
            "logging_steps": 2,
            "save_strategy": "no",
            "report_to": "none",
            **options,
        },
    )


def trainer(model, folder, **options):
    blocks = Dataset.from_dict({"input_ids": input_ids(16).tolist(), "labels": input_ids(16).tolist()})
    made = Trainer(model, arguments(folder, **options), train_dataset=blocks)
    made.add_callback(resswap.ResidualCallback(made))
    return made


@pytest.mark.parametrize("scheme", SCHEMES)
def test_trainer_logs_the_health_of_the_scheme(scheme, tmp_path):
    model = resswap.convert(tiny(), scheme)
    made = trainer(model, tmp_path, gradient_accumulation_steps=2, gradient_checkpointing=scheme in ("mhc", "attnres"))
    made.train()
    logs = [entry for entry in made.state.log_history if "residual/stream_rms_last" in entry]
    assert [entry["step"] for entry in logs] == [2, 4]
    wanted = (COMMON | KEYS.get(scheme, set())) - (set() if scheme in TRAINABLE else {"grad_norm"})
    for entry in logs:
        assert {name.removeprefix("residual/") for name in entry if name.startswith("residual/")} >= wanted
        assert all(math.isfinite(value) for value in entry.values())
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert losses[1] < losses[0]
    if scheme == "mhc":
        assert logs[1]["residual/stream_spread"] > 1e-3
    ours = [module for module in model.modules() if isinstance(module, ResidualModule)]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in ours)
    made.save_model(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(logits(loaded, input_ids()), logits(model.eval(), input_ids()))


def test_the_callback_does_not_change_training_or_the_trainers_own_logs(tmp_path):
    def history(callback):
        torch.manual_seed(0)
        made = trainer(resswap.convert(tiny(), "mhc"), tmp_path, logging_first_step=True)
        if not callback:
            made.remove_callback(resswap.ResidualCallback)
        made.train()
        return [(entry["step"], entry["loss"]) for entry in made.state.log_history if "loss" in entry]

    assert history(True) == history(False)
    assert [step for step, _ in history(True)] == [1, 2, 4]


def test_every_connection_can_be_logged(tmp_path):
    made = trainer(resswap.convert(tiny(), "mhc"), tmp_path, max_steps=2)
    made.remove_callback(resswap.ResidualCallback)
    made.add_callback(resswap.ResidualCallback(made, every_connection=True))
    made.train()
    logged = next(entry for entry in made.state.log_history if "residual/grad_norm" in entry)
    names = [name for name in logged if name.startswith("residual/model.layers.") and name.endswith("/gradient_norm")]
    assert len(names) == 6 and all(logged[name] > 0 for name in names)
    assert logged["residual/model.layers.0.attn_connection/gradient_norm"] == logged["residual/gradient_first"]


def test_the_values_reach_the_tracker(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer(resswap.convert(tiny(), "attnres"), tmp_path, report_to="tensorboard").train()
    board = EventAccumulator(str(next((tmp_path / "board").rglob("events*")).parent))
    board.Reload()
    tag = next(tag for tag in board.Tags()["scalars"] if tag.endswith("residual/read_entropy"))
    assert [event.step for event in board.Scalars(tag)] == [2, 4]


def test_resuming_a_trainer_checkpoint_is_exact(tmp_path):
    def run(**options):
        torch.manual_seed(0)
        made = trainer(resswap.convert(tiny(), "mhc"), tmp_path, save_strategy="steps", save_steps=2)
        made.train(**options)
        return made.model.state_dict()

    whole = run()
    resumed = run(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("scheme", ["mhc", "attnres"])
def test_sft_trainer(scheme, lora, tmp_path):
    from trl import SFTConfig, SFTTrainer

    model = resswap.convert(tiny(vocab_size=300), scheme)
    before = {name: p.detach().clone() for name, p in resswap.added_parameters(model).items()}
    texts = Dataset.from_dict({"text": ["the quick brown fox", "jumps over", "the lazy dog"] * 6})
    made = SFTTrainer(
        model,
        arguments(tmp_path, SFTConfig, max_length=32, dataset_num_proc=None, bf16=False),
        train_dataset=texts,
        processing_class=ByT5Tokenizer(extra_ids=0),
        peft_config=resswap.lora_config(model, r=4) if lora else None,
    )
    made.add_callback(resswap.ResidualCallback(made))
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert any("residual/grad_norm" in entry for entry in made.state.log_history)
    made.save_model(tmp_path / "saved")
    after = resswap.added_parameters(made.model)
    moved = [name for name, p in after.items() if "original_module" not in name and p.requires_grad]
    assert len(moved) == len(before)
    for name in moved:
        plain = name.replace(".modules_to_save.default", "").removeprefix("base_model.model.")
        assert not torch.equal(after[name], before[plain]), name
    if lora:
        torch.manual_seed(0)
        loaded = resswap.load_adapter(tiny(vocab_size=300), tmp_path / "saved")
    else:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(loaded.eval(), input_ids()), logits(made.model.eval(), input_ids()))
