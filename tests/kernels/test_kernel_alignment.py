"""Arrays that start at any byte, as the columns of a mapped index do: the results are the same.

On most machines a misaligned load works by itself; `make sanitize` is where these tests can fail.
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import write_documents
from tests.kernels.test_kernel_gather import OPTIONS, gpt_order, make_arrays, token_source
from tests.kernels.twins import assert_same

from millrace import GPTDataset, IndexedDataset, _native


def moved(array: np.ndarray) -> np.ndarray:
    """The same array, at an odd address."""
    memory = np.frombuffer(bytearray(array.nbytes + 64), np.uint8)
    start = 1 - memory.ctypes.data % 2
    there = memory[start : start + array.nbytes]
    there[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    out = there.view(array.dtype).reshape(array.shape)
    assert out.ctypes.data % 2 == 1
    return out


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("index_dtypes", [(np.int32, np.uint32), (np.int64, np.int64)])
def test_samples(dtype: Any, index_dtypes: tuple[Any, Any]) -> None:
    arrays = make_arrays(3, 8, extra=True, dtype=dtype, index_dtypes=index_dtypes)
    numbers = np.arange(len(arrays["shuffle_index"]))

    def results(place: Callable[[np.ndarray], np.ndarray]) -> list[Any]:
        there = {name: place(array) for name, array in arrays.items()}
        source, order = token_source(_native, there), gpt_order(_native, there)
        zeros, chosen = place(np.zeros_like(numbers)), place(numbers)
        samples = _native.gather_samples((source,), (order,), zeros, chosen, OPTIONS)
        spans = _native.spans(order, chosen)
        return [*samples, *spans, *_native.locate_spans(source, *map(place, spans[:3]))]

    assert_same(results(moved), results(np.asarray))


Calls = list[tuple[Callable[..., Any], tuple[Any, ...]]]


def calls() -> tuple[Calls, Calls]:
    """The kernels that read columns of mapped files, and those that take other arrays, each with
    arguments. For orders, see their own tests."""
    arrays = make_arrays(3, 8, extra=True, dtype=np.uint16)
    source, order = token_source(_native, arrays), gpt_order(_native, arrays)
    two, ends, sizes = np.zeros(2, np.int64), np.array([2, 4]), np.array([4, 2], np.int32)
    places, data, masks = np.array([0, 1]), np.zeros(20, np.uint8), np.ones((2, 3), np.float32)
    numbers, batch = np.array([0, 1], np.int16), ((source, source), (order, order), two, places)
    lengths = np.array([3, 0, 5, 2], np.int32)
    fim = dict.fromkeys(("prefix_token", "middle_token", "suffix_token", "seed"), 0)
    of_files: Calls = [
        (_native.copy_pieces, (data, places, ends)),
        (_native.prefetch_mapped, (data, places, ends)),
        (_native.prefetch_file, (0, 20, places, ends)),
        (_native.read_packed, (0, 20, two, two)),
        (_native.read_pieces, (0, two, two, data, two)),
        (_native.copy_sequences, (data, two, sizes, places, 2)),
        (_native.first_bad_sequence, (sizes, two, 2, 0)),
        (_native.first_bad_document, (ends, 4)),
        (_native.find_documents, (ends, places)),
        (_native.look_up_draws, (numbers, ends, places)),
        (_native.locate_spans, (source, places, two, two)),
        (_native.spans, (order, places)),
        (_native.gather_samples, (*batch, OPTIONS)),
        (_native.gather_tokens, batch),
        (partial(_native.fill_rows, moved(np.arange(4, dtype=np.uint16))), (ends, OPTIONS)),
        (_native.swap_or_not, (places, 9, 1, False)),
        (_native.sample_index, (sizes, numbers.astype(np.int32), 2, 2)),
        (_native.sample_index, (lengths, np.array([2, 0, 3, 1], np.int32), 2, 4)),
        (_native.first_bad_sequence, (lengths, np.array([0, 6, 6, 16]), 2, 0)),
        (_native.copy_sequences, (data, np.array([0, 6, 6, 16]), lengths, np.array([2, -1, 0]), 2)),
    ]
    of_others: Calls = [
        (_native.blend_by_weights, (np.array([0.5, 0.5]), 4)),
        (_native.blend_by_sizes, (ends,)),
        (_native.mark_repeats, (np.arange(4), ends, 1, 2, False)),
        (_native.mark_ranges, (np.zeros((2, 3), np.int32), two, two, two)),
        (partial(_native.mask_losses, masks), (data[:4], ends)),
        (
            partial(_native.fill_in_middle, rate=1, spm_rate=1, eod_token=0, pad_token=1, **fim),
            (np.arange(4), ends, places),
        ),
    ]
    return of_files, of_others


def test_arrays_at_odd_addresses_give_the_same_or_are_refused() -> None:
    of_files, of_others = calls()
    for place, (function, arguments) in enumerate(of_files + of_others):
        there = [moved(a) if isinstance(a, np.ndarray) else a for a in arguments]
        expected = function(*arguments)
        if place < len(of_files):
            assert_same(function(*there), expected)
        else:
            with pytest.raises(ValueError, match="not aligned"):
                function(*there)


def test_arrays_of_other_shapes_steps_and_dtypes_are_refused() -> None:
    """They would be read beyond their ends."""
    for function, arguments in itertools.chain(*calls()):
        for place, array in enumerate(arguments):
            if isinstance(array, np.ndarray):
                tall = array if array.ndim == 2 else array[:, None]
                for wrong in (np.repeat(array, 2, axis=0)[::2], tall[None], array.astype("f2")):
                    with pytest.raises((TypeError, ValueError), match=r"incompat|dtype|operand"):
                        function(*arguments[:place], wrong, *arguments[place + 1 :])


def test_views_and_samples_of_a_mapped_file(tmp_path: Path) -> None:
    write_documents(tmp_path / "data", [range(n) for n in (3, 0, 40, 17, 1, 9, 30)], np.int32)
    dataset = IndexedDataset(tmp_path / "data")
    assert not dataset.sequence_pointers.flags.aligned
    assert [len(view) for view in dataset] == [3, 0, 40, 17, 1, 9, 30]
    assert dataset[2].tolist() == list(range(40))
    samples = GPTDataset(dataset, sequence_length=4, seed=0, num_samples=100)
    assert samples.batch(np.arange(100))["tokens"].shape == (100, 4)


def test_slices_with_steps_of_any_size(tmp_path: Path) -> None:
    write_documents(tmp_path / "data", [[number] for number in range(9)])
    dataset = IndexedDataset(tmp_path / "data")
    steps = (1, 2, -3, sys.maxsize, -sys.maxsize - 1, 10**30, -(10**30))
    for cut in itertools.starmap(slice, itertools.product((None, 5, -20), (None, -20), steps)):
        assert [int(view[0]) for view in dataset[cut]] == list(range(9))[cut]
