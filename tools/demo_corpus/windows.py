"""Turn texts into token ids, and those into the windows that a training step takes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_checkpoint import BOS_ID, EOS_ID

NUM_CONTEXT_TOKENS = 512
NUM_WINDOWS_PER_STEP = 4
NUM_TOKENS_PER_STEP = NUM_WINDOWS_PER_STEP * NUM_CONTEXT_TOKENS
# A prompt is rarely the head of a module: some documents have to begin at a function, and end after it.
CUT_PROBABILITY = 0.2
TOP_LEVEL_STATEMENT = re.compile(r"(?<=\n\n)(?=@|def |async def |class |import |from )")


@dataclass(frozen=True, slots=True)
class Document:
    """One source file as token ids, without bos and eos, and where its top-level statements begin."""

    token_ids: Tensor
    cut_points: tuple[int, ...]
    size_bytes: int


def to_document(tokenizer: Tokenizer, text: str) -> Document:
    """Encode one source file."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    statement_starts = {match.start() for match in TOP_LEVEL_STATEMENT.finditer(text)}
    return Document(
        token_ids=torch.tensor(encoding.ids),
        cut_points=tuple(i for i, (start, _) in enumerate(encoding.offsets) if start in statement_starts),
        size_bytes=len(text.encode()),
    )


def training_batches(documents: list[Document], seed: int) -> Iterator[Tensor]:
    """Yield [num_windows, num_tokens + 1] without end; every epoch has its own order, cuts and windows."""
    generator = torch.Generator().manual_seed(seed)
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
