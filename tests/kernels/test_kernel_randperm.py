"""The twin law for torch_randperm, and torch itself as the definition."""

import zlib
from typing import Any

import numpy as np
import pytest
from tests.kernels import reference, twins

from millrace import _core, _native

# Around the kernel's blocks of 512 targets, the generator's of 624 words, and powers of two.
SIZES = sorted(
    {0, 1, 2, 3, 5000}
    | {size + d for size in (512, 624, 1024, 1248) for d in (-1, 0, 1, 2)}
    | {2**k + d for k in range(1, 13) for d in (-1, 0, 1)}
)
SEEDS = [0, 1, -1, 12345, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, -(2**63)]


def assert_twin(size: int, seed: int, has_64_bit_draws: bool, dtype: Any = np.int64) -> None:
    """With either kind of draws: those of 64 bits belong to sizes that take gigabytes."""
    like = np.empty(0, dtype)
    actual = _core.torch_randperm(size, seed % 2**32, has_64_bit_draws, like)
    expected = reference.torch_randperm(size, seed, dtype=dtype, has_64_bit_draws=has_64_bit_draws)
    np.testing.assert_array_equal(actual, expected, strict=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_torch_randperm_equals_its_twin(size: int, dtype: Any) -> None:
    for seed in SEEDS:
        for has_64_bit_draws in (False, True):
            assert_twin(size, seed, has_64_bit_draws, dtype)
        twins.assert_twin("torch_randperm", size, seed, dtype=dtype)


def assert_equals_torch(size: int, seed: int) -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator()
    generator.manual_seed(seed)
    expected = torch.randperm(size, generator=generator).numpy()
    np.testing.assert_array_equal(_native.torch_randperm(size, seed), expected, strict=True)


def test_torch_randperm_equals_torch() -> None:
    for size in SIZES:
        for seed in SEEDS:
            assert_equals_torch(size, seed)
    for size in (2**16 + 1, 2**20 - 1, 3_000_000):
        assert_equals_torch(size, size)
    random = np.random.default_rng(0)
    for _ in range(2000):
        assert_equals_torch(
            int(random.integers(0, 300)), int(random.integers(0, 2**64, None, "u8"))
        )


# CRC-32 of the first and last 1,000 numbers (int64) that torch 2.13.0 gives on each side of its
# limit, with seed 3. Each array takes 1.7 GB: run by hand,
#     python -c 'from tests.kernels import test_kernel_randperm as t; t.compare_at_the_limit()'
AT_THE_LIMIT = {214_748_363: 1647997914, 214_748_364: 451719763}


def compare_at_the_limit() -> None:
    for size, checksum in AT_THE_LIMIT.items():
        values = _native.torch_randperm(size, 3)
        ends = np.concatenate([values[:1000], values[-1000:]])
        assert zlib.crc32(ends.tobytes()) == checksum, size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(((3, 0, t), "uint32 or int64 is needed") for t in (np.int32, np.uint64, "f8", ">i8")),
        *(((3, seed), "seed must be between") for seed in (-(2**63) - 1, 2**64)),
        ((-1, 0), "size for int64 must be between .* -1"),
        ((2**32 + 1, 0, np.uint32), r"size for uint32 must be between 0 and 2\*\*32"),
        ((2**62, 0), "size for int64 must be between"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    size, seed, *dtype = arguments
    with pytest.raises(ValueError, match=message):
        _native.torch_randperm(size, seed, dtype=dtype[0] if dtype else np.int64)
