"""The rules of the house: imports, dependencies, documentation, and the README's examples."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import millrace

ROOT = Path(__file__).parent.parent
SOURCE = Path(millrace.__file__).parent

# Imports point down this list only; rooms on one line do not import each other.
FLOORS = [
    {"cores", "deferred", "errors", "forks", "interrupts", "names", "ragged"},
    {"checks"},
    {"_core", "files", "option_class", "records"},
    {"_native"},
    {"storage"},
    {"store", "order"},
    {"provenance"},
    {"shards"},
    {"cache", "text"},
    {"encoding"},
    {"samples", "sampling", "chats"},
    {"feed", "outputs"},
    {"engine"},
    {"tokenizing", "shuffling"},
    {"online", "run"},
    {"jobs", "inspect", "testing", "torch"},
    {"huggingface", "lightning", "megatron"},
    {"demo"},
    {"verbs"},
    {"cli"},
    {"__main__"},
]


# Lines of a room, lines of a file, lines of a function's body, attributes of a class. What outgrows
# these is told that a noun is missing; an exception has its present size and its reason.
ROOM, FILE, BODY, CLASS = 2000, 450, 50, 12
LARGER_ROOMS = {
    "shuffling": (2072, "two kinds of items, two plans, a check of the distribution"),
    "megatron": (2289, "the names of another library"),
    "order": (2005, "three orders, each with its mixture; windows of mixed documents"),
    "run": (2179, "two orders, each with a configuration and datasets; trials"),
    "store": (2165, "verification could be a room of its own"),
    "samples": (2211, "token batches, rows, transforms, and the way through the core"),
}
WIDER_CLASSES = {
    **dict.fromkeys(("IndexOptions", "RunConfig"), "Megatron-LM's arguments"),
    "Loader": "a sampler's place, a queue, the last step",
    **dict.fromkeys(("TokenizeOptions", "ShuffleOptions"), "the options of a verb"),
    **dict.fromkeys(("Description", "BenchResult", "Measurement", "Forecast"), "a report"),
    **dict.fromkeys(("TokenizeResult", "ShuffleResult"), "a report"),
    "Output": "every file that a job writes",
    "ShardsMetadata": "the entries of metadata.json",
    **dict.fromkeys(("BlendedMegatronDatasetConfig", "GPTDatasetConfig"), "Megatron-LM's fields"),
}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= names if node.module == "millrace" else {node.module}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return modules


def test_imports_point_down() -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    rooms_in_source = set()
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        rooms_in_source.add(parts[0])
        for module in imports_of(path):
            if not module.startswith("millrace."):
                continue
            other = room_of(module)
            if other == parts[0]:
                continue
            assert floor[other] < floor[parts[0]], f"{path} imports {module}"
    assert rooms_in_source <= set(floor)


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_rooms_and_files_can_be_read() -> None:
    rooms: dict[str, int] = {}
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        assert num_lines(path) <= FILE, name
        if "/" in name:
            room = name.split("/")[0]
            rooms[room] = rooms.get(room, 0) + num_lines(path)
    for room, size in rooms.items():
        limit, _ = LARGER_ROOMS.get(room, (ROOM, ""))
        assert size <= limit, f"{room} has {size} lines"


def test_functions_and_classes_can_be_read() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                is_described = ast.get_docstring(node) is not None and len(node.body) > 1
                first = node.body[1 if is_described else 0]
                size = node.body[-1].end_lineno - first.lineno + 1  # type: ignore[operator]
                assert size <= BODY, f"{path}: {node.name} has {size} lines"
            elif isinstance(node, ast.ClassDef) and node.name not in WIDER_CLASSES:
                names = attributes_of(node)
                assert len(names) <= CLASS, f"{path}: {node.name} has {sorted(names)}"


def attributes_of(class_: ast.ClassDef) -> set[str]:
    """The annotated names of a class, and what its methods assign to `self`."""
    body = [ast.unparse(node.target) for node in class_.body if isinstance(node, ast.AnnAssign)]
    stored = [
        ast.unparse(node).split(".", 1)
        for node in ast.walk(class_)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    return {*body, *(name for owner, name in stored if owner == "self" and "." not in name)}


def test_no_two_rooms_have_a_module_of_one_name() -> None:
    """But for the drop-in's, which are Megatron-LM's."""
    modules = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    names = [path.stem for path in modules if path.parent.name != "megatron"]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_no_name_hides_a_module() -> None:
    """A package's attribute with the name of one of its modules is that module."""
    slow = (".__main__", ".lightning", ".huggingface")  # trainers take seconds
    modules = [info.name for info in pkgutil.walk_packages(millrace.__path__, "millrace.")]
    for module in modules:
        if not module.endswith(slow):
            importlib.import_module(module)
    for module in modules:
        package, _, name = module.rpartition(".")
        value = getattr(sys.modules[package], name, None)
        assert value is sys.modules.get(module), f"{package}.{name} is {value!r}"


