"""Token files without an index: headerless ones, and arrays of NumPy."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, DataError
from millrace.store import RawTokens


@pytest.mark.parametrize("access", ["mmap", "file"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32", "int64"])
@pytest.mark.parametrize("name", ["headerless.npy", "tokens.bin", "array.npy"])
def test_the_tokens_are_those_of_the_file(
    tmp_path: Path, name: str, dtype: str, access: Any
) -> None:
    values = np.random.default_rng(1).integers(0, 120, 2000).astype(dtype)
    path = tmp_path / name
    if name == "array.npy":
        np.save(path, values)
    else:
        path.write_bytes(values.tobytes())
    tokens = RawTokens(path, None if name == "array.npy" else dtype, access=access)
    assert tokens.num_tokens == 2000
    assert tokens.dtype == ("int32" if dtype == "uint32" else dtype)
    assert tokens.is_mapped == (access == "mmap")
    size = tokens.dtype.itemsize
    read = tokens.reader.gather(np.array([7 * size, 0]), np.array([5 * size, size]))
    assert read.view(tokens.dtype).tolist() == [*values[7:12], values[0]]
    assert tokens.reader.read(3 * size, size).view(tokens.dtype)[0] == values[3]
    again = pickle.loads(pickle.dumps(tokens))
    assert again.fingerprint == tokens.fingerprint
    with pytest.raises(ConfigError, match="documents are not known"):
        tokens.documents_of(np.array([0]))
    path.write_bytes(path.read_bytes()[:-size] + b"\x7f" * size)
    with pytest.raises(DataError, match="other data"):
        pickle.loads(pickle.dumps(tokens))


def test_an_empty_file_has_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    tokens = RawTokens(tmp_path / "empty", "uint16")
    assert tokens.num_tokens == 0
    assert tokens.token_source() is not None


def test_other_files_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.arange(10, dtype=np.uint16))
    np.save(tmp_path / "rows.npy", np.zeros((3, 2), np.uint16))
    np.save(tmp_path / "floats.npy", np.zeros(3))
    np.save(tmp_path / "big.npy", np.arange(3, dtype=">i4"))
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "damaged.npy").write_bytes((tmp_path / "array.npy").read_bytes()[:70])
    (tmp_path / "cut.npy").write_bytes((tmp_path / "array.npy").read_bytes()[:-2])
    cases: list[tuple[str, Any, type[Exception], str]] = [
        ("absent.bin", "uint16", DataError, "not found"),
        ("odd.bin", "uint16", DataError, "3 bytes"),
        ("odd.bin", None, ConfigError, "no header"),
        ("odd.bin", "float32", ConfigError, "float32"),
        ("odd.bin", "nonsense", ConfigError, "nonsense"),
        ("array.npy", "int32", ConfigError, "says uint16"),
        ("rows.npy", None, DataError, r"shape \(3, 2\)"),
        ("floats.npy", None, ConfigError, "float64"),
        ("big.npy", None, ConfigError, ">i4"),
        ("damaged.npy", None, DataError, "header"),
        ("cut.npy", None, DataError, r"shape \(10,\)"),
    ]
    for name, dtype, kind, message in cases:
        with pytest.raises(kind, match=message):
            RawTokens(tmp_path / name, dtype)
