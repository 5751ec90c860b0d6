// Transforms of samples.
#include "transforms.hpp"

#include "arrays.hpp"
#include "mapping.hpp"

namespace millrace {
namespace {

using Numbers = In<std::int64_t>;
using Marks = Out<std::uint8_t>;
using Ranges =
    nb::ndarray<const std::int32_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::tuple<Out<std::int64_t>, Out<std::int64_t>> py_fill_in_middle(
    const Numbers& tokens, const Numbers& ends, const Numbers& sample_numbers, double rate,
    double spm_rate, std::int64_t prefix_token, std::int64_t middle_token,
    std::int64_t suffix_token, std::optional<std::int64_t> eod_token,
    std::optional<std::int64_t> pad_token, std::uint64_t seed) {
  const FillInMiddle options{rate,         spm_rate,  prefix_token, middle_token,
                             suffix_token, eod_token, pad_token,    seed};
  auto tokens_out = allocate<std::int64_t>(tokens.shape(0));
  Out<std::int64_t> take = make_array<std::int64_t>(tokens.shape(0), [&](auto out) {
    fill_in_middle(span_of(tokens), span_of(ends), span_of(sample_numbers), options,
                   tokens_out.span(), out);
  });
  return {to_numpy(std::move(tokens_out)), take};
}

Marks py_mark_repeats(const Numbers& tokens, const Numbers& ends, std::int64_t max_period,
                      std::int64_t min_repeats, bool is_whole) {
  return make_array<std::uint8_t>(tokens.shape(0), [&](auto out) {
    mark_repeats(span_of(tokens), span_of(ends), max_period, min_repeats, is_whole, out);
  });
}

Marks py_mark_ranges(const Ranges& ranges, const Numbers& sequences,
                     const Numbers& offsets, const Numbers& counts) {
  const auto size = static_cast<std::size_t>(sum_of_counts(span_of(counts)));
  return make_array<std::uint8_t>(size, [&](auto out) {
    read_mapped([&] {
      mark_ranges({ranges.data(), ranges.size()}, span_of(sequences), span_of(offsets), span_of(counts), out);
    });
  });
}

Out<float> py_mask_losses(const Rows& loss_masks, const In<std::uint8_t>& flags,
                          const Numbers& ends) {
  auto out = allocate<float>(loss_masks.size());
  {
    nb::gil_scoped_release unlocked;
    mask_losses({loss_masks.data(), loss_masks.size()},
                static_cast<std::int64_t>(loss_masks.shape(1)), span_of(flags), span_of(ends),
                out.span());
  }
  float* data = out.data.release();
  nb::capsule owner(data, [](void* pointer) noexcept { FreeMemory{}(pointer); });
  return Out<float>(data, {loss_masks.shape(0), loss_masks.shape(1)}, owner);
}

}  // namespace

void add_transforms(nb::module_& module) {
  module.def("fill_in_middle", &py_fill_in_middle, "tokens"_array, "ends"_array,
             "sample_numbers"_array, "rate"_a, "spm_rate"_a, "prefix_token"_a, "middle_token"_a,
             "suffix_token"_a, "eod_token"_a.none(), "pad_token"_a.none(), "seed"_a);
  module.def("mark_repeats", &py_mark_repeats, "tokens"_array, "ends"_array, "max_period"_a,
             "min_repeats"_a, "is_whole"_a);
  module.def("mark_ranges", &py_mark_ranges, "ranges"_array, "sequences"_array, "offsets"_array,
             "counts"_array);
  module.def("mask_losses", &py_mask_losses, "loss_masks"_a, "flags"_array, "ends"_array);
}

}  // namespace millrace
