"""Re-run the argument for residual connections, and for what came after them, on a CPU: one figure and two tables.

    python recipes/depth_study.py --output_dir runs/depth_study

Small byte-level LLaMAs are trained on the text that comes with Python: (a) with and without a shortcut at several
depths; at one depth with other schemes too, to see (b) gradients, (c) the stream, (e) the product of the mixing
matrices. (d) shows how fast Sinkhorn-Knopp comes to doubly stochastic matrices.
"""

import itertools
import json
import math
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from accelerate.utils import set_seed
from arguments import ModelArguments
from common import RecipeError, make_folder, need, run
from data import load_blocks, load_texts
from datasets import Dataset
from depth_figure import draw
from models import block_losses, load_config, load_model, load_tokenizer
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

import resswap
from resswap.diagnostics import Measures
from resswap.ops import sinkhorn

SCHEMES = ("none", "post_norm", "residual", "hc", "mhc", "attnres")  # what is compared at one depth
LOGIT_SIZES = (1, 2, 4, 8)
SINKHORN_ROUNDS = 30
NUM_MATRICES = 2000
LOG_POINTS = 30  # of each training curve


@dataclass
class DepthArguments:
    """How deep, how large, how long."""

    output_dir: str = field(metadata={"help": "Folder for depth_study.json and depth_study.png."})
    layers: str = field(default="2,6,24,48", metadata={"help": "Numbers of layers, with and without a shortcut."})
    compare_layers: int | None = field(
        default=None, metadata={"help": "Which of them to train with every scheme; by default the middle one."}
    )
    hidden_size: int = field(default=48, metadata={"help": "Hidden size, a multiple of 16."})
    max_train_steps: int = field(default=180, metadata={"help": "Steps of each training."})
    batch_size: int = field(default=4, metadata={"help": "Blocks per step."})
    block_size: int = field(default=64, metadata={"help": "Tokens (bytes) per block."})
    learning_rate: float = field(default=3e-3, metadata={"help": "Peak learning rate of AdamW, for every model."})
    max_eval_samples: int = field(default=64, metadata={"help": "Held-out blocks to evaluate on."})
    noise: float = field(
        default=0.1,
        metadata={"help": "Size of the normal noise on the connections' parameters in the second panel of (e)."},
    )
    seed: int = field(default=42, metadata={"help": "Seed of the weights, the order of the blocks and the noise."})

    def __post_init__(self) -> None:
        try:
            self.depths = sorted({int(number) for number in self.layers.split(",")})
        except ValueError as error:
            raise RecipeError(f"--layers must be whole numbers with commas between, not {self.layers!r}") from error
        if self.depths[0] < 1:
            raise RecipeError(f"--layers must be at least 1, not {self.depths[0]}")
        if self.compare_layers is None:
            self.compare_layers = self.depths[len(self.depths) // 2]
        if self.compare_layers not in self.depths:
            raise RecipeError(f"--compare_layers {self.compare_layers} is none of --layers {self.layers}")
        if self.hidden_size < 16 or self.hidden_size % 16:
            raise RecipeError(f"--hidden_size must be a multiple of 16, not {self.hidden_size}")
        for name, least in {"max_train_steps": 1, "batch_size": 1, "max_eval_samples": 1, "block_size": 2}.items():
            if getattr(self, name) < least:
                raise RecipeError(f"--{name} must be at least {least}, not {getattr(self, name)}")


def main() -> None:
    """Train, measure, write depth_study.json, print the tables, draw the figure."""
    parser = transformers.HfArgumentParser(DepthArguments, description=__doc__)
    args, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unknown:
        raise RecipeError(f"there is no option {unknown[0]}; --help lists them all")
    need("matplotlib")  # asked before the training, not after it
    folder = make_folder(args.output_dir)
    tokenizer = load_tokenizer(ModelArguments(model_type="llama"))
    train_blocks, eval_blocks = load_blocks(load_texts(), tokenizer, args.block_size)
    if len(train_blocks) < args.batch_size:
        raise RecipeError(f"the text gives {len(train_blocks)} blocks, fewer than --batch_size {args.batch_size}")
    eval_ids = eval_blocks[: args.max_eval_samples]["input_ids"]

    runs, sinkhorn_rounds = {}, {name: distances(logits) for name, logits in random_logits(args.seed).items()}
    start = time.process_time()
    for layers, scheme in list_runs(args):
        runs[f"{scheme}-{layers}"] = study(scheme, layers, tokenizer, train_blocks, eval_ids, args)
        record = {
            "arguments": asdict(args) | {"depths": args.depths},
            "versions": {"python": platform.python_version(), "torch": torch.__version__}
            | {"resswap": resswap.__version__, "transformers": transformers.__version__},
            "unigram_loss": unigram_loss(train_blocks, eval_ids, len(tokenizer)),
            "runs": runs,
            "sinkhorn": sinkhorn_rounds
            | {f"trained {r['scheme']}": r["sinkhorn"] for r in runs.values() if "sinkhorn" in r},
            "cpu_seconds": time.process_time() - start,
        }
        (folder / "depth_study.json").write_text(json.dumps(record, allow_nan=False))  # what is done is not lost
    print_tables(record)
    draw(record, folder / "depth_study.png")
    print(f"{record['cpu_seconds']:.0f} s of CPU; depth_study.json and depth_study.png are in {folder}")


def list_runs(args: DepthArguments) -> Iterator[tuple[int, str]]:
    """Layers and scheme of each model to train."""
    for layers in args.depths:
        for scheme in SCHEMES if layers == args.compare_layers else ("none", "residual"):
            yield layers, scheme


def study(
    scheme: str,
    layers: int,
    tokenizer: transformers.PreTrainedTokenizerBase,
    blocks: Dataset,
    eval_ids: torch.Tensor,
    args: DepthArguments,
) -> dict[str, Any]:
    """Train one model; what was seen in it before and after."""
    set_seed(args.seed)  # all models of a depth start with the same weights and see the same blocks
    model = new_model(scheme, layers, tokenizer, args)
    sample = {"input_ids": eval_ids[: args.batch_size], "labels": eval_ids[: args.batch_size]}
    initial = resswap.inspect(model, sample).to_dict()
    start = time.process_time()
    history = train(model, blocks, f"{scheme}, {layers} layers", args)
    found = {
        "scheme": scheme,
        "layers": layers,
        "cpu_seconds": time.process_time() - start,
        "history": history,
        "eval_loss": held_out_loss(model, eval_ids, args.batch_size),
        "initial": initial,
    }
    report = resswap.inspect(model, sample)
    found |= {"trained": report.to_dict(), "shares": [finite(share) for share in shares(report.measures)]}
    if scheme == "mhc":
        n = report.options["num_streams"]
        logits = [c.base.detach()[-n * n :].unflatten(0, (n, n)) for c in resswap.connections(model).values()]
        found["sinkhorn"] = distances(torch.stack(logits))  # of the part that does not depend on the token
    if scheme in ("hc", "mhc"):
        add_noise(model, args.noise)
        found["disturbed"] = resswap.inspect(model, sample).to_dict()
    return found


def new_model(
    scheme: str, layers: int, tokenizer: transformers.PreTrainedTokenizerBase, args: DepthArguments
) -> transformers.PreTrainedModel:
    """A random LLaMA, converted. Its initial weights keep the size of what they multiply, as at LLaMA's own width,
    where 0.02 is about 1/√hidden_size: otherwise a small model without a shortcut would fade away for that alone."""
    size = args.hidden_size
    sizes = f"hidden_size={size},intermediate_size={8 * size // 3 // 8 * 8},num_hidden_layers={layers}"
    heads = f"num_attention_heads={size // 16},num_key_value_heads={size // 16}"
    other = f"max_position_embeddings={args.block_size},initializer_range={size**-0.5}"
    source = ModelArguments(model_type="llama", config_overrides=f"{sizes},{heads},{other}", scheme=scheme)
    return load_model(source, load_config(source, tokenizer), tokenizer)


def train(model: torch.nn.Module, blocks: Dataset, name: str, args: DepthArguments) -> list[dict[str, Any]]:
    """AdamW, a tenth of warm-up, then cosine; returns the mean loss of each stretch of steps."""
    optimizer = torch.optim.AdamW(resswap.param_groups(model, args.learning_rate, weight_decay=0.1))
    steps = args.max_train_steps
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    loader = DataLoader(blocks, args.batch_size, shuffle=True, drop_last=True)
    stream = itertools.chain.from_iterable(itertools.repeat(loader))
    history, losses = [], []
    model.train()
    with tqdm(itertools.islice(stream, steps), total=steps, desc=name, unit="step") as bar:
        for step, batch in enumerate(bar, start=1):
            loss = block_losses(model, batch["input_ids"]).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
            if step % max(1, steps // LOG_POINTS) == 0 or step == steps:
                history.append({"step": step, "train_loss": finite(sum(losses) / len(losses))})
                bar.set_postfix(loss=f"{sum(losses) / len(losses):.3f}")
                losses = []
    model.eval()
    return history


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, input_ids: torch.Tensor, batch_size: int) -> float | None:
    """The mean loss over the held-out blocks; None if it is not finite."""
    return finite(torch.cat([block_losses(model, ids) for ids in input_ids.split(batch_size)]).mean().item())


def unigram_loss(blocks: Dataset, eval_ids: torch.Tensor, vocabulary: int) -> float:
    """The held-out loss of a model that knows how frequent each byte is, and nothing of what came before it."""
    counts = 1 + torch.bincount(blocks[:]["input_ids"].flatten(), minlength=vocabulary)
    return -(counts / counts.sum()).log()[eval_ids[:, 1:]].mean().item()


def shares(measures: Sequence[Measures]) -> list[float]:
    """How much of what the next branch (or the read-out) reads was written by each branch.

    The weight with which the branch's output gets there, by mean weights over tokens, times its size, by the size of
    all that is read. Without a shortcut or with a norm in between, there is no such weight, and the list is empty.
    """
    found = []
    for own, after in itertools.pairwise(measures):
        if own.write is not None and after.read is not None:  # streams: written to each, read from each
            weight = sum(w * r for w, r in zip(own.write, after.read, strict=True))
        elif after.read is not None and len(after.read) > 1:  # sources: read as k Σ α v, and this one is the last
            weight = len(after.read) * after.read[-1]
        else:
            return []
        found.append(abs(weight) * own.output_rms / after.input_rms)
    return found


@torch.no_grad()
def add_noise(model: torch.nn.Module, size: float) -> None:
    """Add normal noise to every parameter of the connections."""
    for parameter in resswap.added_parameters(model).values():
        parameter += size * torch.randn_like(parameter)


def random_logits(seed: int) -> dict[str, torch.Tensor]:
    """Normal logits `[matrices, n, n]` of several sizes."""
    normal = torch.randn(NUM_MATRICES, 4, 4, generator=torch.Generator().manual_seed(seed))
    return {f"random, σ = {size}": size * normal for size in LOGIT_SIZES}


def distances(logits: torch.Tensor) -> list[float | None]:
    """Mean distance from doubly stochastic of the matrices `[..., n, n]` after 0, 1, 2, ... rounds, in float64."""
    return [finite(distance(logits.double(), rounds)) for rounds in range(SINKHORN_ROUNDS + 1)]


def distance(logits: torch.Tensor, rounds: int) -> float:
    """How far a row or column sum is from 1 at most, mean over matrices `[..., n, n]`; 0 rounds is a softmax."""
    matrices = sinkhorn(logits, rounds) if rounds else logits.softmax(-1)
    sums = torch.cat([matrices.sum(-1), matrices.sum(-2)], dim=-1)
    return (sums - 1).abs().amax(-1).mean().item()


def finite(value: float) -> float | None:
    """The number, or None for what JSON cannot hold."""
    return value if math.isfinite(value) else None


def print_tables(record: dict[str, Any]) -> None:
    """One row per model; one row per kind of logits."""
    console = need("rich.console").Console()
    if not console.is_terminal:
        console.width = 150  # a file or a pipe has no width of its own
    table = need("rich.table").Table(title=f"Models (a model that counts bytes: {record['unigram_loss']:.3f})")
    titles = ("held-out loss", "gradient, first / last,\nbefore", "gradient, first / last,\nafter")
    titles += ("stream, first / last,\nafter", "share, first / last,\nafter", "gain → / ←,\nafter")
    titles += ("gain → / ←,\nwith noise", "CPU s")
    for title in ("scheme", "layers", *titles):
        table.add_column(title, justify="left" if title == "scheme" else "right")
    for found in record["runs"].values():
        before, after = found["initial"]["summary"], found["trained"]["summary"]
        table.add_row(
            found["scheme"],
            str(found["layers"]),
            "–" if found["eval_loss"] is None else f"{found['eval_loss']:.3f}",
            pair(before.get("gradient_first"), before.get("gradient_last")),
            pair(after.get("gradient_first"), after.get("gradient_last")),
            pair(after.get("stream_rms_first"), after.get("stream_rms_last")),
            pair(*(found["shares"] or [None])[:: max(1, len(found["shares"]) - 1)]),
            pair(after.get("gain_forward"), after.get("gain_backward")),
            pair(
                *(found.get("disturbed", {}).get("summary", {}).get(f"gain_{way}") for way in ("forward", "backward"))
            ),
            f"{found['cpu_seconds']:.0f}",
        )
    console.print(table)
    table = need("rich.table").Table(title="Mean distance from doubly stochastic")
    for title in ("logits", "0 rounds", "1", "5", "20", "taken away by 20 rounds"):
        table.add_column(title, justify="left" if title == "logits" else "right")
    for name, values in record["sinkhorn"].items():
        shown = [values[rounds] for rounds in (0, 1, 5, 20)]
        taken = "–" if None in shown else f"{100 * (1 - shown[-1] / shown[0]):.4g} %"
        table.add_row(name, *("–" if value is None else f"{value:.2g}" for value in shown), taken)
    console.print(table)


def pair(*values: float | str | None) -> str:
    """The numbers with a stroke between."""
    return " / ".join("–" if value is None else f"{float(value):.2g}" for value in values)


if __name__ == "__main__":
    run(main)
