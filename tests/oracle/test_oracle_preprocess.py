"""Some random cases of `tests/jobs/preprocess_cases.py`, which runs any number of them."""

from pathlib import Path

import pytest
from tests.jobs import preprocess_cases as cases


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, cases.Reference]:
    return cases.make_references(tmp_path_factory.mktemp("tokenizers"))


@pytest.mark.parametrize(
    "number", [*range(6), *(pytest.param(n, marks=pytest.mark.long) for n in range(6, 24))]
)
def test_a_random_case_is_equal_to_megatrons_output(
    number: int, references: dict[str, cases.Reference], tmp_path: Path
) -> None:
    cases.run_case(cases.random_case(0, number), references, tmp_path)


@pytest.mark.parametrize("is_sequential", [False, True])
def test_more_partitions_than_documents(
    is_sequential: bool, references: dict[str, cases.Reference], tmp_path: Path
) -> None:
    documents = [{"text": "the mill"}]
    case = cases.Case(documents=documents, partitions=3, keep_sequential_samples=is_sequential)
    cases.run_case(case, references, tmp_path)


def test_long_texts_are_split_in_pieces(
    references: dict[str, cases.Reference], tmp_path: Path
) -> None:
    """The script cuts texts into pieces of 1,000,000 characters, also within a sentence."""
    texts = ["Water turns the mill. " * 45_454 + "abcdefghijk", "mill " * 200_001]
    documents, options = [{"text": text} for text in texts], {"chunk_size": 500_000, "workers": 2}
    case = cases.Case(documents=documents, split_sentences=True, append_eod=True, **options)
    cases.run_case(case, references, tmp_path)


def test_the_command_counts_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert cases.main(["--cases", "1", "--seed", "5"]) == 0
    assert "seed 5: 1 cases, 0 failed" in capsys.readouterr().out
