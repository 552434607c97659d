"""Train a causal language model, plain or converted, with Accelerate:

    accelerate launch recipes/train.py --model_type llama --scheme mhc --output_dir runs/mhc

Each step sees the same blocks however many processes share them, so runs of different size can be compared.
"""

import dataclasses
import math
import platform
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from arguments import DataArguments, ModelArguments, TrainArguments, parse
from checkpoints import Progress, check_plan, find_checkpoint, save_checkpoint
from common import RecipeError, make_folder, need, parse_options, run
from data import load_blocks, load_texts
from loop import train
from models import PLAIN, add_lora, check_scheme, load_config, load_model, load_tokenizer
from results import save
from torch.utils.data import DataLoader

import resswap

PACKAGES = (resswap, torch, transformers, accelerate, datasets)  # whose versions run.json records


def main() -> None:
    """Read the options, build the model, train it, write the results."""
    model_args, data_args, args = parse(__doc__)
    need("matplotlib")  # asked before the training, not after it
    accelerator = make_accelerator(args)
    # What can be wrong with the options shows before the weights are made.
    tokenizer = load_tokenizer(model_args)
    config = load_config(model_args, tokenizer)
    converts = check_scheme(config, model_args.scheme, parse_options(model_args.scheme_options))
    if not (converts or hasattr(config, "residual")):
        for option in ("train_only_connections", "residual_learning_rate"):
            if getattr(model_args, option, None) or getattr(args, option, None) is not None:
                raise RecipeError(f"--{option} needs a --scheme other than {PLAIN}")
    if args.push_to_hub and (model_args.lora_r or not (converts or hasattr(config, "residual"))):
        raise RecipeError("--push_to_hub uploads a converted model: give a --scheme, and no --lora_r")
    block_size = choose_block_size(data_args.block_size, config)
    blocks_per_pass = args.per_device_train_batch_size * accelerator.num_processes
    blocks_per_step = blocks_per_pass * args.gradient_accumulation_steps
    if data_args.streaming and not args.max_train_steps:
        raise RecipeError("--streaming needs --max_train_steps: the length of a stream is not known")
    if args.dry_run:
        model = prepare_model(model_args, config, tokenizer, meta=True)
        describe(accelerator, model, args.max_train_steps, blocks_per_step, block_size)
        return

    checkpoint = find_checkpoint(args.resume_from_checkpoint, Path(args.output_dir))
    train_blocks, eval_blocks = prepare_blocks(accelerator, tokenizer, block_size, data_args)
    total_steps = args.max_train_steps or count_steps(len(train_blocks), blocks_per_pass, args)
    set_seed(args.seed)
    model = prepare_model(model_args, config, tokenizer)
    connection_parameters = sum(parameter.numel() for parameter in connection_copies(model).values())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained_parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    train_loader = make_loader(train_blocks, args.per_device_train_batch_size, data_args, args.seed, training=True)
    eval_loader = make_loader(eval_blocks, args.per_device_eval_batch_size, data_args, args.seed, training=False)
    optimizer = torch.optim.AdamW(
        resswap.param_groups(model, args.learning_rate, args.weight_decay, args.residual_learning_rate)
    )
    scheduler = make_scheduler(optimizer, total_steps, args)
    folder = make_folder(args.output_dir)
    residual = getattr(model.config, "residual", None)
    describe(accelerator, model, total_steps, blocks_per_step, block_size)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    progress = Progress(accelerator=accelerator)
    accelerator.register_for_checkpointing(progress)
    set_seed(args.seed, device_specific=True)  # from here on, dropout differs between processes

    arguments = {k: v for group in (model_args, data_args, args) for k, v in dataclasses.asdict(group).items()}
    plan = {name: arguments[name] for name in FIXED} | {"processes": accelerator.num_processes}
    plan |= {"block_size": block_size, "residual": residual}
    if data_args.streaming:  # each worker shuffles in its own way
        plan["dataloader_num_workers"] = data_args.dataloader_num_workers
    if checkpoint is not None:
        check_plan(checkpoint, plan)
        accelerator.load_state(str(checkpoint))
        accelerator.print(f"resumed {checkpoint} at step {progress.step}")
    if args.report_to:
        accelerator.init_trackers("resswap", config={k: v for k, v in arguments.items() if v is not None})
    train(
        accelerator,
        model,
        optimizer,
        scheduler,
        train_loader,
        eval_loader,
        progress,
        partial(save_checkpoint, accelerator, progress, plan, folder, args.checkpoints_total_limit),
        total_steps,
        blocks_per_step * block_size,
        args,
    )
    # The first steps warm caches up; they count only where there is nothing else.
    seconds = statistics.median(progress.timings[1:] or progress.timings)
    record = {
        "scheme": residual["scheme"] if residual else PLAIN,
        "residual": residual,
        "arguments": arguments,
        "processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "mixed_precision": accelerator.mixed_precision,
        "versions": {
            "python": platform.python_version(),
            **{lib.__name__: lib.__version__ for lib in PACKAGES},
        },
        "data": {
            "train_blocks": None if data_args.streaming else len(train_blocks),
            "eval_blocks": len(eval_blocks),
            "block_size": block_size,
        },
        "history": progress.history,
        "evaluations": progress.evaluations,
        "final": {
            "steps": progress.step,
            "blocks_per_step": blocks_per_step,
            "eval_loss": progress.evaluations[-1]["eval_loss"],
            "perplexity": progress.evaluations[-1]["perplexity"],
            "parameters": parameters,
            "trained_parameters": trained_parameters,
            "connection_parameters": connection_parameters,
            "seconds_per_step": seconds,
            "tokens_per_second": blocks_per_step * block_size / seconds,
            "train_seconds": progress.seconds,
        },
    }
    save(accelerator, model, tokenizer, record, folder)
    accelerator.end_training()


