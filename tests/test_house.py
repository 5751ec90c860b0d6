"""The rules of the house: what imports what, what an import costs, what the README promises."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import millrace

ROOT = Path(__file__).parent.parent
SOURCE = Path(millrace.__file__).parent

# Imports point down this list only; rooms on one line know nothing of each other.
FLOORS = [
    {"cores", "dtypes", "errors", "files", "interrupts"},
    {"checks"},
    {"_core"},
    {"_native", "reference"},
    {"store", "order"},
    {"cache", "text"},
    {"feed"},
    {"run"},
    {"jobs", "inspect", "torch"},
    {"megatron"},
    {"demo"},
    {"cli"},
    {"__main__"},
]


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if node.module == "millrace" else {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_imports_point_down() -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    seen = set()
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        seen.add(parts[0])
        for module in imports_of(path):
            if not module.startswith("millrace."):
                continue
            other = room_of(module)
            if other == parts[0]:
                continue
            assert floor[other] < floor[parts[0]], f"{path} imports {module}"
    assert seen <= set(floor)


def test_no_name_hides_a_module() -> None:
    """A package's attribute with the name of one of its modules is that module."""
    modules = [info.name for info in pkgutil.walk_packages(millrace.__path__, "millrace.")]
    for module in modules:
        if module != "millrace.__main__":
            importlib.import_module(module)
    for module in modules:
        package, _, name = module.rpartition(".")
        value = getattr(sys.modules[package], name, None)
        assert value is sys.modules.get(module), f"{package}.{name} is {value!r}"


def test_torch_is_imported_in_two_rooms_alone() -> None:
    users = {
        path.relative_to(SOURCE).with_suffix("").parts[0]
        for path in SOURCE.rglob("*.py")
        if any(m.split(".")[0] == "torch" for m in imports_of(path))
    }
    assert users == {"megatron", "torch"}


def test_nothing_stands_on_the_drop_in() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.parent.name != "megatron":
            assert not any(m.startswith("millrace.megatron") for m in imports_of(path)), path


def test_the_import_needs_numpy_alone() -> None:
    """Everything but numpy and the standard library is made impossible to import."""
    code = (
        "import sys\n"
        "for name in ('torch', 'tokenizers', 'backports', 'zstandard', 'megatron'):\n"
        "    sys.modules[name] = None\n"
        "import millrace\n"
        "print(sorted(n for n in sys.modules if n.startswith('millrace.text')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_every_public_name_is_there_and_documented() -> None:
    for name in millrace.__all__:
        assert getattr(millrace, name).__doc__, name


def test_the_stub_names_what_the_core_has() -> None:
    from millrace import _core

    tree = ast.parse((SOURCE / "_core.pyi").read_text())
    stub = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    assert stub == {name for name in dir(_core) if not name.startswith("_")}


def test_every_kernel_has_a_twin() -> None:
    from millrace import _native, reference

    for name, value in vars(_native).items():
        if callable(value) and not name.startswith("_") and value.__module__ == _native.__name__:
            assert hasattr(reference, name), name


def test_the_readmes_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (ROOT / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert examples
    monkeypatch.chdir(tmp_path)
    for example in examples:
        exec(compile(example, "README.md", "exec"), {"__name__": "readme"})


def test_the_readmes_tree_names_what_is_there() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = re.search(r"```text\n(src/millrace/.*?)```", readme, re.DOTALL)
    assert tree
    named = {line.split()[0].rstrip("/") for line in tree[1].splitlines()[1:] if line.strip()}
    there = {
        path.name
        for path in SOURCE.iterdir()
        if path.name not in ("__pycache__", "py.typed") and path.suffix != ".so"
    }
    assert there <= named | {"_core.pyi", "__main__.py"}


def test_examples_run() -> None:
    for path in sorted((ROOT / "examples").glob("*.py")):
        result = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
        assert result.returncode == 0, f"{path}: {result.stderr}"
