"""`LINK/../FILE` is the file that the system opens: beside the folder that LINK leads to."""

import json
import pickle
import shutil
from pathlib import Path

import pytest

from millrace import GPTDataset, IndexedDataset, ShardedDataset, storage
from millrace.checks import absolute_path
from millrace.cli import main
from millrace.jobs import split
from tests.conftest import make_texts, train_tokenizer, write_documents, write_jsonl


def test_paths_without_links_are_as_python_joins_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path / "a")
    folder = str(tmp_path)
    for path, expected in {
        "x": f"{folder}/a/x",
        "../x": f"{folder}/x",
        f"{folder}//a/./b/../x/": f"{folder}/a/x",
        f"{folder}/link/x": f"{folder}/link/x",
        f"{folder}/link/y/../x": f"{folder}/link/x",
        "../link/../x": f"{folder}/a/x",
        f"{folder}/link/..": f"{folder}/a",
        "/..": "/",
    }.items():
        assert absolute_path(path) == expected


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders with files of the same names; `here/link/..` is `far`."""
    home = tmp_path_factory.mktemp("links")
    for number, name in enumerate(("far", "here")):
        folder = home / name
        (folder / "domains" / "web").mkdir(parents=True)
        documents = [[number, n, 9, 9, 9, 9] for n in range(40)]
        for prefix in ("data", "domains/web/data", "many_00007"):
            write_documents(folder / prefix, documents)
        write_jsonl(folder / "a.jsonl", make_texts(60, seed=number))
        train_tokenizer(folder / "tokenizer.json")
    (home / "far" / "inner").mkdir()
    (home / "here" / "link").symlink_to(home / "far" / "inner")
    return home / "far", home / "here"


COMMANDS = {
    "tokenize": (
        "tokenize --input P/a.jsonl --tokenizer P/tokenizer.json --output-prefix P/out --workers 1"
    ),
    "train": "train-tokenizer --input P/a.jsonl --output P/out.json --vocab-size 270",
    "merge": "merge P/data P/data --output-prefix P/out",
    "split": "split P/data --documents 9 --output-prefix P/out",
    "convert": "convert P/data P/out.npy",
    "index": (
        "index --data-path P/data --split 8,1,1 --seq-length 8 --num-samples 9 2 none --cache P/out"
    ),
    "shuffle": "shuffle --input-dir P/domains --seq-len 4 --output-dir P/out --num-shards 2",
    "inspect": "inspect P/data --tokenizer P/tokenizer.json",
    "verify": "verify P/data P/many_00007",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_verb_takes_the_file_that_the_system_opens(
    places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    outcomes = []
    for run, by_link in enumerate((False, True)):
        home = tmp_path / str(run)
        shutil.copytree(places[0].parent, home, symlinks=True)
        link = home / "here" / "link"
        link.unlink()
        link.symlink_to(home / "far" / "inner")
        place = f"{link}/.." if by_link else f"{home}/far"
        before = contents(home / "here")
        assert main(COMMANDS[name].replace("P/", f"{place}/").split()) == 0
        assert contents(home / "here") == before
        files = {path: data for path, data in contents(home / "far").items() if is_data(path)}
        printed = capsys.readouterr().out
        outcomes.append(
            (files, printed.replace(place, "") if name in ("inspect", "verify") else "")
        )
    assert outcomes[0] == outcomes[1]


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def is_data(path: str) -> bool:
    """Whether a file holds no paths, times or checksums of such."""
    return path.endswith((".bin", ".idx", ".npy")) and "tmp" not in path


def test_a_split_leaves_its_input_alone_by_any_path(tmp_path: Path) -> None:
    """`split` removes the surplus shards of an earlier one, but not its input."""
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    write_documents(tmp_path / "far" / "many_00007", [[1]] * 9)
    split(tmp_path / "far" / "many_00007", output_prefix=tmp_path / "far" / "many", documents=4)
    split(tmp_path / "link" / "many_00007", output_prefix=tmp_path / "far" / "many", documents=5)
    prefixes = {path.stem for path in (tmp_path / "far").glob("*.bin")}
    assert prefixes == {"many_00000", "many_00001", "many_00007"}


def test_a_cache_of_data_behind_a_link_stays(
    places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.move(places[1] / "data.idx", tmp_path)  # there is no such file in the other folder
    try:
        cache = tmp_path / "cache"
        run = COMMANDS["index"].replace("P/data", f"{places[1]}/link/../data").split()
        assert main([*run[:-1], str(cache)]) == 0
        capsys.readouterr()
        assert main(["cache", "prune", str(cache), "--dry-run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == []
    finally:
        shutil.move(tmp_path / "data.idx", places[1])


def test_readers_open_their_files_again(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_OPEN", 1)
    far, link = places[0], places[1] / "link" / ".."
    datasets = [IndexedDataset(link / name, access="file") for name in ("data", "many_00007")]
    for dataset in [*datasets, pickle.loads(pickle.dumps(datasets[0]))]:
        assert dataset[3].tolist() == [0, 3, 9, 9, 9, 9]
        samples = GPTDataset(dataset, sequence_length=8, seed=1)
        expected = GPTDataset(IndexedDataset(far / "data"), sequence_length=8, seed=1)
        assert samples[0]["tokens"].tolist() == expected[0]["tokens"].tolist()
    output = tmp_path / "out"
    command = (
        COMMANDS["shuffle"].replace("P/domains", f"{far}/domains").replace("P/", f"{tmp_path}/")
    )
    assert main(command.split()) == 0
    (tmp_path / "out" / "inner").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out" / "inner")
    shards = ShardedDataset(tmp_path / "link" / "..", access="file")
    assert len(pickle.loads(pickle.dumps(shards))) == len(ShardedDataset(output))
