"""The training loop of train.py: batches in an order that can be taken up anywhere, steps, evaluations."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from arguments import TrainArguments
from checkpoints import Progress
from common import RecipeError
from models import block_losses
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

import resswap
from resswap import diagnostics


def batches(loader: DataLoader, progress: Progress) -> Iterator[dict[str, torch.Tensor]]:
    """The batches from `progress` on, one epoch after the other, without end; each epoch has its own order.

    No random numbers are drawn from the global generator: where a run resumes must not change what dropout draws.
    """
    while True:
        loader.set_epoch(progress.epoch)
        rest = iter(skip_first_batches(loader, progress.batch) if progress.batch else loader)
        while True:
            with torch.random.fork_rng(devices=[]):  # a loader seeds its workers
                batch = next(rest, None)
            if batch is None:
                break
            progress.batch += 1
            yield batch
        if progress.batch == 0:
            raise RecipeError("the text does not fill one pass; lower --per_device_train_batch_size or add text")
        progress.epoch, progress.batch = progress.epoch + 1, 0


def train(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    train_loader: DataLoader,
    eval_loader: DataLoader,
    progress: Progress,
    checkpoint: Callable[[], None],
    total_steps: int,
    tokens_per_step: int,
    args: TrainArguments,
) -> None:
    """Train from where `progress` stands up to `total_steps`, and note in it what is measured on the way."""
    stream = batches(train_loader, progress)
    if not progress.evaluations:
        progress.evaluations.append(evaluate(accelerator, model, eval_loader, step=0))
        accelerator.log({"eval/loss": progress.evaluations[-1]["eval_loss"]}, step=0)
    bar = tqdm(
        total=total_steps,
        initial=progress.step,
        disable=not accelerator.is_main_process,
        desc="Training",
        unit="step",
    )
    begin = time.perf_counter() - progress.seconds
    since, since_step = time.perf_counter(), progress.step
    while progress.step < total_steps:
        for _ in range(args.gradient_accumulation_steps):
            input_ids = next(stream)["input_ids"]
            with accelerator.accumulate(model):
                loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and args.max_grad_norm > 0:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            progress.losses.append(loss.detach())
        learning_rate = scheduler.get_last_lr()[0]
        scheduler.step()
        progress.step += 1
        bar.update()

        step, last = progress.step, progress.step == total_steps
        evaluates = step % args.eval_steps == 0 or last
        if evaluates or step % args.logging_steps == 0:  # reading the loss waits for the device: the clock is right
            mean = accelerator.reduce(torch.stack(progress.losses).float().mean(), "mean").item()
            progress.timings.append((time.perf_counter() - since) / (step - since_step))
            point = {"step": step, "train_loss": mean, "lr": learning_rate}
            if args.max_grad_norm > 0 and norm is not None:
                point["grad_norm"] = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            progress.history.append(point)
            measured = {f"train/{name}": value for name, value in point.items() if name != "step"}
            measured["train/tokens_per_second"] = tokens_per_step / progress.timings[-1]
            if evaluates:
                progress.evaluations.append(evaluate(accelerator, model, eval_loader, step))
                measured["eval/loss"] = progress.evaluations[-1]["eval_loss"]
                if accelerator.trackers:
                    measured |= health(accelerator, model, input_ids)
            accelerator.log(measured, step=step)
            bar.set_postfix(loss=f"{mean:.4f}", eval_loss=f"{progress.evaluations[-1]['eval_loss']:.4f}")
            progress.losses = []
            since, since_step = time.perf_counter(), step
        if args.checkpointing_steps and step % args.checkpointing_steps == 0:
            progress.seconds = time.perf_counter() - begin
            paused = time.perf_counter()
            checkpoint()
            since += time.perf_counter() - paused  # writing is not training
    bar.close()
    progress.seconds = time.perf_counter() - begin


def health(accelerator: Accelerator, model: torch.nn.Module, input_ids: torch.Tensor) -> dict[str, float]:
    """What the scheme does on one batch; nothing if the model is not converted."""
    if not resswap.connections(model):
        return {}
    model.eval()
    with accelerator.autocast():
        values = diagnostics.health(model, input_ids=input_ids, use_cache=False)
    model.train()
    return {f"residual/{name}": value for name, value in values.items()}


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader, step: int) -> dict[str, float]:
    """Loss and perplexity over the held-out blocks; each block counts once, however many processes there are."""
    model.eval()
    losses = [accelerator.gather_for_metrics(block_losses(model, batch["input_ids"])) for batch in loader]
    model.train()
    loss = torch.cat(losses).mean().item()
    return {"step": step, "eval_loss": loss, "perplexity": math.exp(min(loss, 700))}
