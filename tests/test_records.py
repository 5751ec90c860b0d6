"""Records in JSON files: every type of a field, and what an error names."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from millrace.records import Count, record_from


@dataclass(frozen=True, kw_only=True)
class File:
    path: str
    sizes: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Record:
    kind: Literal["a", "b"]
    count: Count
    share: float
    files: list[File]
    seed: Annotated[int, 0, 9] | None = None
    is_new: bool = False
    sums: dict[str, int] = field(default_factory=dict)
    rest: Any = None


VALUE: dict[str, Any] = {
    "kind": "a",
    "count": 3,
    "share": 1,
    "files": [{"path": "x", "sizes": [1, 2]}, {"path": "y", "sizes": [3, 4], "more": 1}],
    "sums": {"p": 5},
}


def test_a_record_has_the_types_of_its_annotations() -> None:
    files = [File(path="x", sizes=(1, 2)), File(path="y", sizes=(3, 4))]
    expected = Record(kind="a", count=3, share=1.0, files=files, sums={"p": 5})
    assert record_from(Record, VALUE) == expected
    assert record_from(Record, {**VALUE, "seed": 9, "rest": [{}]}).rest == [{}]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"kind": "c"}, "R.kind"),
        ({"count": -1}, "R.count"),
        ({"count": 2**63}, "R.count"),
        ({"count": True}, "R.count"),
        ({"share": "1"}, "R.share"),
        ({"seed": 10}, "R.seed"),
        ({"is_new": 1}, "R.is_new"),
        ({"sums": {"p": "5"}}, "R.sums.p"),
        ({"sums": []}, "R.sums"),
        ({"files": {}}, "R.files"),
        ({"files": [VALUE["files"][0], {"path": "y", "sizes": [1, 2, 3]}]}, r"R.files\[1\].sizes"),
        ({"files": [{"path": "y", "sizes": [1, None]}]}, r"R.files\[0\].sizes\[1\]"),
        ({"files": [{"sizes": [1, 2]}]}, r"R.files\[0\].path"),
    ],
)
def test_the_error_names_the_place(change: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=f"^{place} must be "):
        record_from(Record, {**VALUE, **change}, "R")


@pytest.mark.parametrize("value", [None, [], "x", 5])
def test_a_record_is_an_object(value: Any) -> None:
    with pytest.raises(ValueError, match="R must be an object"):
        record_from(Record, value, "R")
