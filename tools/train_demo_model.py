"""Train the demo model: a small Llama that writes Python, in two stages.

    python -m tools.train_demo_model library --out BASE
    python -m tools.train_demo_model textbook --base BASE --out cluster/demo_model

The first stage trains the tokenizer and the model on the Python standard library's own source, which the interpreter
ships. The second one goes on with textbook exercises, which tools/demo_corpus writes, and with some of the same source
among them. Nothing is downloaded, and the checkpoint is small enough to live in the repository, so that every example
and test of serving has real weights to serve.

Deterministic: a fixed number of steps (never the clock), a fixed seed, a sorted list of files, two threads and
deterministic kernels. The same bytes come out for the same CPython patch release, the same torch build and the same
kind of CPU; elsewhere sums are taken in another order, and the figures agree but the bytes do not. A run that was
interrupted goes on from its last state (--state) to the same bytes.

Needs a C++ compiler: the training step is compiled, which makes it about a third faster.
"""

import json
import logging
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from tools.demo_checkpoint import model_config, save, train_tokenizer
from tools.demo_corpus.programs import write_programs
from tools.demo_corpus.standard_library import read_modules, split
from tools.demo_corpus.windows import (
    NUM_CONTEXT_TOKENS,
    NUM_TOKENS_PER_STEP,
    Document,
    between_bos_and_eos,
    to_document,
    training_batches,
)

logger = logging.getLogger(__name__)

SEED = 20250101
HELD_OUT_SEED = SEED + 1
NUM_THREADS = 2

NUM_PROGRAMS = 12_000
NUM_HELD_OUT_PROGRAMS = 500
# Of the standard library's modules, that many are among the exercises, so that the model does not forget them.
REPEATED_EVERY_NTH_FILE = 5
LIBRARY_PEAK_LEARNING_RATE = 2e-3
TEXTBOOK_PEAK_LEARNING_RATE = 1.5e-3
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0
NUM_WARMUP_STEPS = 200
# The share of the steps over which the second stage's learning rate goes down.
LAST_SHARE = 0.35
NUM_STEPS_PER_STATE = 20
NUM_STEPS_PER_LOG_LINE = 100

app = typer.Typer(add_completion=False)
_Out = Annotated[Path, typer.Option(help="The folder that receives the checkpoint.")]
_State = Annotated[Path | None, typer.Option(help="The file that keeps the state of the training, to go on from.")]


@dataclass(frozen=True, slots=True)
class Run:
    """The settings of one stage's training. A step takes 2048 tokens."""

    num_steps: int
    peak_learning_rate: float
    learning_rate_factor: Callable[[int, int], float]
    state_path: Path | None


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """The loss of texts that were not trained on, of the weights as saved."""

    nats_per_token: float
    bits_per_byte: float


@dataclass(frozen=True, slots=True)
class LossRecord:
    """The mean training loss of the steps up to this one, in nats per token."""

    step: int
    loss: float


@app.command()
def library(
    out: _Out,
    steps: Annotated[int, typer.Option(help="Optimizer steps; 2048 tokens each.", min=1)] = 7000,
    state: _State = None,
) -> None:
    """Train a tokenizer and a model on the standard library's source."""
    be_deterministic()
    training_texts, held_out_texts = split(read_modules(Path(sysconfig.get_paths()["stdlib"])))
    tokenizer = train_tokenizer(training_texts)
    model = LlamaForCausalLM(model_config())
    documents = [to_document(tokenizer, text) for text in training_texts]
    losses = train(model, documents, Run(steps, LIBRARY_PEAK_LEARNING_RATE, cosine, state), compiled_loss())
    save(model, tokenizer, out)
    held_out = {"standard library": held_out_loss(model, [to_document(tokenizer, text) for text in held_out_texts])}
    write_figures(out, losses, held_out)


@app.command()
def textbook(
    base: Annotated[Path, typer.Option(help="The checkpoint of the first stage.")],
    out: _Out,
    steps: Annotated[int, typer.Option(help="Optimizer steps; 2048 tokens each.", min=1)] = 2800,
    programs: Annotated[int, typer.Option(help="The number of programs that are written.", min=1)] = NUM_PROGRAMS,
    state: _State = None,
) -> None:
    """Go on with textbook exercises, and with the standard library's source among them."""
    be_deterministic()
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    training_texts, held_out_texts = split(read_modules(Path(sysconfig.get_paths()["stdlib"])))
    written = list(islice(write_programs(SEED), programs))
    documents = [to_document(tokenizer, text) for text in [*training_texts[::REPEATED_EVERY_NTH_FILE], *written]]
    losses = train(model, documents, Run(steps, TEXTBOOK_PEAK_LEARNING_RATE, trapezoid, state), compiled_loss())
    save(model, tokenizer, out)
    unseen = list(islice(write_programs(HELD_OUT_SEED), NUM_HELD_OUT_PROGRAMS))
    held_out = {
        "standard library": held_out_loss(model, [to_document(tokenizer, text) for text in held_out_texts]),
        "exercises": held_out_loss(model, [to_document(tokenizer, text) for text in unseen]),
    }
    write_figures(out, losses, held_out)


