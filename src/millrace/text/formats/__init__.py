"""The formats of input files: a class for each, and a line in `known_formats` to find its files.

Others can be used as well: `find_inputs(..., format=MyFormat())`.
"""

from millrace.text.formats.arrow_tables import Arrow, Parquet
from millrace.text.formats.csv_table import Csv
from millrace.text.formats.separated_records import JsonLines, PlainText
from millrace.text.parts import Format

__all__ = ["Arrow", "Csv", "JsonLines", "Parquet", "PlainText", "known_formats"]


def known_formats(separator: str | None = None) -> list[Format]:
    """The formats that the names and first bytes of files tell; other files have the first."""
    return [
        JsonLines(),
        Parquet(),
        Arrow(),
        Csv("csv", ",", (".csv",)),
        Csv("tsv", "\t", (".tsv", ".tab")),
        PlainText(separator),
    ]
