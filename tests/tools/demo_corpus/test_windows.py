from itertools import islice

import torch

from tools.demo_checkpoint import BOS_ID, EOS_ID
from tools.demo_corpus.windows import (
    NUM_CONTEXT_TOKENS,
    NUM_WINDOWS_PER_STEP,
    Document,
    training_batches,
    with_random_cuts,
)


def documents(count: int, num_tokens: int) -> list[Document]:
    return [Document(torch.full((num_tokens,), 10 + index), (), num_tokens) for index in range(count)]


def test_an_epoch_has_every_document_and_the_next_one_another_order() -> None:
    texts = documents(20, 1000)
    num_batches = 20 * 1002 // NUM_CONTEXT_TOKENS // NUM_WINDOWS_PER_STEP
    batches = list(islice(training_batches(texts, seed=1), 2 * num_batches))
    assert {batch.shape for batch in batches} == {(NUM_WINDOWS_PER_STEP, NUM_CONTEXT_TOKENS + 1)}
    first, second = torch.cat(batches[:num_batches]), torch.cat(batches[num_batches:])
    assert set(first.flatten().tolist()) >= {10 + index for index in range(20)}
    assert not torch.equal(first, second)


def test_batches_are_the_same_for_the_same_seed() -> None:
    texts = documents(9, 1000)
    first, again = (torch.cat(list(islice(training_batches(texts, seed=2), 5))) for _ in range(2))
    assert torch.equal(first, again)


def test_a_cut_document_is_several_between_bos_and_eos() -> None:
    text = Document(torch.arange(10, 110), tuple(range(0, 100, 5)), 100)
    stretch = with_random_cuts(text, torch.Generator().manual_seed(0)).tolist()
    num_documents = stretch.count(BOS_ID)
    assert 1 < num_documents == stretch.count(EOS_ID)
    assert (stretch[0], stretch[-1]) == (BOS_ID, EOS_ID)
    assert [token for token in stretch if token > EOS_ID] == list(range(10, 110))
