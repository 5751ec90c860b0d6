"""The options of a tokenise job: each is described once, as a field."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from millrace import checks
from millrace.encoding import Tokenizer
from millrace.encoding.row_encoders import RowEncoder, check_encoder
from millrace.engine import ENGINES
from millrace.engine.uploading import check_target
from millrace.errors import ConfigError
from millrace.option_class import Options, StrPath, option, parse_escapes, parse_size
from millrace.text import Format, InputFile, SentenceSplitter, check_keys

CHECK_RATE = 0.0002
"""Share of documents that are compared with the reference library. It is up to 80 times slower than
a fast encoder: 1.6 % of the time."""

_MOST_PAIRS = 256  # that a task writes at once: each has open files


def _instance(kind: type, module: str, name: str, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    class_ = kind.__name__
    raise ConfigError(f"{name} must be a {class_}: write {module}.{class_}({checks.shown(value)})")


def _shard(name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ConfigError(f"{name} must be a pair (number, count), not {checks.shown(value)}")
    count = checks.check_int("the number of shards", value[1], 1)
    return checks.check_int(name, value[0], 0, count - 1), count


def _parse_shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal()):
        raise ConfigError(f"{text!r} is not a shard: write 0/8 for the first of 8")
    return int(number), int(count)


_input = partial(option, group="input")
_encoding = partial(option, group="tokenizer")
_documents = partial(option, group="documents", identity="never")
_job = partial(option, group="job", identity="never")
_resources = partial(option, group="resources", identity="never")
_size = partial(_resources, default=None, least=1, parse=parse_size, metavar="SIZE")


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(Options):
    """The options of a tokenise job; a ConfigError for one that cannot work."""

    # fmt: off
    inputs: Sequence[StrPath | InputFile] = _input(
        "files, folders, patterns, or - for standard input", check=lambda name, value: value,
        flags="--input", metavar="FILE", required=False, identity="never")
    json_keys: Sequence[str] = _input(
        "text keys or columns; dots reach into objects; each becomes a dataset", ("text",),
        metavar="KEY", check=lambda name, value: check_keys(value))
    separator: str | None = _input(
        r"text between the documents of a plain text file: '\n\n'", None,
        default_text="a file is a document", parse=parse_escapes)
    format: Format | None = option(
        "format of all inputs; None: their names and first bytes tell it", None,
        check=lambda name, value: value, flags=None, identity="never")
    id_key: str = _input("key of a document's id, for the provenance", "id", metavar="KEY")
    shard: tuple[int, int] | None = _input(
        "do part I (from 0) of N, with a prefix of its own; `merge` joins them", None,
        check=_shard, parse=_parse_shard, metavar="I/N")
    tokenizer: Tokenizer = option(
        "tokenizer.json, transformers folder, sentencepiece .model, .tiktoken, or `bytes`",
        check=partial(_instance, Tokenizer, "millrace.encoding"), parse=str, metavar="FILE",
        identity="never", group="tokenizer")
    row_encoder: RowEncoder | None = option(
        "encoder of whole rows, in place of the texts of a key", None,
        check=check_encoder, flags=None, identity="never")
    append_eod: bool = _encoding("end documents with the tokenizer's end-of-document token", False)
    prepend_bos: bool = _encoding("start documents with the tokenizer's BOS token", False)
    check_rate: float = _encoding(
        "share of documents that are compared with the reference library", CHECK_RATE,
        least=0, most=1, flags="--check", metavar="RATE", identity="never")
    splitter: SentenceSplitter | None = option(
        "splitter of texts into sentences: each is a sequence, in PREFIX_KEY_sentence", None,
        check=partial(_instance, SentenceSplitter, "millrace.text"), flags=None, identity="never")
    partitions: int = _documents(
        "deal documents round robin to N groups, and write one group after the other", 1, least=1)
    keep_sequential_samples: bool = _documents(
        "divide documents into consecutive groups instead, so that their order is kept", False)
    on_error: str = _documents(
        "at lines that are not documents: stop; skip them; or also keep them in "
        "PREFIX.quarantine.jsonl", "stop", choices=("stop", "skip", "quarantine"))
    max_document_size: int = _documents(
        "longest line or text in bytes: a longer one is not a document", 100_000_000,
        least=1, default_text="100M", parse=parse_size, metavar="SIZE")
    provenance: str = _documents(
        "sidecar with the origin of each document", "parquet", choices=("parquet", "none"))
    output_prefix: StrPath = option(
        "first part of the output paths; the folder must exist",
        metavar="PREFIX", identity="never", group="job")
    upload_to: str | None = _job(
        "first part of the paths in a bucket to which the finished output moves", None,
        check=check_target, metavar="s3://BUCKET/KEY")
    checksums: bool = _job("write no checksums of the output, for `verify`", True)
    engine: str = _resources(
        "where the job runs: here, or on the Ray cluster of RAY_ADDRESS, or one of its own",
        "local", choices=ENGINES)
    workers: int | None = _resources(
        "worker processes", None, least=1, default_text="one per core, fewer for a small input")
    memory: int | None = _size(
        "limit for all processes, which may mean fewer workers: 280 MB and 20 times "
        "--max-document-size each", default_text="that of the machine")
    chunk_size: int | None = _size(
        "input that a worker takes at a time, and that a kill may cost",
        default_text="by the size of the input")
    restart: bool = _job(
        "discard what a job with this prefix has done, and replace its output", False)
    show_progress: bool = option("show progress on stderr", False, flags=None, identity="never")
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_local(os.fspath(self.output_prefix))
        _ = self.edge_tokens  # raises an error if they are not known
        count, num_keys = self.num_partitions, len(self.json_keys)
        others: dict[str, Any] = {"json_keys but one": num_keys > 1, "partitions": count > 1}
        others |= {name: getattr(self, name) for name in ("splitter", "append_eod", "prepend_bos")}
        if self.row_encoder is not None and (names := [name for name in others if others[name]]):
            what = "--chat, as any row_encoder, decides the documents"
            raise ConfigError(f"{what}: leave out {', '.join(names)}")
        if self.shard is not None and count > 1:
            raise ConfigError(
                f"partitions is {count}, which deals the documents of the whole input: shards "
                "cannot do it, as each reads a part. Leave one of the two out"
            )
        if count * num_keys > _MOST_PAIRS:
            raise ConfigError(
                f"partitions is {count} and there are {num_keys} keys, so each task would write "
                f"{count * num_keys} pairs at once; at most {_MOST_PAIRS} are possible"
            )

    @property
    def edge_tokens(self) -> tuple[int | None, int | None]:
        """The tokens before and after each document."""
        return self.tokenizer.edge_tokens(self.prepend_bos, self.append_eod)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the tokens."""
        return self.tokenizer.dtype if self.row_encoder is None else self.row_encoder.dtype

    @property
    def num_partitions(self) -> int:
        """Number of groups to which documents are dealt; 1 keeps their order."""
        return 1 if self.keep_sequential_samples else self.partitions

    @property
    def prefixes(self) -> dict[str, str]:
        """Path prefix of the indexed dataset of each key, where it is made."""
        return self.prefixes_from(self.output_prefix)

    @property
    def final_prefixes(self) -> dict[str, str]:
        """The same when the job has ended."""
        return self.prefixes_from(self.upload_to or self.output_prefix)

    def prefixes_from(self, first: StrPath) -> dict[str, str]:
        """The same with another first part of the paths."""
        level = "document" if self.splitter is None else "sentence"
        return {key: f"{first}_{key}_{level}" for key in self.json_keys}
