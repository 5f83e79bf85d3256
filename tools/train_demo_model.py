"""Train the demo model: a small Llama that writes Python, from the Python standard library's own source.

Two cores, half an hour, nothing to download: what the interpreter ships is the whole corpus, and the checkpoint is
small enough to live in the repository, so that every example and test of serving has real weights to serve.

Deterministic: a fixed number of steps (never the clock), a fixed seed, a sorted list of files, two threads and
deterministic kernels. The same bytes come out for the same CPython patch release, the same torch build and the same
kind of CPU; elsewhere sums are taken in another order, and the figures agree but the bytes do not.

Needs a C++ compiler: the training step is compiled, which makes it about a third faster.

    python tools/train_demo_model.py --out cluster/demo_model
"""

import logging
import math
import re
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

SEED = 20250101
NUM_THREADS = 2
VOCAB_SIZE = 4096
PAD, BOS, EOS = SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>")
PAD_ID, BOS_ID, EOS_ID = range(3)

NUM_CONTEXT_TOKENS = 512
NUM_WINDOWS_PER_STEP = 4
PEAK_LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0
NUM_WARMUP_STEPS = 200
NUM_STEPS_PER_LOG_LINE = 100

HELD_OUT_EVERY_NTH_FILE = 40
# A prompt is rarely the head of a module: some documents have to begin at a function, and end after it.
CUT_PROBABILITY = 0.2
TOP_LEVEL_STATEMENT = re.compile(r"(?<=\n\n)(?=@|def |async def |class |import |from )")
EXCLUDED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__phello__"}
# Generated, or a table; the first two also hold the paths of the machine that built the interpreter.
EXCLUDED_FILES = ("_sysconfigdata*.py", "config-*/*.py", "html/entities.py", "msilib/*.py")

# The model has read source text and nothing else, so a chat is source text too: what the system says is a comment,
# and what the user says is the beginning of the code that the assistant continues.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{- '# ' + message['content'] | trim | replace('\\n', '\\n# ') -}}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True, slots=True)
class Document:
    """One source file as token ids, without bos and eos, and where its top-level statements begin."""

    token_ids: Tensor
    cut_points: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Reached:
    """Losses are in nats per token; the held-out one is of the weights as saved."""

    num_steps: int
    num_tokens: int
    train_loss: float
    held_out_loss: float
    held_out_bits_per_byte: float
    duration_s: float


def main(
    out: Annotated[Path, typer.Option(help="The folder that receives the checkpoint.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps; 2048 tokens each.", min=1)] = 7000,
) -> None:
    """Train the demo model and write it as a Hugging Face checkpoint."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    be_deterministic()
    training_texts, held_out_texts = split(read_corpus(Path(sysconfig.get_paths()["stdlib"])))
    tokenizer = train_tokenizer(training_texts)
    model = LlamaForCausalLM(model_config())
    reached = train(
        model,
        [to_document(tokenizer, text) for text in training_texts],
        [to_document(tokenizer, text) for text in held_out_texts],
        steps,
    )
    save(model, tokenizer, out)
    typer.echo(report(reached))


def be_deterministic() -> None:
    """Fix everything that the result depends on and that torch leaves open."""
    torch.manual_seed(SEED)
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory before writing it, and filling it costs a fifth of the time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # unknown to torch's stubs


def read_corpus(root: Path) -> list[str]:
    """Return the texts of the library's hand-written modules, in the order of their paths."""
    files = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    texts = ((root / file).read_text(encoding="utf-8", errors="replace") for file in files if is_hand_written(file))
    return [text for text in texts if text.strip()]


def is_hand_written(file: Path) -> bool:
    """Say whether a file, relative to the library's root, is source that a person wrote and is no test."""
    in_excluded_folder = not EXCLUDED_FOLDERS.isdisjoint(file.parts)
    return not in_excluded_folder and not any(file.match(pattern) for pattern in EXCLUDED_FILES)


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the training texts and the held-out ones."""
    held_out = texts[::HELD_OUT_EVERY_NTH_FILE]
    training = [text for index, text in enumerate(texts) if index % HELD_OUT_EVERY_NTH_FILE]
    return training, held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE: all 256 bytes are in its alphabet, so that any text survives the round trip."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", pair=None, special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def to_document(tokenizer: Tokenizer, text: str) -> Document:
    """Encode one source file."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    statement_starts = {match.start() for match in TOP_LEVEL_STATEMENT.finditer(text)}
    return Document(
        token_ids=torch.tensor(encoding.ids),
        cut_points=tuple(i for i, (start, _) in enumerate(encoding.offsets) if start in statement_starts),
        size_bytes=len(text.encode()),
    )


