"""Compare the residual schemes on one small model, from scratch: at equal steps, and at equal training time.

    python recipes/compare.py --output_dir runs/compare

Each scheme gets its own learning rate, from a short sweep. Finished runs are kept in --output_dir, so that the same
command goes on where it was stopped.
"""

import dataclasses
import json
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from arguments import DataArguments, ModelArguments, TrainArguments
from checkpoints import Progress
from common import RecipeError, make_folder, need, run
from compare_costs import make_optimizer, measured_costs
from compare_report import Study, draw, print_tables, summarise, write_markdown
from data import load_blocks, load_texts
from datasets import Dataset
from loop import train
from models import PLAIN, check_scheme, load_config, load_model, load_tokenizer
from train import PACKAGES, choose_block_size, make_accelerator, make_loader, make_scheduler
from transformers import HfArgumentParser, SchedulerType

import resswap

SWEEP_SEED = 0  # the seed of the sweeps only


@dataclass
class CompareArguments:
    """What to compare, and how long."""

    output_dir: str = field(metadata={"help": "Folder for the runs, the tables and the figure."})
    model_type: str = field(default="llama", metadata={"help": "The kind of model, from scratch, on bytes."})
    config_overrides: str = field(
        default="hidden_size=64,intermediate_size=176,num_hidden_layers=6,num_attention_heads=4,initializer_range=0.1",
        metadata={"help": "Changes to its default config."},
    )
    schemes: list[str] = field(
        default_factory=lambda: list(resswap.available_schemes()),
        metadata={"help": "Schemes to compare with the plain model, which always takes part; all by default."},
    )
    seeds: list[int] = field(
        default_factory=lambda: [1, 2, 3],
        metadata={"help": "Seeds of weights and data order. Each scheme starts from the same weights."},
    )
    learning_rates: list[float] = field(
        default_factory=lambda: [3e-3, 1e-2, 3e-2],
        metadata={"help": "Peak rates of the sweep. Each scheme takes the one with the lowest loss on tuning blocks."},
    )
    max_train_steps: int = field(default=300, metadata={"help": "Steps of a run at equal steps."})
    sweep_steps: int = field(default=100, metadata={"help": "Steps of a run of the sweep."})
    deep_config_overrides: str = field(
        default="hidden_size=32,intermediate_size=88,num_hidden_layers=24,num_attention_heads=4,initializer_range=0.1",
        metadata={"help": "The deep and narrow model on which `none` is compared with the plain one."},
    )
    deep_steps: int = field(default=200, metadata={"help": "Steps of its runs; 0 leaves this part out."})
    timing_rounds: int = field(default=9, metadata={"help": "Rounds in which a step of each scheme is timed."})
    train_file: str | None = field(
        default=None, metadata={"help": "Text to train on; by default what CPython carries as documentation."}
    )
    validation_split_percentage: float = field(
        default=5, metadata={"help": "Percentage held out: every other block chooses the rates, the rest is reported."}
    )
    block_size: int = field(default=64, metadata={"help": "Tokens per block."})
    batch_size: int = field(default=4, metadata={"help": "Blocks per step."})
    eval_steps: int = field(default=50, metadata={"help": "Steps between points of the curves."})

    def __post_init__(self) -> None:
        bounds = {"deep_steps": 0, "block_size": 2}
        names = "max_train_steps sweep_steps timing_rounds batch_size eval_steps"
        for name, bound in {**dict.fromkeys(names.split(), 1), **bounds}.items():
            if getattr(self, name) < bound:
                raise RecipeError(f"--{name} must be at least {bound}, not {getattr(self, name)}")
        if SWEEP_SEED in self.seeds:
            raise RecipeError(f"--seeds must not hold {SWEEP_SEED}, the seed of the sweeps")
        if min(self.learning_rates) <= 0:
            raise RecipeError(f"--learning_rates must be above 0, not {min(self.learning_rates)}")
        self.schemes = list(dict.fromkeys([PLAIN, *self.schemes]))
        self.seeds = list(dict.fromkeys(self.seeds))
        self.learning_rates = sorted(set(self.learning_rates))


