// Numbers alone: shuffles, permutations, the sample index, blends.
#include "arrays.hpp"
#include "balance.hpp"
#include "blend.hpp"
#include "mapping.hpp"
#include "mixture_tree.hpp"
#include "mt19937.hpp"
#include "packing.hpp"
#include "sample_index.hpp"
#include "shuffle.hpp"
#include "swap_or_not.hpp"

namespace millrace {
namespace {

using Ranges =
    nb::ndarray<const std::int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using Key = In<std::uint32_t>;

// The state after the draws, as numpy.random.RandomState.set_state() takes it.
using RandomState = std::tuple<Out<std::uint32_t>, int>;

// An array that `draw` fills from a random state, and the state after it.
template <class T, class Draw>
std::tuple<Out<T>, RandomState> make_drawn(std::size_t size, const Key& key, int position,
                                           Draw draw) {
  if (key.shape(0) != Mt19937::state_size || position < 0 || position > Mt19937::state_size) {
    fail("an MT19937 state has 624 words and a position in [0, 624]");
  }
  Mt19937::Key words;
  std::copy_n(key.data(), words.size(), words.begin());
  Mt19937 random(words, position);
  Out<T> numbers = make_array<T>(size, [&](std::span<T> out) { draw(out, random); });
  Out<std::uint32_t> state = make_array<std::uint32_t>(
      words.size(), [&](auto out) { std::copy_n(random.key().begin(), out.size(), out.begin()); });
  return {numbers, {state, random.position()}};
}

template <class T>
auto py_shuffled_ranges(const Ranges& ranges, const In<T>& /* like */, const Key& key,
                        int position) {
  std::vector<Range> list;
  std::size_t size = 0;
  for (std::size_t i = 0; i < ranges.shape(0); ++i) {
    list.push_back({ranges(i, 0), ranges(i, 1), ranges(i, 2)});
    size += static_cast<std::size_t>(list.back().size());
  }
  return make_drawn<T>(size, key, position, [&](std::span<T> out, Mt19937& random) {
    shuffle_ranges(list, out, random);
  });
}

auto py_draw_targets(std::int64_t first, std::size_t count, const Key& key, int position) {
  if (first < 0 || count > static_cast<std::size_t>(first)) {
    fail("count is ", count, " and first is ", first, "; count <= first is needed");
  }
  return make_drawn<std::int64_t>(count, key, position, [&](auto out, Mt19937& random) {
    draw_targets(first, out, random);
  });
}

template <class T>
Out<T> py_torch_randperm(std::size_t size, std::uint32_t seed, bool has_64_bit_draws,
                         const In<T>& /* like */) {
  Mt19937 random(seed);
  return make_array<T>(
      size, [&](std::span<T> out) { randperm(out, has_64_bit_draws, random); });
}

Out<std::int64_t> py_swap_or_not(const In<std::int64_t>& numbers, std::int64_t size,
                                 std::uint64_t key, bool is_inverse) {
  return make_array<std::int64_t>(numbers.shape(0), [&](std::span<std::int64_t> out) {
    swap_or_not(column_of(numbers), size, key, is_inverse, out);
  });
}

std::tuple<Out<std::int64_t>, Out<std::int64_t>> py_pack(const In<std::int32_t>& lengths,
                                                         std::int64_t capacity) {
  Packs packs;
  {
    nb::gil_scoped_release unlocked;
    packs = pack(column_of(lengths), capacity);
  }
  const auto copy = [](const std::vector<std::int64_t>& numbers) {
    return make_array<std::int64_t>(
        numbers.size(), [&](auto out) { std::copy(numbers.begin(), numbers.end(), out.begin()); });
  };
  return {copy(packs.documents), copy(packs.ends)};
}

Out<std::int64_t> py_deal(const In<double>& costs, std::size_t num_ranks) {
  return make_array<std::int64_t>(
      costs.shape(0), [&](auto ranks) { deal(span_of(costs), num_ranks, ranks); });
}

template <class T>
Out<T> py_sample_index(const In<std::int32_t>& sequence_lengths,
                       const In<std::int32_t>& document_index, std::int64_t sequence_length,
                       std::size_t num_samples, bool add_extra_token, bool allow_partial,
                       const In<T>& /* like */) {
  return make_array<T>(2 * (num_samples + 1), [&](std::span<T> rows) {
    walk_samples(column_of(sequence_lengths), column_of(document_index), sequence_length,
                 std::int64_t{add_extra_token ? 1 : 0}, allow_partial, rows);
  });
}

using Blend = std::tuple<Out<std::int16_t>, Out<std::int64_t>>;

template <class Fill>
Blend make_blend(std::size_t size, Fill fill) {
  auto dataset_index = allocate<std::int16_t>(size);
  auto dataset_sample_index = allocate<std::int64_t>(size);
  {
    nb::gil_scoped_release unlocked;
    fill(dataset_index.span(), dataset_sample_index.span());
  }
  return {to_numpy(std::move(dataset_index)), to_numpy(std::move(dataset_sample_index))};
}

Blend py_blend_by_weights(const In<double>& weights, std::size_t size, int threads) {
  return make_blend(size, [&](auto dataset_index, auto dataset_sample_index) {
    blend_by_weights(span_of(weights), dataset_index, dataset_sample_index, threads);
  });
}

Blend py_blend_by_sizes(const In<std::int64_t>& sizes, std::size_t total, int threads) {
  return make_blend(total, [&](auto dataset_index, auto dataset_sample_index) {
    blend_by_sizes(span_of(sizes), dataset_index, dataset_sample_index, threads);
  });
}

void make_tree(MixtureTree* self, const In<std::int64_t>& shares, const In<std::int64_t>& debts) {
  new (self) MixtureTree(column_of(shares), column_of(debts));
}

std::tuple<Out<std::int32_t>, Out<std::int64_t>> draw_from_tree(
    const MixtureTree& tree, const In<std::int64_t>& sample_numbers) {
  auto leaves = allocate<std::int32_t>(sample_numbers.shape(0));
  auto numbers = allocate<std::int64_t>(sample_numbers.shape(0));
  {
    nb::gil_scoped_release unlocked;
    tree.draw(column_of(sample_numbers), leaves.span(), numbers.span());
  }
  return {to_numpy(std::move(leaves)), to_numpy(std::move(numbers))};
}

Out<std::int64_t> count_in_tree(const MixtureTree& tree, std::int64_t number) {
  return make_array<std::int64_t>(static_cast<std::size_t>(tree.num_leaves()),
                                  [&](auto counts) { tree.count(number, counts); });
}

// So short that the GIL is kept.
Blend py_look_up_draws(const In<std::int16_t>& dataset_index,
                       const In<std::int64_t>& dataset_sample_index,
                       const In<std::int64_t>& sample_numbers) {
  if (dataset_sample_index.shape(0) != dataset_index.shape(0)) {
    fail("dataset_index and dataset_sample_index differ in size");
  }
  auto datasets = allocate<std::int16_t>(sample_numbers.shape(0));
  auto samples = allocate<std::int64_t>(sample_numbers.shape(0));
  read_mapped([&] {
    take(column_of(dataset_index), column_of(sample_numbers), datasets.span());
    take(column_of(dataset_sample_index), column_of(sample_numbers), samples.span());
  });
  return {to_numpy(std::move(datasets)), to_numpy(std::move(samples))};
}

}  // namespace

void add_order(nb::module_& module) {
  // One function for each type: the first one whose dtype fits is called.
  const auto add_shuffled_ranges = [&module]<class T>(T) {
    module.def("shuffled_ranges", &py_shuffled_ranges<T>, "ranges"_array, "like"_array,
               "key"_array, "position"_a);
  };
  add_shuffled_ranges(std::int32_t{});
  add_shuffled_ranges(std::uint32_t{});
  add_shuffled_ranges(std::int64_t{});
  module.def("draw_targets", &py_draw_targets, "first"_a, "count"_a, "key"_array, "position"_a);
  const auto add_randperm = [&module]<class T>(T) {
    module.def("torch_randperm", &py_torch_randperm<T>, "size"_a, "seed"_a, "has_64_bit_draws"_a,
               "like"_array);
  };
  add_randperm(std::uint32_t{});
  add_randperm(std::int64_t{});
  module.def("swap_or_not", &py_swap_or_not, "numbers"_array, "size"_a, "key"_a, "is_inverse"_a);
  module.def("deal", &py_deal, "costs"_array, "num_ranks"_a);
  module.def("pack", &py_pack, "lengths"_array, "capacity"_a);
  const auto add_sample_index = [&module]<class T>(T) {
    module.def("sample_index", &py_sample_index<T>, "sequence_lengths"_array,
               "document_index"_array, "sequence_length"_a, "num_samples"_a, "add_extra_token"_a,
               "allow_partial"_a, "like"_array);
  };
  add_sample_index(std::int32_t{});
  add_sample_index(std::int64_t{});
  module.def("blend_by_weights", &py_blend_by_weights, "weights"_array, "size"_a, "threads"_a);
  module.def("blend_by_sizes", &py_blend_by_sizes, "sizes"_array, "total"_a, "threads"_a);
  nb::class_<MixtureTree>(module, "MixtureTree")
      .def("__init__", &make_tree, "shares"_array, "debts"_array)
      .def("draws", &draw_from_tree, "sample_numbers"_array)
      .def("counts", &count_in_tree, "number"_a);
  module.def("look_up_draws", &py_look_up_draws, "dataset_index"_array, "dataset_sample_index"_array,
             "sample_numbers"_array);
}

}  // namespace millrace
