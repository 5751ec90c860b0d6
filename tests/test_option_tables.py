"""The tables of options in the docs are those of the option classes.

`python -m tests.test_option_tables` writes them anew.
"""

import re
from pathlib import Path

import pytest

from millrace import names
from millrace.cli import VERBS
from millrace.option_class import Field, fields_of

DOCS = Path(__file__).parent.parent / "docs"
TABLE = re.compile(r"(<!-- options of ([a-z -]+) -->\n)(.*?)(?=\n<!-- end -->)", re.DOTALL)
CLASSES = {verb.name: verb.option_classes for verb in VERBS}


def option_table(*option_classes: type) -> str:
    """The options of a verb as a table, in Markdown."""
    rows: list[tuple[str, ...]] = [("option", "default", "what it is"), ("---", "---", "---")]
    fields = [field for option_class in option_classes for field in fields_of(option_class)]
    for field in sorted(fields, key=lambda field: not field.is_required):
        if field.flags:
            is_required = field.is_required and field.settings().get("required", True)
            default = "required" if is_required else field.default_text
            cells = f"`{usage_of(field)}`", default, field.option.help
            rows.append(tuple(cell.replace("|", "\\|") for cell in cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def usage_of(field: Field) -> str:
    """The option as it is typed: `--workers N`."""
    settings = field.settings()
    value = settings.get("metavar") or "|".join(settings.get("choices", ()))
    if not field.flags[0].startswith("-"):
        return value or field.flags[0]
    value = " ".join(value) if isinstance(value, tuple) else value
    value += " ..." if settings.get("nargs") in ("+", "*") else ""
    return f"{field.flags[-1]} {value}".rstrip()


def with_tables(text: str) -> str:
    """A page with the present tables."""
    return TABLE.sub(lambda match: match[1] + option_table(*CLASSES[match[2]]).rstrip(), text)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_the_tables_of_options_are_those_of_the_classes(page: Path) -> None:
    text = page.read_text()
    assert text == with_tables(text), "run `python -m tests.test_option_tables`"


def test_every_verb_with_more_than_an_option_has_a_table() -> None:
    text = "".join(page.read_text() for page in DOCS.glob("*.md"))
    verbs = {match[2] for match in TABLE.finditer(text)}
    assert CLASSES.keys() - verbs == {"cache list", "cache check", "demo"}


def test_every_ending_has_a_row_in_the_table_of_files() -> None:
    table = (DOCS / "files.md").read_text().partition("## Every file that is written")[2]
    endings = [value for name, value in vars(names).items() if name.isupper() and "." in value]
    assert len(endings) > 8
    for ending in endings:
        if isinstance(ending, str) and ending != names.DOLMA:  # which earlier versions wrote
            assert ending in table, ending


if __name__ == "__main__":
    for path in DOCS.glob("*.md"):
        path.write_text(with_tables(path.read_text()))
