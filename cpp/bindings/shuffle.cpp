// Shuffles.
#include "shuffle.hpp"

#include "arrays.hpp"
#include "mt19937.hpp"

namespace millrace {
namespace {

using Ranges = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The state after the draws, as numpy.random.RandomState.set_state() takes it.
using RandomState = std::tuple<Out<std::uint32_t>, int>;

Mt19937 random_from(const In<std::uint32_t>& key, int position) {
  if (key.shape(0) != Mt19937::state_size || position < 0 || position > Mt19937::state_size) {
    throw std::invalid_argument("an MT19937 state has 624 words and a position in [0, 624]");
  }
  Mt19937::Key words;
  std::copy_n(key.data(), words.size(), words.begin());
  return {words, position};
}

RandomState state_of(const Mt19937& random) {
  auto key = allocate<std::uint32_t>(Mt19937::state_size);
  std::copy(random.key().begin(), random.key().end(), key.data.get());
  return {to_numpy(std::move(key)), random.position()};
}

template <class T>
std::tuple<Out<T>, RandomState> py_shuffled(const In<T>& values, const In<std::uint32_t>& key,
                                            int position) {
  Mt19937 random = random_from(key, position);
  auto out = allocate<T>(values.shape(0));
  {
    nb::gil_scoped_release unlocked;
    std::copy_n(values.data(), values.shape(0), out.data.get());
    shuffle(out.span(), random);
  }
  return {to_numpy(std::move(out)), state_of(random)};
}

template <class T>
std::tuple<Out<T>, RandomState> py_shuffled_ranges(const Ranges& ranges,
                                                   const In<std::uint32_t>& key, int position) {
  Mt19937 random = random_from(key, position);
  std::vector<Range> list;
  std::size_t size = 0;
  for (std::size_t i = 0; i < ranges.shape(0); ++i) {
    list.push_back({ranges(i, 0), ranges(i, 1), ranges(i, 2)});
    size += static_cast<std::size_t>(list.back().size());
  }
  auto out = allocate<T>(size);
  {
    nb::gil_scoped_release unlocked;
    shuffle_ranges(list, out.span(), random);
  }
  return {to_numpy(std::move(out)), state_of(random)};
}

std::tuple<Out<std::int64_t>, RandomState> py_draw_targets(std::int64_t first, std::int64_t count,
                                                           const In<std::uint32_t>& key,
                                                           int position) {
  Mt19937 random = random_from(key, position);
  auto out = allocate<std::int64_t>(static_cast<std::size_t>(count));
  {
    nb::gil_scoped_release unlocked;
    draw_targets(first, out.span(), random);
  }
  return {to_numpy(std::move(out)), state_of(random)};
}

template <class T>
void add_for_type(nb::module_& module, const char* shuffled, const char* shuffled_ranges) {
  module.def(shuffled, &py_shuffled<T>, "values"_a, "key"_a, "position"_a);
  module.def(shuffled_ranges, &py_shuffled_ranges<T>, "ranges"_a, "key"_a, "position"_a);
}

}  // namespace

void add_shuffle(nb::module_& module) {
  add_for_type<std::int32_t>(module, "shuffled_int32", "shuffled_ranges_int32");
  add_for_type<std::uint32_t>(module, "shuffled_uint32", "shuffled_ranges_uint32");
  add_for_type<std::int64_t>(module, "shuffled_int64", "shuffled_ranges_int64");
  module.def("draw_targets", &py_draw_targets, "first"_a, "count"_a, "key"_a, "position"_a);
}

}  // namespace millrace
