// Reads of a blend's two arrays.
#pragma once

#include <cstdint>
#include <span>

#include "column.hpp"

namespace millrace {

// From which dataset, and as which of its samples, a blend draws some of its samples. Throws
// std::out_of_range for a sample that there is not. Call it inside read_mapped.
void look_up_draws(Column<std::int16_t> dataset_index, Column<std::int64_t> dataset_sample_index,
                   Column<std::int64_t> sample_numbers, std::span<std::int16_t> datasets,
                   std::span<std::int64_t> dataset_samples);

}  // namespace millrace
