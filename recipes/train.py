"""Train a causal language model, plain or converted, with Accelerate:

    accelerate launch recipes/train.py --model_type llama --scheme mhc --output_dir runs/mhc

Each step sees the same blocks however many processes share them, so runs of different size can be compared.
"""

import dataclasses
import itertools
import json
import math
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from arguments import DataArguments, ModelArguments, TrainArguments
from common import RecipeError, need, parse_options, run
from data import load_blocks, load_texts
from models import (
    PLAIN,
    added_parameters,
    block_losses,
    check_scheme,
    freeze_all_but,
    load_config,
    load_model,
    load_tokenizer,
)
from report import plot_runs
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

import resswap

PACKAGES = (resswap, torch, transformers, accelerate, datasets)  # whose versions run.json records


def main() -> None:
    """Read the options, build the model, train it, write the results."""
    parser = transformers.HfArgumentParser((ModelArguments, DataArguments, TrainArguments), description=__doc__)
    model_args, data_args, args, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unknown:
        raise RecipeError(f"there is no option {unknown[0]}; --help lists them all")
    need("matplotlib")  # asked before the training, not after it
    accelerator = make_accelerator(args)
    # What can be wrong with the options shows before the weights are made.
    tokenizer = load_tokenizer(model_args)
    config = load_config(model_args, tokenizer)
    converts = check_scheme(config, model_args.scheme, parse_options(model_args.scheme_options))
    if model_args.train_only_connections and not (converts or hasattr(config, "residual")):
        raise RecipeError(f"--train_only_connections needs a --scheme other than {PLAIN}")
    block_size = choose_block_size(data_args.block_size, config)
    train_blocks, eval_blocks = prepare_blocks(accelerator, tokenizer, block_size, data_args)
    blocks_per_pass = args.per_device_train_batch_size * accelerator.num_processes
    blocks_per_step = blocks_per_pass * args.gradient_accumulation_steps
    if len(train_blocks) < blocks_per_pass:
        raise RecipeError(
            f"{len(train_blocks)} blocks to train on do not fill one pass of {blocks_per_pass}; "
            "lower --per_device_train_batch_size or --block_size, or add text"
        )
    passes_per_epoch = len(train_blocks) // blocks_per_pass
    steps = math.ceil(args.num_train_epochs * passes_per_epoch / args.gradient_accumulation_steps)
    total_steps = args.max_train_steps or max(1, steps)

    set_seed(args.seed)
    model = load_model(model_args, config, tokenizer)
    residual = getattr(model.config, "residual", None)
    added = added_parameters(model)
    if model_args.train_only_connections:
        freeze_all_but(model, added)
    if model_args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}

    train_loader = DataLoader(train_blocks, args.per_device_train_batch_size, shuffle=True, drop_last=True)
    eval_loader = DataLoader(eval_blocks, args.per_device_eval_batch_size)
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=args.learning_rate)
    scheduler = transformers.get_scheduler(args.lr_scheduler_type, optimizer, args.num_warmup_steps, total_steps)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    set_seed(args.seed, device_specific=True)  # from here on, dropout differs between processes

    scheme = residual["scheme"] if residual else PLAIN
    parameters, connection_parameters = sum(sizes.values()), sum(sizes[name] for name in added)
    accelerator.print(
        f"{scheme}: {parameters:,} parameters, {connection_parameters:,} of them in connections; {total_steps} steps "
        f"of {blocks_per_step} blocks of {block_size} tokens; {accelerator.num_processes} process(es), "
        f"{accelerator.device.type}, mixed precision: {accelerator.mixed_precision}"
    )
    start = time.perf_counter()
    history, evaluations, seconds = train(
        accelerator, model, optimizer, scheduler, train_loader, eval_loader, total_steps, args
    )
    record = {
        "scheme": scheme,
        "residual": residual,
        "arguments": {k: v for group in (model_args, data_args, args) for k, v in dataclasses.asdict(group).items()},
        "processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "mixed_precision": accelerator.mixed_precision,
        "versions": {
            "python": platform.python_version(),
            **{lib.__name__: lib.__version__ for lib in PACKAGES},
        },
        "data": {"train_blocks": len(train_blocks), "eval_blocks": len(eval_blocks), "block_size": block_size},
        "history": history,
        "evaluations": evaluations,
        "final": {
            "steps": total_steps,
            "eval_loss": evaluations[-1]["eval_loss"],
            "perplexity": evaluations[-1]["perplexity"],
            "parameters": parameters,
            "connection_parameters": connection_parameters,
            "seconds_per_step": seconds,
            "tokens_per_second": blocks_per_step * block_size / seconds,
            "train_seconds": time.perf_counter() - start,
        },
    }
    save(accelerator, model, tokenizer, record, Path(args.output_dir))


