"""The options of train.py, named as in transformers' run_clm.py and run_clm_no_trainer.py."""

from dataclasses import dataclass, field

from common import RecipeError
from transformers import SchedulerType


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

    def __post_init__(self) -> None:
        _at_least(self, block_size=2, max_eval_samples=1)


@dataclass
class TrainArguments:
    """How to train."""

    output_dir: str = field(metadata={"help": "Folder for the model, run.json and curves.png."})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Blocks per process and pass."})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Blocks per process in evaluation."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Passes per step."})
    learning_rate: float = field(default=5e-5, metadata={"help": "Peak learning rate of AdamW."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of matrices; vectors get none."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Clip the gradient to this norm; 0 does not clip."})
    lr_scheduler_type: SchedulerType = field(
        default=SchedulerType.LINEAR, metadata={"help": "Learning rate schedule."}
    )
    num_warmup_steps: int = field(default=0, metadata={"help": "Steps of linear warm-up."})
    num_train_epochs: float = field(default=1, metadata={"help": "Passes over the training blocks."})
    max_train_steps: int | None = field(
        default=None, metadata={"help": "Number of steps; takes the place of --num_train_epochs."}
    )
    eval_steps: int = field(default=100, metadata={"help": "Steps between evaluations; also at the start and end."})
    logging_steps: int = field(default=10, metadata={"help": "Steps per point of the training curve."})
    seed: int = field(default=42, metadata={"help": "Seed of the initial weights and of the order of the blocks."})

    def __post_init__(self) -> None:
        ones = "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps max_train_steps"
        _at_least(self, **dict.fromkeys(ones.split(), 1), eval_steps=1, logging_steps=1)
        _at_least(self, learning_rate=0, weight_decay=0, max_grad_norm=0, num_warmup_steps=0, num_train_epochs=0)


def _at_least(arguments: object, **bounds: int) -> None:
    for name, bound in bounds.items():
        value = getattr(arguments, name)
        if value is not None and value < bound:
            raise RecipeError(f"--{name} must be at least {bound}, not {value}")
