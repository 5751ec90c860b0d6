"""inspect of a folder of shards: counts, domains, the distribution, and its picture."""

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, DataError
from millrace.inspect import describe_shards, format_shards, shares_svg
from millrace.ragged import even_sizes
from millrace.shards import ShardsMetadata, read_metadata
from millrace.shuffling.permutations import Permutation, distribution_json, measure_distribution
from tests.shard_folders import (
    make_sequences,
    sizes_of,
    write_documents,
    write_like_the_script,
    write_sequences,
)

TOTAL = 1000
SEQUENCES = make_sequences(TOTAL, 4)


def distribution_of(domains: dict[str, int], num_shards: int) -> dict[str, Any]:
    total = sum(domains.values())
    permutation = Permutation("keyed", total, 1)
    return distribution_json(
        measure_distribution(permutation, domains, even_sizes(total, num_shards))
    )


def metadata_of(domains: dict[str, int], num_shards: int = 4) -> ShardsMetadata:
    total = sum(domains.values())
    return ShardsMetadata(
        seq_len=4,
        total_sequences=total,
        num_shards=num_shards,
        domain_stats=domains,
        shard_sizes=sizes_of(total, num_shards),
        distribution=distribution_of(domains, num_shards),
    )


def write_shards(folder: Path, domains: dict[str, int]) -> Path:
    distribution = distribution_of(domains, 3)
    write_sequences(folder, SEQUENCES, domain_stats=domains, distribution=distribution)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "out", {"code": 300, "empty": 0, "web": 700})


def test_a_folder_in_numbers(folder: Path) -> None:
    description = describe_shards(folder, document=999)
    assert (description.num_tokens, description.num_bytes) == (4 * TOTAL, 16 * TOTAL)
    assert replace(description.metadata, distribution={}) == description.metadata
    assert description.document is not None
    assert description.document["head"]["tokens"] == SEQUENCES[999].tolist()
    assert description.document["shard"] == 2
    assert description.distribution is not None
    assert [figures["parts"] for figures in description.distribution.values()] == [1, 3, 64]
    shards = description.distribution["shards"]
    assert shards["part"] == "shard"
    assert 0 < abs(shards["largest_deviation"]) < 4
    assert description.distribution["windows"]["degrees"] == 0  # too few items
    text = format_shards(description)
    for line in (
        "sequences of 4 tokens",
        "4,000 (uint32)",
        "3 of 333 to 334 sequences",
        "30.00%  300",
        f"3 shards: largest deviation {shards['largest_deviation']:+.1f} sigma (shard ",
        "sequence 999 (in shard 2), 4 tokens:",
    ):
        assert line in text, text
    with pytest.raises(
        ConfigError, match=r"the document of .* must be between 0 and 999, not 1000"
    ):
        describe_shards(folder, document=1000)


def test_a_folder_of_the_common_script(tmp_path: Path) -> None:
    sequences = make_sequences(10, 300, np.uint16)
    write_like_the_script(tmp_path / "out", sequences)
    description = describe_shards(tmp_path / "out", dtype="uint16", document=5)
    assert description.distribution is None
    text = format_shards(description)
    assert "domain_A" in text
    assert "seed" not in text
    assert "sequence 5 (in shard 1), 300 tokens:" in text
    assert str(sequences[5, 256:].tolist()) in text  # the tail
    with pytest.raises(DataError, match="of another dtype"):
        describe_shards(tmp_path / "out")
    with pytest.raises(ConfigError, match="has no distribution"):
        shares_svg(read_metadata(tmp_path / "out", dtype="uint16"), folder=tmp_path / "out")


