"""What packed batches and copies to a device do on a GPU, where the tests do not run.

    python -m tests.check_gpu

It needs CUDA and what the tests need, and stops at the first difference.
"""

import inspect
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from millrace import GPTDataset, IndexedDataset, Loader
from millrace.order import PackedOrder
from millrace.outputs import document_starts, mask_blocks, padding_free
from millrace.torch import to_device
from tests.conftest import write_documents
from tests.test_outputs import check_model

ROW, HEADS, WIDTH, VOCABULARY = 2048, 4, 64, 1000
CUDA = torch.device("cuda")
# What makes `varlen_attn` causal, before and since torch 2.12.
HAS_WINDOW = "window_size" in inspect.signature(varlen_attn).parameters
CAUSAL: Any = {"window_size": (-1, 0)} if HAS_WINDOW else {"is_causal": True}


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        packs = make_packs(Path(folder) / "text")
        check_attention(packs)
        for number in range(8):
            one = packs.tokens([number])
            check_model(one, "sdpa", vocabulary=VOCABULARY, device="cuda", atol=1e-3, rtol=1e-3)
        print("a model's logits of 8 packs are those of their documents", flush=True)
        check_copies(packs)


def make_packs(prefix: Path) -> GPTDataset:
    """Packs of documents of 1 to 900 tokens, in which each token is the last one and 1."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 900, 4000).tolist()
    firsts = generator.integers(VOCABULARY, size=4000).tolist()
    bounds = zip(firsts, lengths, strict=True)
    documents = [np.arange(first, first + size) for first, size in bounds]
    write_documents(prefix, [document % VOCABULARY for document in documents], np.int32)
    data = IndexedDataset(prefix)
    order = PackedOrder(data.sequence_lengths, ROW, seed=3, num_samples=1000)
    options: Any = {"sequence_length": ROW, "add_extra_token": False, "boundaries": "documents"}
    return GPTDataset(data, order=order, **options)


def check_attention(packs: GPTDataset) -> None:
    """Both kinds of packed attention against each document alone."""
    compiled = torch.compile(flex_attention)
    for number in range(0, 40, 2):
        batch = packs.tokens([number, number + 1])
        torch.manual_seed(number)
        query, key, value = torch.randn(3, 2, HEADS, ROW, WIDTH, device=CUDA, dtype=torch.bfloat16)
        mask = mask_of(document_starts(batch, sequence_length=ROW)["starts"])
        flexible = compiled(query, key, value, block_mask=mask)
        row = padding_free(batch)
        edges = torch.from_numpy(row["cu_seq_lens_q"]).to(CUDA)
        used = [slice(0, size) for size in batch.sizes]
        flat = [
            torch.cat([one[n, :, part].transpose(0, 1) for n, part in enumerate(used)])
            for one in (query, key, value)
        ]
        longest = row["max_length_q"]
        varied = varlen_attn(*flat, edges, edges, longest, longest, **CAUSAL)
        for start, stop in pairwise(row["cu_seq_lens_q"].tolist()):
            alone = [one[start:stop].transpose(0, 1)[None] for one in flat]
            expected = torch.nn.functional.scaled_dot_product_attention(*alone, is_causal=True)[0]
            sample = int(start >= batch.ends[0])
            base = sample * int(batch.ends[0])
            place = slice(start - base, stop - base)
            close = partial(torch.testing.assert_close, atol=2e-2, rtol=2e-2)
            close(flexible[sample, :, place], expected)
            close(varied[start:stop].transpose(0, 1), expected)
    print("flex and varlen attention see each document alone, in 40 packs", flush=True)


def mask_of(starts: Any) -> BlockMask:
    """Flex attention's mask of documents that start at these places."""
    first, size = torch.from_numpy(starts).to(CUDA), starts.shape[1]

    def is_seen(b: Any, _: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) & (kv >= first[b, q])

    blocks = {name: torch.from_numpy(one).to(CUDA) for name, one in mask_blocks(starts).items()}
    return BlockMask.from_kv_blocks(**blocks, mask_mod=is_seen, seq_lengths=(size, size))


def check_copies(packs: GPTDataset) -> None:
    """Batches that the loader's threads copy beside a computation, against the arrays."""
    work = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16)
    copied = Loader(packs, micro_batch_size=8, threads=3, prepare=to_device("cuda"))
    sums, expected = [], []
    for batch, arrays in zip(copied, Loader(packs, micro_batch_size=8), strict=True):
        for _ in range(4):
            work = torch.tanh(work @ work)  # the device is busy when the next batch arrives
        for name, array in arrays.items():
            scale = np.arange(array.size).reshape(array.shape) % 1013
            sums.append((batch[name].long() * torch.from_numpy(scale).to(CUDA)).sum())
            expected.append(int((array.astype(np.int64) * scale).sum()))
    assert torch.stack(sums).tolist() == expected
    print(f"{len(sums)} arrays arrived whole", flush=True)


if __name__ == "__main__":
    main()
