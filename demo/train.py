"""Train the demo model: a small Qwen3-MoE that writes Jane Austen's English.

`python -m demo.train` fetches the text, learns the tokenizer, trains on one CPU thread, and writes `demo/model/` and
`demo/heldout.txt`. The same seed, thread count and library versions give the same files. See demo/README.md.
"""

import argparse
import copy
import math
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, set_seed
from transformers.utils.logging import disable_progress_bar

from demo.bpe import END_OF_TEXT_ID, encode, save_tokenizer, train_tokenizer
from demo.corpus import CorpusError, load_corpus
from demo.muon import Muon

HERE = Path(__file__).resolve().parent
LONGEST = 1024
WARMUP_STEPS = 100
FINAL_LR_FRACTION = 0.02
WEIGHT_DECAY = 0.1
EXPERTS_PER_TOKEN = 2


def parse_arguments() -> argparse.Namespace:
    """The command line, one option per line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder that receives model/ and heldout.txt")
    parser.add_argument("--corpus", type=Path, nargs="+", default=(), metavar="FILE", help="train on these text files")
    parser.add_argument("--steps", type=int, default=2400, help="optimiser steps")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens per step, a multiple of 1024")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--vocabulary", type=int, default=2048, help="number of tokens, every byte among them")
    parser.add_argument("--save-every", type=int, default=300, help="steps between checkpoints and held-out losses")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.batch_tokens < LONGEST or arguments.batch_tokens % LONGEST:
        parser.error(f"--batch-tokens must be a multiple of {LONGEST}")
    return arguments


def model_config(vocabulary: int) -> Qwen3MoeConfig:
    """Four layers of eight experts, top 2: 4.5 million parameters, 2.1 million of them active per token."""
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 128,  # of dense layers, which this model has none of
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.01,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }
    return Qwen3MoeConfig(**settings)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to a small fraction of the peak."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return peak * (FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress)))


def window_length(step: int, steps: int) -> int:
    """Short windows first, because attention over them is cheap; the full context in the last part."""
    return 256 if step < 0.6 * steps else 512 if step < 0.85 * steps else LONGEST


def draw_batch(ids: torch.Tensor, tokens: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """`tokens` token ids as windows of `length`, each beginning anywhere in the text."""
    starts = torch.randint(len(ids) - length + 1, (tokens // length, 1), generator=generator)
    return ids[starts + torch.arange(length)]


def make_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding, the routers and the norms' gains."""
    named = list(model.named_parameters())
    by_muon = {
        name for name, parameter in named if parameter.ndim >= 2 and "embed" not in name and ".gate." not in name
    }
    matrices = [parameter for name, parameter in named if name in by_muon]
    others = [parameter for name, parameter in named if name not in by_muon and parameter.ndim >= 2]
    gains = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": others, "weight_decay": WEIGHT_DECAY}, {"params": gains, "weight_decay": 0.0}]
    return [
        Muon(matrices, lr=0.0, momentum=0.95, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True),
    ]


def train_step(
    model: PreTrainedModel, optimizers: list[torch.optim.Optimizer], batch: torch.Tensor, lr: float
) -> float:
    """One update; returns the next-token loss without the router's share."""
    with torch.autocast("cpu", torch.bfloat16):
        output = model(input_ids=batch, labels=batch, output_router_logits=True)
    # The auxiliary loss, already weighted within output.loss, spreads the tokens over the experts.
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float((output.loss - model.config.router_aux_loss_coef * output.aux_loss).detach())


@torch.inference_mode()
def evaluate(model: PreTrainedModel, ids: torch.Tensor, length: int = 512) -> tuple[float, float]:
    """Held-out next-token loss in windows of `length`, and the smallest share any expert has of its layer's work."""
    model.train(False)
    losses: list[float] = []
    counts = torch.zeros(model.config.num_hidden_layers, model.config.num_experts)
    for window in ids[: len(ids) // length * length].view(-1, 1, length):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(input_ids=window, labels=window, output_router_logits=True)
        losses.append(float(output.loss))
        for count, logits in zip(counts, output.router_logits, strict=True):
            count += logits.topk(EXPERTS_PER_TOKEN).indices.flatten().bincount(minlength=len(count))
    model.train()
    return sum(losses) / len(losses), float((counts / counts.sum(dim=1, keepdim=True)).min())


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write the weights rounded to bf16, without touching the fp32 weights being trained."""
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    # Published Qwen3-MoE checkpoints, and readers other than the newest transformers, call it num_experts.
    config_file = folder / "config.json"
    text = config_file.read_text(encoding="utf-8").replace('"num_local_experts"', '"num_experts"')
    config_file.write_text(text, encoding="utf-8")


def train(arguments: argparse.Namespace, console: Console) -> None:
    """The whole run, from text to files."""
    set_seed(arguments.seed)
    disable_progress_bar()  # the one of transformers, which would break up ours
    torch.set_num_threads(arguments.threads)
    corpus = load_corpus(arguments.corpus)
    tokenizer = train_tokenizer(corpus.training, arguments.vocabulary)
    ids = encode(tokenizer, corpus.training)
    heldout = encode(tokenizer, corpus.heldout)
    console.print(f"{len(ids):,} tokens to train on, {len(heldout):,} held out")

    folder = arguments.output / "model"
    save_tokenizer(tokenizer, folder, LONGEST)
    (arguments.output / "heldout.txt").write_text("\n\n".join(corpus.heldout) + "\n", encoding="utf-8")

    config = model_config(arguments.vocabulary)
    # One matrix product over all experts: the quickest of transformers' ways to train them on a CPU.
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
    console.print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    optimizers = make_optimizers(model)
    generator = torch.Generator().manual_seed(arguments.seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("training", total=arguments.steps)
        smooth = math.log(arguments.vocabulary)
        for step in range(arguments.steps):
            length = window_length(step, arguments.steps)
            batch = draw_batch(ids, arguments.batch_tokens, length, generator)
            loss = train_step(model, optimizers, batch, learning_rate(step, arguments.steps, arguments.lr))
            smooth += (loss - smooth) / min(step + 1, 50)
            progress.update(task, advance=1, description=f"loss {smooth:.3f}")
            if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
                save_model(model, folder)
                kept, least = evaluate(model, heldout)
                console.print(
                    f"step {step + 1}: training loss {smooth:.3f}, held-out {kept:.3f}, least used expert {least:.1%}"
                )
    console.print(f"wrote {folder}")


def main() -> None:
    """Run from the command line."""
    try:
        train(parse_arguments(), Console())
    except CorpusError as error:
        sys.exit(f"demo.train: {error}")


if __name__ == "__main__":
    main()
