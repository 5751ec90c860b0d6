"""Two processes that train on dealt packs have the gradients of the undealt global batch."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace import GPTDataset, IndexedDataset, Loader
from millrace.feed import BalancedSampler
from millrace.order import PackedOrder
from millrace.outputs import count_targets
from millrace.torch import to_tensors
from tests.conftest import results_of_processes, write_documents

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"
CAPACITY, BATCH = 64, 16


def gradient_of(prefix: Path, rank: int, ranks: int, out: Any) -> None:
    """Puts the rank's part of the gradient of the first two global batches into a queue."""
    sys.path.insert(0, str(EXAMPLES))
    import tiny_gpt

    data = IndexedDataset(prefix)
    order = PackedOrder(data.sequence_lengths, CAPACITY, seed=5, long_documents="cut")
    options: Any = {"sequence_length": CAPACITY, "add_extra_token": False}
    packs = GPTDataset(data, order=order, boundaries="documents", **options)
    share = {"data_parallel_rank": rank, "data_parallel_size": ranks, "micro_batch_size": 1}
    sampler = BalancedSampler.of(packs, linear=5.0, global_batch_size=BATCH, **share)
    fields = ("tokens", "labels", "loss_mask", "position_ids", "document_ids")
    model = tiny_gpt.make_model()[0].float()
    for _, batch in zip(range(2), Loader(packs, sampler=sampler, fields=fields), strict=False):
        one = to_tensors(batch)
        logits = model(one["tokens"], one["position_ids"], one["document_ids"])
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), one["labels"], reduction="none"
        )
        (losses * one["loss_mask"]).sum().backward()
    num_targets = count_targets(packs.tokens(range(2 * BATCH)))
    parts = [parameter.grad.flatten() / num_targets for parameter in model.parameters()]
    out.put(torch.cat(parts).tolist())


def test_the_gradients_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lengths = random.lognormal(2.5, 1, 400).clip(1, 90).astype(int)
    write_documents(tmp_path / "text", [random.integers(0, 50, length) for length in lengths])
    (whole,) = results_of_processes("fork", gradient_of, [(tmp_path / "text", 0, 1)])
    shares = [(tmp_path / "text", rank, 2) for rank in range(2)]
    dealt = np.sum(results_of_processes("fork", gradient_of, shares), axis=0)
    assert np.abs(whole).max() > 1e-3
    np.testing.assert_allclose(dealt, whole, rtol=0, atol=1e-5 * np.abs(whole).max())
