// Blends.
#include "blend.hpp"

#include "arrays.hpp"
#include "draws.hpp"
#include "mapping.hpp"

namespace millrace {
namespace {

using Blend = std::tuple<Out<std::int16_t>, Out<std::int64_t>>;

// The two arrays of a blend, which `work` fills.
template <class Work>
Blend make_blend(std::int64_t size, Work work) {
  auto dataset_index = allocate<std::int16_t>(static_cast<std::size_t>(size));
  auto dataset_sample_index = allocate<std::int64_t>(static_cast<std::size_t>(size));
  work(dataset_index.span(), dataset_sample_index.span());
  return {to_numpy(std::move(dataset_index)), to_numpy(std::move(dataset_sample_index))};
}

Blend py_blend_by_weights(const In<double>& weights, std::int64_t size, int threads) {
  return make_blend(size, [&](auto dataset_index, auto dataset_sample_index) {
    nb::gil_scoped_release unlocked;
    blend_by_weights(span_of(weights), dataset_index, dataset_sample_index, threads);
  });
}

Blend py_blend_by_sizes(const In<std::int64_t>& sizes, std::int64_t total, int threads) {
  return make_blend(total, [&](auto dataset_index, auto dataset_sample_index) {
    nb::gil_scoped_release unlocked;
    blend_by_sizes(span_of(sizes), dataset_index, dataset_sample_index, threads);
  });
}

Blend py_look_up_draws(const In<std::int16_t>& dataset_index,
                       const In<std::int64_t>& dataset_sample_index,
                       const In<std::int64_t>& sample_numbers) {
  const auto size = static_cast<std::int64_t>(sample_numbers.shape(0));
  return make_blend(size, [&](auto datasets, auto dataset_samples) {
    read_mapped([&] {
      look_up_draws(column_of(dataset_index), column_of(dataset_sample_index),
                    column_of(sample_numbers), datasets, dataset_samples);
    });
  });
}

}  // namespace

void add_blend(nb::module_& module) {
  module.def("blend_by_weights", &py_blend_by_weights, "weights"_a, "size"_a, "threads"_a);
  module.def("blend_by_sizes", &py_blend_by_sizes, "sizes"_a, "total"_a, "threads"_a);
  module.def("look_up_draws", &py_look_up_draws, "dataset_index"_a, "dataset_sample_index"_a,
             "sample_numbers"_a);
}

}  // namespace millrace