# Runs of other schemes, seeds, rates and lengths can be added to a folder; what else a run depends on is the folder's.
FIXED = "model_type config_overrides deep_config_overrides train_file validation_split_percentage block_size".split()
FIXED += "batch_size eval_steps".split()


@dataclass(frozen=True)
class Run:
    """One training; `split` names the held-out blocks that it is measured on: tuning or test."""

    study: str
    scheme: str
    learning_rate: float
    seed: int
    steps: int
    split: str


class Records:
    """The finished runs, one line of a file each; whatever is asked for is trained only if it is not there."""

    def __init__(self, path: Path, work: Callable[[Run], dict[str, Any]]) -> None:
        self.path, self.work = path, work
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # killed while it wrote the last line
            path.write_text(whole)
        self.done = {Run(**record["run"]): record for record in map(json.loads, whole.splitlines())}

    def __call__(self, run: Run) -> dict[str, Any]:
        if run not in self.done:
            self.done[run] = {"run": dataclasses.asdict(run), **self.work(run)}
            with self.path.open("a") as file:
                file.write(json.dumps(self.done[run]) + "\n")
        loss = self.done[run]["eval_loss"]
        print(
            f"{run.study}: {run.scheme}, rate {run.learning_rate:g}, seed {run.seed}, {run.steps} steps: "
            f"{run.split} loss {'not finite' if loss is None else f'{loss:.4f}'}",
            flush=True,
        )
        return self.done[run]


def main() -> None:
    """Read the options, measure the costs, sweep, train, report."""
    args = parse()
    need("matplotlib")
    model_args = {
        name: ModelArguments(model_type=args.model_type, config_overrides=overrides)
        for name, overrides in (("main", args.config_overrides), ("deep", args.deep_config_overrides))
    }
    tokenizer = load_tokenizer(model_args["main"])
    configs = {name: load_config(each, tokenizer) for name, each in model_args.items()}
    for config in configs.values():
        choose_block_size(args.block_size, config)
    for scheme in args.schemes:
        check_scheme(configs["main"], scheme, {})
    blocks = split_blocks(args, tokenizer)
    folder = make_folder(args.output_dir)
    check_settings(folder / "settings.json", args)

    def make_model(study: str, scheme: str) -> torch.nn.Module:
        return load_model(dataclasses.replace(model_args[study], scheme=scheme), configs[study], tokenizer)

    records = Records(folder / "runs.jsonl", lambda run: train_one(run, make_model, blocks, args))
    input_ids = torch.stack([blocks["training"][index]["input_ids"] for index in range(args.batch_size)])
    costs = measured_costs(
        folder / "costs.json", lambda scheme: make_model("main", scheme), args.schemes, input_ids, args.timing_rounds
    )
    studies = [study(records, "main", args.schemes, args.max_train_steps, args.sweep_steps, args, costs)]
    if args.deep_steps:
        studies.append(study(records, "deep", [PLAIN, "none"], args.deep_steps, args.deep_steps, args))
    versions = {"python": platform.python_version(), **{lib.__name__: lib.__version__ for lib in PACKAGES}}
    report = summarise(studies, costs, byte_frequency_loss(blocks, configs["main"].vocab_size))
    report |= {"arguments": dataclasses.asdict(args), "versions": versions}
    (folder / "comparison.json").write_text(json.dumps(report, indent=2) + "\n")
    write_markdown(report, folder / "comparison.md")
    draw(report, folder / "comparison.png")
    print_tables(report)
    print(f"written to {folder}: comparison.json, comparison.md, comparison.png")


def parse() -> CompareArguments:
    """The options of the command line."""
    parser = HfArgumentParser(CompareArguments, description=__doc__.partition("\n")[0])
    args, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        raise RecipeError(f"there is no option {unknown[0]}; --help lists them all")
    return args


def check_settings(path: Path, args: CompareArguments) -> None:
    """Refuse a folder whose runs were made with other settings."""
    settings = {name: getattr(args, name) for name in FIXED}
    if path.exists():
        for name, value in json.loads(path.read_text()).items():
            if settings.get(name) != value:
                raise RecipeError(
                    f"the runs in {path.parent} have --{name} {value}, not {settings.get(name)}; "
                    "give another --output_dir"
                )
    path.write_text(json.dumps(settings, indent=2) + "\n")


