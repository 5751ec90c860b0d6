"""`demo`."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.demo import run_demo
from millrace.option_class import option
from millrace.verbs import Verb


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options of `demo`."""

    folder: str = option("output folder", "millrace-demo", metavar="DIR")


def _demo(folder: str = DemoOptions.folder) -> str:
    run_demo(folder)
    return ""


VERBS = (
    Verb(
        "demo",
        _demo,
        (DemoOptions,),
        "Runs the whole pipeline on the text of Python's standard library. Makes a corpus of "
        "source files and docstrings, trains a small tokenizer, tokenises both domains, blends "
        "them, draws batches for 2 ranks, stops, resumes with 4, and checks that no sample was "
        "lost or repeated. Needs no network.",
    ),
)
