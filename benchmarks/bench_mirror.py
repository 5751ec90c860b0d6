"""An epoch with a mirror that has room for all the data, against MosaicML Streaming.

`--peer PYTHON` is a Python with mosaicml-streaming, in an environment apart.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from bucket_work import servers, serving, write, write_sequences
from common import HIGHER, LOWER, Report, Row, alternate, finish, number_of_runs, parser

LENGTH, BATCH, RATE = 4096, 32, 100e6
NOTES = [
    "820 MB, 100,000 samples of 4,096 uint16 tokens, in SeaweedFS behind a proxy: a link of 100 MB "
    "a second that all connections share. Each side is a new process with nothing on the node; "
    "seconds and samples from after its imports, in batches of 32, shuffled.",
    "MosaicML Streaming 0.13.0: `MDSWriter` with its default shards of 67 MB, `StreamingDataset` "
    "and a torch DataLoader without workers. Ours: `ObjectStorage(mirror=...)` and `Loader`, over "
    "a `ShardedDataset` of a shuffle's shards, and over a `GPTDataset` of one token file.",
    "The link: our samples a second, start included, beside those of 100 MB. In a random order the "
    "first hundreds of samples need every block, and most are read when all blocks are there.",
]

OURS = """
import json, sys, time
import obstore.store
from millrace import GPTDataset, IndexedDataset, Loader, ShardedDataset
from millrace.storage.objects import ObjectStorage
folder, length, batch, place = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
begin = time.perf_counter()
storage = ObjectStorage(folder=f"{folder}/copies", mirror=f"{folder}/mirror", limit=1 << 40)
if place == "shards":
    dataset = ShardedDataset("s3://train/shards", storage=storage)
else:
    dataset = IndexedDataset("s3://train/d0", storage=storage)
    dataset = GPTDataset(dataset, sequence_length=length, seed=1, add_extra_token=False)
seen = first = 0
with Loader(dataset, micro_batch_size=batch, drop_last=False, fields=["tokens"]) as loader:
    for one in loader:
        first = first or time.perf_counter() - begin
        seen += len(one["tokens"])
print(json.dumps([first, seen / (time.perf_counter() - begin)]))
"""
WRITE = """
import sys
import numpy as np, streaming
tokens, out, length = np.memmap(sys.argv[1], np.uint16), sys.argv[2], int(sys.argv[3])
with streaming.MDSWriter(out=out, columns={"row": f"ndarray:uint16:{length}"}) as writer:
    for row in tokens.reshape(-1, length):
        writer.write({"row": np.ascontiguousarray(row)})
"""
PEER = """
import json, sys, time
import numpy as np, streaming, torch.utils.data
folder, length, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
collate = lambda rows: np.stack([row["row"] for row in rows]).astype(np.int64)
begin = time.perf_counter()
options = dict(shuffle=True, shuffle_seed=1, batch_size=batch)
dataset = streaming.StreamingDataset(remote="s3://train/mds", local=folder, **options)
seen = first = 0
for one in torch.utils.data.DataLoader(dataset, batch, collate_fn=collate):
    first = first or time.perf_counter() - begin
    seen += len(one)
print(json.dumps([first, seen / (time.perf_counter() - begin)]))
"""


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--peer", default=sys.executable, help="a Python with Streaming")
    options = arguments.parse_args()
    runs, num_samples = number_of_runs(options), 5_000 if options.quick else 100_000
    report = Report("A mirror of all the data: a cold epoch", NOTES, runs, peer="Streaming or link")
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        data = folder / "data"
        data.mkdir()
        write(data / "d0", [100 * LENGTH] * (num_samples // 100))
        tokens = np.fromfile(data / "d0.bin", np.uint16).reshape(-1, LENGTH)
        write_sequences(data / "shards", tokens, num_shards=max(num_samples // 6_000, 1))
        command = [options.peer, "-c", WRITE, str(data / "d0.bin"), str(data / "mds"), str(LENGTH)]
        subprocess.run(command, check=True)
        with serving(data, 0.0, is_store=True, rate=RATE) as address:
            environment = {
                **os.environ,
                **servers.environment_for(address),
                "AWS_DEFAULT_REGION": "us-east-1",
                "S3_ENDPOINT_URL": address,
            }

            def epoch(python: str, script: str, place: str = "") -> tuple[float, float]:
                with tempfile.TemporaryDirectory(dir=folder) as node:
                    command = [python, "-c", script, node, str(LENGTH), str(BATCH), place]
                    out = subprocess.run(command, env=environment, check=True, capture_output=True)
                first, rate = json.loads(out.stdout.splitlines()[-1])
                return first, rate

            sides = {
                "shards": lambda: epoch(sys.executable, OURS, "shards"),
                "random": lambda: epoch(sys.executable, OURS, "random"),
                "Streaming": lambda: epoch(options.peer, PEER),
            }
            results = {side: np.array(each).T for side, each in alternate(runs, sides).items()}
        streaming = results["Streaming"].tolist()
        link = [RATE / (2 * LENGTH)] * runs
        for place, order in (("shards", "the shards of a shuffle"), ("random", "a random order")):
            firsts, rates = zip(results[place].tolist(), streaming, strict=True)
            report.rows += [
                Row.compare(f"{order}: first batch", *firsts, "s", better=LOWER, bar=5),
                Row.compare(f"{order}: epoch", *rates, "samples/s", better=HIGHER, bar=2),
                Row.compare(
                    f"{order}: link",
                    rates[0],
                    link,
                    "samples/s",
                    better=HIGHER,
                    bar=0.9 if place == "shards" else None,
                ),
            ]
    finish(report, options)


if __name__ == "__main__":
    main()