def test_a_folder_of_documents(tmp_path: Path) -> None:
    write_documents(tmp_path / "out", [[[1, 2, 3], [4]], [[5, 6]], [[7]]])
    for number, tokens in enumerate([[1, 2, 3], [4], [5, 6], [7]]):
        description = describe_shards(tmp_path / "out", document=number)
        assert description.document is not None
        assert description.document["head"]["tokens"] == tokens
    assert description.num_tokens == 7
    text = format_shards(description)
    assert "3 of 1 to 2 documents" in text
    assert "document 3 (in shard 2), 1 tokens:" in text
    for end in ("bin", "idx"):
        shutil.copy(tmp_path / "out" / f"shard_0002.{end}", tmp_path / "out" / f"shard_0000.{end}")
    with pytest.raises(DataError, match=r"shard_0000\.idx has 1 documents; metadata.json says 2"):
        describe_shards(tmp_path / "out", document=1)


def test_the_text_of_a_sequence_is_decoded(tmp_path: Path, tokenizer_file: Path) -> None:
    from millrace.encoding import Tokenizer

    tokenizer = Tokenizer(tokenizer_file)
    ids, _ = tokenizer.encode_batch(["the water\x1b[2J\nturns"])
    write_sequences(tmp_path / "out", np.array([ids, ids], np.uint16), num_shards=1)
    text = format_shards(describe_shards(tmp_path / "out", tokenizer=tokenizer, document=1))
    assert "  | the water\\x1b[2J\n  | turns" in text


@pytest.mark.parametrize(
    "change",
    [
        {"domains": ["code", "web"]},
        {"domains": None},
        {"shards": {"counts": [[300, 0, 700]] * 3}},
        {"shards": {"counts": [[300, 0, 700], [0, 0, 0]]}},
        {"windows": {"counts": [[300, 700]]}},
        {"windows": {"counts": [[300, 0, -700], [0, 0, 1400]]}},
        {"windows": {"counts": [[300, 0], [700]]}},
        {"windows": {"counts": [[2**70, 0, 700]]}},
        {"windows": []},
        {"head": {"counts": [[301, 0, 1]]}},
    ],
)
def test_a_damaged_distribution_is_an_error(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "metadata.json"
    document = json.loads(path.read_text())
    document["distribution"] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="the distribution do not fit domain_stats"):
        describe_shards(folder)


# ---- the picture ----


def texts_of(picture: str) -> list[str]:
    tags = ElementTree.fromstring(picture).iter()
    return [tag.text or "" for tag in tags if tag.tag.endswith("text")]


def test_the_picture_has_a_band_for_each_domain(folder: Path) -> None:
    metadata = read_metadata(folder)
    picture = shares_svg(metadata, folder=folder)
    texts = texts_of(picture)
    assert f"{folder}: 1,000 sequences in 3 shards, 64 windows" in texts
    assert "code 30.00%" in texts
    assert "web 70.00%" in texts
    assert not any("empty" in text for text in texts)
    tops = [float(top) for top in re.findall(r'd="M70 284V([\d.]+)H.*Z"', picture)]
    windows, place = (metadata.distribution[name] for name in ("windows", "domains"))
    code = windows["counts"][0][place.index("code")] / windows["sizes"][0]
    assert tops == [64, pytest.approx(284 - 220 * code, abs=0.06)]  # in this order
    assert 'd="M70 218.0H670" stroke="#fff"' in picture  # 30 % are expected
    assert picture == shares_svg(metadata, folder=folder)


def test_many_domains_and_strange_names() -> None:
    names = [f"domain {number}" for number in range(30)] + ['<&"> \x01\udc80', "x" * 300]
    domains = {name: 5 + 3 * number for number, name in enumerate(names)}
    picture = shares_svg(metadata_of(domains))
    picture.encode()
    texts = texts_of(picture)
    assert any(text.startswith("22 smaller domains") for text in texts)
    assert any(text.startswith('<&"> ?? ') for text in texts)
    assert all(len(text) < 100 for text in texts)


@pytest.mark.parametrize("domains", [{"a": 1}, {"a": 1, "b": 1}, {"a": 3, "b": 0}])
def test_the_smallest_outputs_have_pictures(domains: dict[str, int]) -> None:
    assert texts_of(shares_svg(metadata_of(domains, num_shards=1)))
