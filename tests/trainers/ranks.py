"""One rank of the tests of check_consistency: writes a line for each case.

ranks.py FOLDER RANK_THAT_DIES
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch import distributed

from millrace import DataError, Loader
from millrace.torch import check_consistency


class Numbers:
    """A dataset whose tokens are known, and which may be damaged on one rank."""

    def __init__(self, seed: int = 1, shift: int = 0, is_missing: bool = False) -> None:
        self.seed, self.shift, self.is_missing = seed, shift, is_missing

    def __len__(self) -> int:
        return 96

    def batch(self, sample_numbers: Any) -> dict[str, Any]:
        if self.is_missing:
            raise DataError("text.bin has 0 bytes")
        return {"tokens": np.asarray(sample_numbers)[:, None] * 10 + self.shift}

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "numbers", "parts": [{"seed": self.seed}], "view": {}}


def main() -> None:
    folder, dead = Path(sys.argv[1]), int(sys.argv[2])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)

    def say(line: str) -> None:
        with open(folder / f"rank-{rank}", "a") as output:
            output.write(line.replace("\n", " | ") + "\n")

    def loader(data_rank: int, data_size: int, consumed: int = 24, **options: Any) -> Loader:
        return Loader(
            Numbers(**options),
            micro_batch_size=2,
            data_parallel_rank=data_rank,
            data_parallel_size=data_size,
            consumed_samples=consumed,
            prefetch=0,
        )

    def check(case: str, *arguments: Any, **options: Any) -> None:
        try:
            check_consistency(*arguments, **{"timeout": 60, **options})
            say(f"{case}: agree")
        except Exception as error:
            say(f"{case}: {type(error).__name__}: {error}")

    half = {"data_parallel_rank": rank // 2, "checksum_batches": 3}
    check("all differ", loader(rank, size), checksum_batches=2)
    check("replicas", loader(rank // 2, size // 2), **half)
    check("elastic", loader(rank // 2, size // 2, consumed=22), **half)  # inside a step of four
    check("elastic content", loader(rank // 2, size // 2, 22, shift=int(rank == 3)), **half)
    check("position", loader(rank, size, consumed=24 if rank != 2 else 32))
    check("fingerprint", loader(rank, size, seed=1 if rank != 0 else 7))
    check("overlap", loader(0, size))
    check("not replicas", loader(rank, size), data_parallel_rank=rank // 2)
    check("content", loader(rank // 2, size // 2, shift=int(rank == 3)), **half)
    check("failure", loader(rank, size, is_missing=rank == 1), checksum_batches=1)
    check("group", loader(rank, size), group=distributed.new_group([0, 1, 2, 3]))
    pairs = [distributed.new_group(ranks) for ranks in ([0, 1], [1, 2])]  # rank 1 is in both
    for number, pair in enumerate(pairs):
        check(f"pair {number}", loader(max(rank - number, 0) % 2, 2), group=pair)
    check("bad argument", loader(rank, size), timeout=-1 if rank == 1 else 60)
    check("afterwards", loader(rank, size))
    if rank == dead:
        os._exit(0)
    check("dead", loader(rank, size), timeout=3)
    os._exit(0)  # a group with a dead rank cannot be ended in order


if __name__ == "__main__":
    main()