def be_deterministic() -> None:
    """Fix everything that the result depends on and that torch leaves open."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(SEED)
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory before writing it, and filling it costs a fifth of the time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # unknown to torch's stubs


def train(
    model: LlamaForCausalLM,
    documents: list[Document],
    run: Run,
    loss_of: Callable[[LlamaForCausalLM, Tensor], Tensor],
) -> list[LossRecord]:
    """Train the model in place, with its master weights in float32, and leave it in bfloat16.

    A run that finds a state goes on from it. Returns the loss along the way.
    """
    model.train()
    optimizer = make_optimizer(model, run.peak_learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: run.learning_rate_factor(step, run.num_steps))
    num_done, losses = _restore(run, model, optimizer, schedule)
    batches = training_batches(documents, SEED)
    started_s = time.monotonic()
    logger.info("%d documents, %d tokens", len(documents), sum(len(document.token_ids) for document in documents))
    for step, windows in enumerate(islice(batches, num_done, run.num_steps), num_done + 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, windows)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % NUM_STEPS_PER_LOG_LINE == 0 or step == run.num_steps:
            left_s = (time.monotonic() - started_s) / (step - num_done) * (run.num_steps - step)
            recent = mean(losses[-NUM_STEPS_PER_LOG_LINE:])
            logger.info("step %d of %d: loss %.3f, about %.0f s left", step, run.num_steps, recent, left_s)
        if step % NUM_STEPS_PER_STATE == 0:
            _keep(run, model, optimizer, schedule, losses)
    model.bfloat16()
    return [
        LossRecord(
            min(start + NUM_STEPS_PER_LOG_LINE, len(losses)), mean(losses[start : start + NUM_STEPS_PER_LOG_LINE])
        )
        for start in range(0, len(losses), NUM_STEPS_PER_LOG_LINE)
    ]


def _keep(
    run: Run,
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
    losses: list[float],
) -> None:
    """Write the state, whole or not at all."""
    if run.state_path is None:
        return
    new = run.state_path.with_suffix(".new")
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save({**parts, "losses": losses}, new)
    new.replace(run.state_path)


def _restore(
    run: Run,
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
) -> tuple[int, list[float]]:
    """Take up the state, if there is one. Returns the number of steps that are done, and their losses."""
    if run.state_path is None or not run.state_path.exists():
        return 0, []
    kept = torch.load(run.state_path)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    schedule.load_state_dict(kept["schedule"])
    return len(kept["losses"]), kept["losses"]


def loss_per_token(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    """Return the mean loss in nats of windows, [num_windows, num_tokens + 1], int64."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def compiled_loss() -> Callable[[LlamaForCausalLM, Tensor], Tensor]:
    """Return the loss of the training, compiled for windows of one size."""
    return torch.compile(loss_per_token, dynamic=False)


def make_optimizer(model: LlamaForCausalLM, peak_learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW, which decays the matrices and leaves the norms' gains alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    gains = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak_learning_rate, betas=(0.9, 0.95), fused=True)


def cosine(step: int, num_steps: int) -> float:
    """Return the share of the peak learning rate: a linear warm-up, then half a cosine down to nothing."""
    num_warmup_steps = min(NUM_WARMUP_STEPS, num_steps // 10 + 1)
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    progress = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def trapezoid(step: int, num_steps: int) -> float:
    """Return the share of the peak learning rate: a linear warm-up, the peak, a linear way down to nothing."""
    num_warmup_steps = min(NUM_WARMUP_STEPS, num_steps // 10 + 1)
    num_last_steps = math.ceil(num_steps * LAST_SHARE)
    return min(1.0, (step + 1) / num_warmup_steps, (num_steps - step) / num_last_steps)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, documents: list[Document]) -> HeldOutLoss:
    """Return the loss of documents, their eos included.

    A token is predicted once, from what comes before it in its window.
    """
    total_nats, num_tokens = 0.0, 0
    for document in documents:
        whole = between_bos_and_eos(document.token_ids)
        for start in range(0, len(whole) - 1, NUM_CONTEXT_TOKENS):
            window = whole[start : start + NUM_CONTEXT_TOKENS + 1]
            total_nats += loss_per_token(model, window[None]).item() * (len(window) - 1)
            num_tokens += len(window) - 1
    size_bytes = sum(document.size_bytes for document in documents)
    return HeldOutLoss(total_nats / num_tokens, total_nats / math.log(2) / size_bytes)


def write_figures(out: Path, losses: list[LossRecord], held_out: dict[str, HeldOutLoss]) -> None:
    """Write the losses to training.json."""
    figures = {
        "steps": losses[-1].step,
        "tokens": losses[-1].step * NUM_TOKENS_PER_STEP,
        "held_out": {name: asdict(loss) for name, loss in held_out.items()},
        "training_loss": {record.step: round(record.loss, 4) for record in losses},
    }
    (out / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    typer.echo(json.dumps(figures["held_out"], indent=2))


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return sum(values) / len(values)


if __name__ == "__main__":
    app()