def split_blocks(args: CompareArguments, tokenizer: Any) -> dict[str, Dataset]:
    """The blocks to train on, to choose the rates by and to report on."""
    texts = load_texts(train_file=args.train_file)
    training, held_out = load_blocks(texts, tokenizer, args.block_size, args.validation_split_percentage)
    if len(training) < args.batch_size:
        raise RecipeError(f"{len(training)} blocks to train on do not fill a step of {args.batch_size}; add text")
    if len(held_out) < 2:
        raise RecipeError(f"{len(held_out)} held-out block is too few; raise --validation_split_percentage")
    return {
        "training": training,
        "tuning": held_out.select(range(0, len(held_out), 2)),
        "test": held_out.select(range(1, len(held_out), 2)),
    }


def study(
    records: Records,
    name: str,
    schemes: list[str],
    steps: int,
    sweep_steps: int,
    args: CompareArguments,
    costs: dict[str, dict[str, float]] | None = None,
) -> Study:
    """Sweep the rates, then train each scheme at equal steps and, if costs are given, in the plain model's time.

    A run at equal time is a training of its own, as many steps as fit, with a schedule that ends with them.
    """
    rates, runs = {}, []
    for scheme in schemes:
        sweep = [records(Run(name, scheme, rate, SWEEP_SEED, sweep_steps, "tuning")) for rate in args.learning_rates]
        rates[scheme] = min(sweep, key=lambda record: _finite(record["eval_loss"]))["run"]["learning_rate"]
    in_time = {scheme: max(1, round(steps / cost["time_ratio"])) for scheme, cost in (costs or {}).items()}
    for seed in args.seeds:
        for scheme in schemes:
            for length in dict.fromkeys([steps, in_time.get(scheme, steps)]):
                runs.append(records(Run(name, scheme, rates[scheme], seed, length, "test")))
    return Study(name, steps, args.learning_rates, rates, in_time, runs)


def _finite(loss: float | None) -> float:
    return math.inf if loss is None else loss


def train_one(
    run: Run, make_model: Callable[[str, str], torch.nn.Module], blocks: dict[str, Dataset], args: CompareArguments
) -> dict[str, Any]:
    """Train once with AdamW, warm-up over a tenth of the steps and a cosine to 0; gives the held-out losses."""
    train_args = TrainArguments(
        output_dir=args.output_dir,
        seed=run.seed,
        learning_rate=run.learning_rate,
        max_train_steps=run.steps,
        lr_scheduler_type=SchedulerType.COSINE,
        num_warmup_steps=run.steps // 10,
        per_device_train_batch_size=args.batch_size,
        eval_steps=args.eval_steps,
    )
    accelerator = make_accelerator(train_args)
    if accelerator.num_processes > 1:
        raise RecipeError("compare.py runs in one process: start it with python, not with accelerate launch")
    set_seed(run.seed)
    model = make_model(run.study, run.scheme)
    optimizer = make_optimizer(model, run.learning_rate)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model,
        optimizer,
        make_loader(blocks["training"], args.batch_size, DataArguments(), run.seed, training=True),
        make_loader(blocks[run.split], 32, DataArguments(), run.seed, training=False),
        make_scheduler(optimizer, run.steps, train_args),
    )
    progress = Progress(accelerator=accelerator)
    parts = (accelerator, model, optimizer, scheduler, train_loader, eval_loader, progress)
    train(*parts, lambda: None, run.steps, args.batch_size * args.block_size, train_args)
    accelerator.free_memory()
    curve = [
        (point["step"], point["eval_loss"] if math.isfinite(point["eval_loss"]) else None)
        for point in progress.evaluations
    ]
    return {"eval_loss": curve[-1][1], "curve": curve, "seconds": progress.seconds}


def byte_frequency_loss(blocks: dict[str, Dataset], vocab_size: int) -> float:
    """The test loss of a model that knows only how often each token occurs in the training blocks."""
    counts = torch.bincount(blocks["training"][:]["input_ids"].flatten(), minlength=vocab_size).double() + 1
    log_frequencies = (counts / counts.sum()).log()
    return -log_frequencies[blocks["test"][:]["input_ids"][:, 1:]].mean().item()


if __name__ == "__main__":
    run(main)
