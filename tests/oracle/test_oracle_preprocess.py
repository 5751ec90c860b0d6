"""Some random cases of `tests/jobs/preprocess_cases.py`, which runs any number of them."""

import dataclasses
import random
from pathlib import Path

import pytest
from tests.jobs import preprocess_cases as cases


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, cases.Reference]:
    return cases.make_references(tmp_path_factory.mktemp("tokenizers"))


@pytest.mark.parametrize("number", range(12))
def test_a_random_case_is_equal_to_megatrons_output(
    number: int, references: dict[str, cases.Reference], tmp_path: Path
) -> None:
    cases.run_case(cases.random_case(0, number), references, tmp_path)


def test_long_texts_are_split_in_pieces(
    references: dict[str, cases.Reference], tmp_path: Path
) -> None:
    """The script cuts texts into pieces of 1,000,000 characters, also within a sentence."""
    sentence = "Water turns the mill. "
    texts = [sentence * 45_454 + "abcdefghijk", "mill " * 200_001]
    case = dataclasses.replace(
        a_case(texts), split_sentences=True, append_eod=True, chunk_size=500_000, workers=2
    )
    cases.run_case(case, references, tmp_path)


def test_more_partitions_than_documents(
    references: dict[str, cases.Reference], tmp_path: Path
) -> None:
    for number, is_sequential in enumerate([False, True]):
        case = dataclasses.replace(
            a_case(["the mill"]), partitions=3, keep_sequential_samples=is_sequential
        )
        (tmp_path / str(number)).mkdir()
        cases.run_case(case, references, tmp_path / str(number))


def a_case(texts: list[str]) -> cases.Case:
    return cases.Case(
        documents=[{"text": text} for text in texts],
        keys=("text",),
        tokenizer="byte-level BPE",
        append_eod=False,
        add_special_tokens=False,
        split_sentences=False,
        keep_newlines=False,
        partitions=1,
        keep_sequential_samples=False,
        file_format="jsonl",
        compression="",
        num_files=1,
        workers=1,
        chunk_size=1000,
        spelling_seed=random.Random(0).getrandbits(32),
    )


def test_the_command_counts_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert cases.main(["--cases", "1", "--seed", "5"]) == 0
    assert "seed 5: 1 cases, 0 failed" in capsys.readouterr().out