def make_accelerator(args: TrainArguments) -> Accelerator:
    """An accelerator for which a step is the same whatever the number of processes; only its main process talks."""
    accelerator = Accelerator(
        # A step is always this many passes, also where an epoch ends.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=args.gradient_accumulation_steps, sync_with_dataloader=False
        ),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
        step_scheduler_with_optimizer=False,  # else the schedule runs ahead, once per process
    )
    if not accelerator.is_main_process:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()
    return accelerator


def prepare_blocks(
    accelerator: Accelerator,
    tokenizer: transformers.PreTrainedTokenizerBase,
    block_size: int,
    args: DataArguments,
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Blocks to train on and blocks to evaluate on."""
    texts = load_texts(args.dataset_name, args.dataset_config_name, args.train_file, args.validation_file)
    with accelerator.main_process_first():  # the others find the blocks in the cache
        train_blocks, eval_blocks = load_blocks(
            texts, tokenizer, block_size, args.validation_split_percentage, args.text_column_name
        )
    if args.max_eval_samples:
        eval_blocks = eval_blocks.select(range(min(args.max_eval_samples, len(eval_blocks))))
    return train_blocks, eval_blocks


def choose_block_size(block_size: int | None, config: transformers.PreTrainedConfig) -> int:
    """The block size that was asked for if the model's context holds it; by default that context, at most 1024."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    if block_size is None:
        return min(1024, context)
    if block_size > context:
        raise RecipeError(f"--block_size {block_size} is longer than the model's context of {context} tokens")
    return block_size


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """What is trained, with weight decay for matrices and none for norms, biases and other vectors."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]


def batches(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    """The batches of one epoch after the other, without end; each epoch has its own order."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def train(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    train_loader: DataLoader,
    eval_loader: DataLoader,
    total_steps: int,
    args: TrainArguments,
) -> tuple[list[dict], list[dict], float]:
    """The training loop. Returns the training curve, the evaluations, and the median seconds per step."""
    stream = batches(train_loader)
    history, evaluations, timings = [], [evaluate(accelerator, model, eval_loader, step=0)], []
    bar = tqdm(total=total_steps, disable=not accelerator.is_main_process, desc="Training", unit="step")
    losses, since = [], time.perf_counter()
    for step in range(1, total_steps + 1):
        for _ in range(args.gradient_accumulation_steps):
            input_ids = next(stream)["input_ids"]
            with accelerator.accumulate(model):
                loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and args.max_grad_norm > 0:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        learning_rate = scheduler.get_last_lr()[0]
        scheduler.step()
        bar.update()

        logs, evaluates = (step % every == 0 or step == total_steps for every in (args.logging_steps, args.eval_steps))
        if logs or evaluates:  # reading the loss waits for the device, so the clock is right as well
            mean = accelerator.reduce(torch.stack(losses).float().mean(), "mean").item()
            steps = len(losses) // args.gradient_accumulation_steps
            timings.append((time.perf_counter() - since) / steps)
            history.append({"step": step, "train_loss": mean, "lr": learning_rate})
            bar.set_postfix(loss=f"{mean:.4f}", eval_loss=f"{evaluations[-1]['eval_loss']:.4f}")
        if evaluates:
            evaluations.append(evaluate(accelerator, model, eval_loader, step))
            bar.set_postfix(loss=f"{mean:.4f}", eval_loss=f"{evaluations[-1]['eval_loss']:.4f}")
        if logs or evaluates:
            losses, since = [], time.perf_counter()
    bar.close()
    # The first steps warm caches up; they count only where there is nothing else.
    return history, evaluations, statistics.median(timings[1:] or timings)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader, step: int) -> dict[str, float]:
    """Loss and perplexity over the held-out blocks; each block counts once, however many processes there are."""
    model.eval()
    losses = [accelerator.gather_for_metrics(block_losses(model, batch["input_ids"])) for batch in loader]
    model.train()
    loss = torch.cat(losses).mean().item()
    return {"step": step, "eval_loss": loss, "perplexity": math.exp(min(loss, 700))}


def save(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: transformers.PreTrainedTokenizerBase,
    record: dict[str, Any],
    folder: Path,
) -> None:
    """Write the model, the tokenizer, run.json and curves.png."""
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)  # gathers what FSDP or DeepSpeed sharded
    if not accelerator.is_main_process:
        return
    accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)
    (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n")
    plot_runs({record["scheme"]: record}, folder / "curves.png")
    final = record["final"]
    print(
        f"eval loss {final['eval_loss']:.4f}, perplexity {final['perplexity']:.2f}, "
        f"{1000 * final['seconds_per_step']:.0f} ms per step; saved in {folder}"
    )


if __name__ == "__main__":
    run(main)
