"""The options of train.py, named as in transformers' run_clm.py and run_clm_no_trainer.py."""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from common import RecipeError, one_line
from transformers import HfArgumentParser, SchedulerType


@dataclass
class ModelArguments:
    """Which model to train, and what takes the place of its residual adds."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Pretrained model to start from: a folder or a name on the Hub."}
    )
    model_type: str | None = field(
        default=None, metadata={"help": "Train this kind of model from scratch, e.g. llama or gpt2."}
    )
    config_overrides: str | None = field(
        default=None,
        metadata={"help": "Changes to the default config of --model_type: hidden_size=128,num_hidden_layers=8"},
    )
    config_name: str | None = field(
        default=None, metadata={"help": "Train from scratch with this config: a folder or a name on the Hub."}
    )
    tokenizer_name: str | None = field(
        default=None,
        metadata={"help": "Tokenizer; by default the pretrained model's, and bytes for a model from scratch."},
    )
    gguf_file: str | None = field(default=None, metadata={"help": "GGUF file to load from --model_name_or_path."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Allow code that comes with the model or the tokenizer."}
    )
    scheme: str | None = field(
        default=None,
        metadata={
            "help": "Convert the model to this scheme, e.g. mhc, attnres. 'residual' is the plain model. "
            "By default the model stays as it was loaded."
        },
    )
    scheme_options: str | None = field(
        default=None, metadata={"help": "Options of the scheme: num_streams=4,sinkhorn_iters=20"}
    )
    train_only_connections: bool = field(
        default=False, metadata={"help": "Freeze every parameter that conversion did not add."}
    )
    lora_r: int | None = field(
        default=None,
        metadata={"help": "Freeze the model and train LoRA adapters of this rank, and the connections with them."},
    )
    lora_alpha: int | None = field(
        default=None, metadata={"help": "Scale of the adapters; by default twice the rank."}
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters."})
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Save memory: compute activations again in the backward pass."}
    )

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.model_name_or_path, self.model_type, self.config_name)) != 1:
            raise RecipeError("give one of --model_name_or_path, --model_type and --config_name")
        if self.config_overrides and not self.model_type:
            raise RecipeError("--config_overrides needs --model_type")
        if self.gguf_file and not self.model_name_or_path:
            raise RecipeError("--gguf_file needs --model_name_or_path")
        if self.train_only_connections and self.lora_r:
            raise RecipeError("--train_only_connections excludes --lora_r, which trains the connections too")
        if not self.lora_r and (self.lora_alpha or self.lora_dropout):
            raise RecipeError("--lora_alpha and --lora_dropout need --lora_r")
        _at_least(self, lora_r=1, lora_alpha=1, lora_dropout=0)


@dataclass
class DataArguments:
    """Which text to train on. With neither a data set nor a file: the documentation that CPython carries."""

    dataset_name: str | None = field(default=None, metadata={"help": "Data set: a folder or a name on the Hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    train_file: str | None = field(default=None, metadata={"help": "A .txt, .json, .jsonl or .parquet file."})
    validation_file: str | None = field(default=None, metadata={"help": "A file to evaluate on."})
    validation_split_percentage: float = field(
        default=5, metadata={"help": "Share of the blocks held out, from the end, where there is no validation split."}
    )
    text_column_name: str = field(default="text", metadata={"help": "The column that holds the text."})
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens per block; by default the model's context, but at most 1024."}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Evaluate on the first held-out blocks only, this many."}
    )
    streaming: bool = field(
        default=False,
        metadata={
            "help": "Read the text while training instead of before it; needs --max_train_steps and "
            "--max_eval_samples. Without a validation split the first blocks are held out."
        },
    )
    shuffle_buffer_size: int = field(
        default=10_000, metadata={"help": "With --streaming, shuffle among this many blocks."}
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that tokenise, unless streaming."}
    )
    dataloader_num_workers: int = field(default=0, metadata={"help": "Worker processes of each data loader."})

    def __post_init__(self) -> None:
        _at_least(self, block_size=2, max_eval_samples=1, shuffle_buffer_size=1)
        _at_least(self, preprocessing_num_workers=1, dataloader_num_workers=0)
        if self.streaming and not self.max_eval_samples:
            raise RecipeError("--streaming needs --max_eval_samples: how many blocks to hold out")
        if self.streaming and self.preprocessing_num_workers:
            raise RecipeError("--streaming excludes --preprocessing_num_workers; use --dataloader_num_workers")


@dataclass
class TrainArguments:
    """How to train."""

    output_dir: str = field(metadata={"help": "Folder for the model, checkpoints and the report."})
    config: str | None = field(default=None, metadata={"help": "YAML file of options; those on the command line win."})
    dry_run: bool = field(
        default=False, metadata={"help": "Build the model without memory, print what would be trained, and stop."}
    )
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Blocks per process and pass."})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Blocks per process in evaluation."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Passes per step."})
    learning_rate: float = field(default=5e-5, metadata={"help": "Peak learning rate of AdamW."})
    residual_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate of the connections; by default --learning_rate."}
    )
    weight_decay: float = field(
        default=0.0, metadata={"help": "Weight decay of matrices; biases, norms, gates, queries and scales get none."}
    )
    max_grad_norm: float = field(default=1.0, metadata={"help": "Clip the gradient to this norm; 0 does not clip."})
    lr_scheduler_type: SchedulerType = field(
        default=SchedulerType.LINEAR,
        metadata={"help": "Learning rate schedule: linear, cosine, warmup_stable_decay, ..."},
    )
    num_warmup_steps: int = field(default=0, metadata={"help": "Steps of linear warm-up."})
    num_decay_steps: int | None = field(
        default=None,
        metadata={"help": "Steps of decay of warmup_stable_decay (WSD); by default a tenth of all steps."},
    )
    num_train_epochs: float = field(default=1, metadata={"help": "Passes over the training blocks."})
    max_train_steps: int | None = field(
        default=None, metadata={"help": "Number of steps; takes the place of --num_train_epochs."}
    )
    mixed_precision: str | None = field(
        default=None, metadata={"help": "no, bf16 or fp16; by default what `accelerate launch` says."}
    )
    eval_steps: int = field(default=100, metadata={"help": "Steps between evaluations; also at the start and end."})
    logging_steps: int = field(default=10, metadata={"help": "Steps per point of the training curve."})
    checkpointing_steps: int | None = field(
        default=None, metadata={"help": "Steps between checkpoints to resume from; none by default."}
    )
    checkpoints_total_limit: int = field(default=2, metadata={"help": "How many checkpoints to keep, the newest."})
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": "A checkpoint folder, or `latest`: the newest in --output_dir, if there is one."},
    )
    report_to: str | None = field(
        default=None, metadata={"help": "Trackers: tensorboard, wandb, trackio, or several: tensorboard,wandb"}
    )
    push_to_hub: bool = field(default=False, metadata={"help": "Upload the converted model to the Hub at the end."})
    hub_model_id: str | None = field(
        default=None, metadata={"help": "Repository to push to; by default the name of --output_dir."}
    )
    seed: int = field(default=42, metadata={"help": "Seed of the initial weights and of the order of the blocks."})

    def __post_init__(self) -> None:
        ones = "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps max_train_steps"
        ones += " checkpointing_steps checkpoints_total_limit num_decay_steps eval_steps logging_steps"
        _at_least(self, **dict.fromkeys(ones.split(), 1))
        _at_least(self, learning_rate=0, residual_learning_rate=0, weight_decay=0, max_grad_norm=0)
        _at_least(self, num_warmup_steps=0, num_train_epochs=0)
        if self.mixed_precision not in (None, "no", "bf16", "fp16"):
            raise RecipeError(f"--mixed_precision must be no, bf16 or fp16, not {self.mixed_precision!r}")
        if self.hub_model_id and not self.push_to_hub:
            raise RecipeError("--hub_model_id needs --push_to_hub")
        if self.num_decay_steps and self.lr_scheduler_type != SchedulerType.WARMUP_STABLE_DECAY:
            raise RecipeError("--num_decay_steps needs --lr_scheduler_type warmup_stable_decay")


def parse(description: str | None) -> tuple[ModelArguments, DataArguments, TrainArguments]:
    """The options of the command line, on top of those of the file that `--config` names."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config")
    config = early.parse_known_args()[0].config
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainArguments), description=description)
    *groups, unknown = parser.parse_args_into_dataclasses(
        [*_from_yaml(config), *sys.argv[1:]], return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        raise RecipeError(f"there is no option {unknown[0]}; --help lists them all")
    return tuple(groups)


def _from_yaml(file: str | None) -> list[str]:
    """The options of a YAML file as they would stand on a command line."""
    if file is None:
        return []
    try:
        options = yaml.safe_load(Path(file).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise RecipeError(f"cannot read the options in {file}: {one_line(error)}") from error
    if not isinstance(options, dict) or any(isinstance(value, (dict, list)) for value in options.values()):
        raise RecipeError(f"{file} must hold one option per line: `name: value`")
    return [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]


def _at_least(arguments: object, **bounds: int) -> None:
    for name, bound in bounds.items():
        value = getattr(arguments, name)
        if value is not None and value < bound:
            raise RecipeError(f"--{name} must be at least {bound}, not {value}")