# A run that resumes must have these as they were, or it would not go on as it began.
FIXED = (
    "dataset_name dataset_config_name train_file text_column_name streaming shuffle_buffer_size max_eval_samples "
    "per_device_train_batch_size gradient_accumulation_steps train_only_connections lora_r seed"
).split()


def make_accelerator(args: TrainArguments) -> Accelerator:
    """An accelerator for which a step is the same whatever the number of processes; only its main process talks."""
    trackers = [name.strip() for name in (args.report_to or "").split(",") if name.strip()]
    for name in trackers:
        need(name, extra="trackers")  # Accelerate would go on without
    try:
        accelerator = Accelerator(
            mixed_precision=args.mixed_precision,
            log_with=trackers or None,
            project_dir=args.output_dir,
            # A step is always this many passes, also where an epoch ends.
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=args.gradient_accumulation_steps, sync_with_dataloader=False
            ),
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
            step_scheduler_with_optimizer=False,  # else the schedule runs ahead, once per process
        )
    except ValueError as error:  # such as fp16 on a CPU
        raise RecipeError(str(error)) from error
    if not accelerator.is_main_process:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()
    return accelerator


def prepare_model(
    args: ModelArguments,
    config: transformers.PreTrainedConfig,
    tokenizer: transformers.PreTrainedTokenizerBase,
    meta: bool = False,
) -> torch.nn.Module:
    """The model as it will be trained: converted, with adapters, frozen, checkpointed as the options say."""
    model = load_model(args, config, tokenizer, meta)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if args.train_only_connections:
        resswap.freeze_base(model)
    return add_lora(model, args) if args.lora_r else model


def connection_copies(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """What conversion added, once: PEFT keeps the originals beside the copies that it trains."""
    return {k: v for k, v in resswap.added_parameters(model).items() if ".original_module." not in k}


def describe(
    accelerator: Accelerator, model: torch.nn.Module, steps: int | None, blocks: int, block_size: int
) -> None:
    """Print what is trained, on one line."""
    residual = getattr(model.config, "residual", None)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    accelerator.print(
        f"{residual['scheme'] if residual else PLAIN}: {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{sum(p.numel() for p in connection_copies(model).values()):,} of them in connections, {trained:,} trained; "
        f"{steps or '?'} steps of {blocks} blocks of {block_size} tokens; {accelerator.num_processes} process(es), "
        f"{accelerator.device.type}, mixed precision: {accelerator.mixed_precision}"
    )


def prepare_blocks(
    accelerator: Accelerator,
    tokenizer: transformers.PreTrainedTokenizerBase,
    block_size: int,
    args: DataArguments,
) -> tuple[datasets.Dataset | datasets.IterableDataset, datasets.Dataset]:
    """Blocks to train on and blocks to evaluate on."""
    texts = load_texts(
        args.dataset_name, args.dataset_config_name, args.train_file, args.validation_file, args.streaming
    )
    with accelerator.main_process_first():  # the others find the blocks in the cache
        return load_blocks(
            texts,
            tokenizer,
            block_size,
            args.validation_split_percentage,
            args.text_column_name,
            args.preprocessing_num_workers,
            args.max_eval_samples,
        )


def make_loader(
    blocks: datasets.Dataset | datasets.IterableDataset,
    batch_size: int,
    args: DataArguments,
    seed: int,
    training: bool,
) -> DataLoader:
    """Batches, in training shuffled by the seed and all full."""
    streams = isinstance(blocks, datasets.IterableDataset)
    if training and streams:
        blocks = blocks.shuffle(seed=seed, buffer_size=args.shuffle_buffer_size)
    return DataLoader(
        blocks,
        batch_size,
        shuffle=training and not streams,
        drop_last=training,
        num_workers=args.dataloader_num_workers,
    )


def make_scheduler(optimizer: torch.optim.Optimizer, total_steps: int, args: TrainArguments) -> Any:
    """The learning rate schedule; it multiplies each group's own rate."""
    special = {}
    if args.lr_scheduler_type == transformers.SchedulerType.WARMUP_STABLE_DECAY:
        decay = args.num_decay_steps or max(1, total_steps // 10)
        if args.num_warmup_steps + decay > total_steps:
            raise RecipeError(
                f"{args.num_warmup_steps} steps of warm-up and {decay} of decay are more than {total_steps} steps"
            )
        special["num_decay_steps"] = decay
    return transformers.get_scheduler(
        args.lr_scheduler_type, optimizer, args.num_warmup_steps, total_steps, scheduler_specific_kwargs=special
    )


def count_steps(blocks: int, blocks_per_pass: int, args: TrainArguments) -> int:
    """How many steps `--num_train_epochs` are."""
    if blocks < blocks_per_pass:
        raise RecipeError(
            f"{blocks} blocks to train on do not fill one pass of {blocks_per_pass}; "
            "lower --per_device_train_batch_size or --block_size, or add text"
        )
    return max(1, math.ceil(args.num_train_epochs * (blocks // blocks_per_pass) / args.gradient_accumulation_steps))


def choose_block_size(block_size: int | None, config: transformers.PreTrainedConfig) -> int:
    """The block size that was asked for if the model's context holds it; by default that context, at most 1024."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    if block_size is None:
        return min(1024, context)
    if block_size > context:
        raise RecipeError(f"--block_size {block_size} is longer than the model's context of {context} tokens")
    return block_size


if __name__ == "__main__":
    run(main)
