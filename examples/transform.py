"""Train code by fill-in-the-middle, and chats on their answers alone, in one blend."""

import tempfile

import numpy as np

from millrace import (
    BlendedDataset,
    FillInMiddle,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetBuilder,
    Loader,
    LossRanges,
    RepeatGuard,
    TransformedDataset,
    write_loss_ranges,
)

EOD, PREFIX, MIDDLE, SUFFIX = 0, 50_001, 50_002, 50_003
QUESTION, ANSWER = 30, 50  # tokens


def main() -> None:
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        with IndexedDatasetBuilder(f"{folder}/code", np.uint16) as builder:
            for length in random.integers(50, 400, 200):
                builder.add_document([*random.integers(1, 50_000, length), EOD])
        with IndexedDatasetBuilder(f"{folder}/chat", np.uint16) as builder:
            for _ in range(300):
                builder.add_document([*random.integers(1, 50_000, QUESTION + ANSWER), EOD])
        # Of each chat, a document of one sequence, the question is not trained on.
        write_loss_ranges(f"{folder}/chat", [(chat, 0, QUESTION) for chat in range(300)])

        code, chat = (
            GPTDataset(
                IndexedDataset(f"{folder}/{name}"),
                sequence_length=256,
                seed=1,
                num_samples=100,
                eod_token=EOD,
                reset_position_ids=True,
            )
            for name in ("code", "chat")
        )
        fill_in = FillInMiddle(
            rate=0.5,
            spm_rate=0.5,
            prefix_token=PREFIX,
            middle_token=MIDDLE,
            suffix_token=SUFFIX,
            eod_token=EOD,
            seed=1,
        )
        blend = BlendedDataset(
            [
                TransformedDataset(code, [fill_in, RepeatGuard()]),
                TransformedDataset(chat, [LossRanges(chat)]),
            ],
            [0.5, 0.5],
            size=64,
        )
        batch = next(Loader(blend, micro_batch_size=8))
        for row in range(8):
            filled = np.isin(batch["tokens"][row], MIDDLE).sum()
            share = batch["loss_mask"][row].mean()
            print(
                f"sample {row}: {filled} documents permuted, {share:.0%} of the tokens trained on"
            )


if __name__ == "__main__":
    main()