def test_only_two_rooms_import_torch() -> None:
    users = {
        path.relative_to(SOURCE).with_suffix("").parts[0]
        for path in SOURCE.rglob("*.py")
        if any(m.split(".")[0] == "torch" for m in imports_of(path))
    }
    assert users == {"megatron", "torch"}


def test_no_room_imports_the_drop_in() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.parent.name != "megatron":
            assert not any(m.startswith("millrace.megatron") for m in imports_of(path)), path


def test_paths_are_made_absolute_in_one_way() -> None:
    """Python's own functions name another file where a link stands before `..`."""
    for path in SOURCE.rglob("*.py"):
        assert not re.search(r"(abspath|normpath)\(", path.read_text()), path


def test_the_import_needs_only_numpy() -> None:
    """The subprocess cannot import the optional dependencies."""
    code = (
        "import sys\n"
        "for name in ('torch', 'tokenizers', 'backports', 'zstandard', 'megatron', 'obstore'):\n"
        "    sys.modules[name] = None\n"
        "import millrace\n"
        "print(sorted(n for n in sys.modules if n.startswith('millrace.text')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_every_public_name_is_documented() -> None:
    packages = re.findall(r"`(millrace\.[a-z]+)`[,;]", (ROOT / "docs" / "public.md").read_text())
    assert len(packages) > 9
    for package in map(importlib.import_module, ["millrace", *packages]):
        for name in package.__all__:
            value = getattr(package, name)
            is_code = inspect.isclass(value) or inspect.isroutine(value)
            assert value.__doc__ or not is_code, f"{package.__name__}.{name}"


def test_one_module_alone_imports_the_core() -> None:
    users = {path.name for path in SOURCE.rglob("*.py") if "millrace._core" in imports_of(path)}
    assert users == {"_native.py"}


def test_every_kernel_has_a_twin() -> None:
    from millrace import _native
    from tests.kernels import reference

    without = {"Order", "TokenBuffer", "map_file", "start_writeback"}  # they compute nothing
    without.add("PackOrder")  # whose slow packer is in tests/order/test_packed.py
    without |= {"InstantOrder", "MixtureTree"}  # theirs is tests/order/instant_model.py
    for name, value in vars(_native).items():
        if callable(value) and value.__module__ in ("millrace._native", "millrace._core"):
            assert name.startswith("_") or name in without or hasattr(reference, name), name


def test_the_readmes_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (ROOT / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert examples
    monkeypatch.chdir(tmp_path)
    for example in examples:
        exec(compile(example, "README.md", "exec"), {"__name__": "readme"})


def test_the_readmes_tree_is_complete() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = re.search(r"```text\n(src/millrace/.*?)```", readme, re.DOTALL)
    assert tree
    names_in_tree = {
        line.split()[0].rstrip("/") for line in tree[1].splitlines()[1:] if line.strip()
    }
    names_in_source = {
        path.name
        for path in SOURCE.iterdir()
        if path.name not in ("__pycache__", "py.typed") and path.suffix != ".so"
    }
    assert names_in_source <= names_in_tree | {"_core.pyi", "__main__.py"}


def test_examples_run() -> None:
    for path in sorted((ROOT / "examples").glob("*.py")):
        result = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
        assert result.returncode == 0, f"{path}: {result.stderr}"