def model_config() -> LlamaConfig:
    """Return the shape of the model: 4.5 million parameters, 9 MB in bfloat16."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def train(model: LlamaForCausalLM, training: list[Document], held_out: list[Document], num_steps: int) -> Reached:
    """Train the model in place, with its master weights in float32, and leave it in bfloat16."""
    started_s = time.monotonic()
    compiled_loss = torch.compile(loss_per_token, dynamic=False)
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, num_steps))
    batches = training_batches(training)
    recent_losses: list[float] = []
    for step in range(1, num_steps + 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled_loss(model, next(batches))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent_losses = [*recent_losses[1 - NUM_STEPS_PER_LOG_LINE :], loss.item()]
        if step % NUM_STEPS_PER_LOG_LINE == 0 or step == num_steps:
            log_progress(step, num_steps, mean(recent_losses), time.monotonic() - started_s)
    model.bfloat16()
    held_out_nats, num_held_out_tokens = total_loss(model, held_out)
    return Reached(
        num_steps=num_steps,
        num_tokens=num_steps * NUM_WINDOWS_PER_STEP * NUM_CONTEXT_TOKENS,
        train_loss=mean(recent_losses),
        held_out_loss=held_out_nats / num_held_out_tokens,
        held_out_bits_per_byte=held_out_nats / math.log(2) / sum(document.size_bytes for document in held_out),
        duration_s=time.monotonic() - started_s,
    )


def loss_per_token(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    """Return the mean loss in nats of windows, [num_windows, num_tokens + 1], int64."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """Return AdamW, which decays the matrices and leaves the norms' gains alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    gains = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Return the share of the peak learning rate: a linear warm-up, then half a cosine down to nothing."""
    num_warmup_steps = min(NUM_WARMUP_STEPS, num_steps // 10 + 1)
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    progress = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def training_batches(documents: list[Document]) -> Iterator[Tensor]:
    """Yield [num_windows, num_tokens + 1] without end; every epoch has its own order, cuts and windows."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        order = torch.randperm(len(documents), generator=generator).tolist()
        stream = torch.cat([with_random_cuts(documents[index], generator) for index in order])
        offset = int(torch.randint(NUM_CONTEXT_TOKENS, (1,), generator=generator))
        windows = stream[offset:].unfold(0, NUM_CONTEXT_TOKENS + 1, NUM_CONTEXT_TOKENS)
        windows = windows[torch.randperm(len(windows), generator=generator)]
        num_batches = len(windows) // NUM_WINDOWS_PER_STEP
        yield from windows[: num_batches * NUM_WINDOWS_PER_STEP].chunk(num_batches)


def with_random_cuts(document: Document, generator: torch.Generator) -> Tensor:
    """Return the document as one or more stretches of bos, tokens, eos."""
    is_cut = torch.rand(len(document.cut_points), generator=generator) < CUT_PROBABILITY
    cuts = [cut for cut, chosen in zip(document.cut_points, is_cut.tolist(), strict=True) if chosen and cut > 0]
    bounds = [0, *cuts, len(document.token_ids)]
    return torch.cat([between_bos_and_eos(document.token_ids[start:stop]) for start, stop in pairwise(bounds)])


def between_bos_and_eos(token_ids: Tensor) -> Tensor:
    """Return bos, the tokens, eos."""
    return torch.cat([torch.tensor([BOS_ID]), token_ids, torch.tensor([EOS_ID])])


@torch.no_grad()
def total_loss(model: LlamaForCausalLM, documents: list[Document]) -> tuple[float, int]:
    """Return the nats of all documents, their eos included, and the number of tokens predicted.

    A token is predicted once, from what comes before it in its window.
    """
    total_nats, num_tokens = 0.0, 0
    for document in documents:
        whole = between_bos_and_eos(document.token_ids)
        for start in range(0, len(whole) - 1, NUM_CONTEXT_TOKENS):
            window = whole[start : start + NUM_CONTEXT_TOKENS + 1]
            total_nats += loss_per_token(model, window[None]).item() * (len(window) - 1)
            num_tokens += len(window) - 1
    return total_nats, num_tokens


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the checkpoint the way that transformers and every engine read it."""
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    model.save_pretrained(out)
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    wrapped.save_pretrained(out, save_jinja_files=False)


def log_progress(step: int, num_steps: int, loss: float, elapsed_s: float) -> None:
    """Log the mean loss of the last steps and the time that is left."""
    left_s = elapsed_s / step * (num_steps - step)
    logger.info("step %d of %d: loss %.3f, %.0f s so far, about %.0f s left", step, num_steps, loss, elapsed_s, left_s)


def mean(values: list[float]) -> float:
    """Return the mean of at least one value."""
    return sum(values) / len(values)


def report(reached: Reached) -> str:
    """Return what was reached, a line each."""
    return (
        f"steps:              {reached.num_steps} ({reached.num_tokens / 1e6:.1f} million tokens)\n"
        f"training loss:      {reached.train_loss:.3f} nats per token (mean of the last steps)\n"
        f"held-out loss:      {reached.held_out_loss:.3f} nats per token\n"
        f"held-out size:      {reached.held_out_bits_per_byte:.3f} bits per byte\n"
        f"time:               {reached.duration_s / 60:.1f} minutes"
    )


if __name__ == "__main__":
    typer.run(main)
