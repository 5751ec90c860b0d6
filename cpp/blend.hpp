// The rules for the dataset of each sample of a blend; blend.cpp tells how they are followed.
#pragma once

#include <cstdint>
#include <span>

namespace millrace {

// The greedy rule: sample n comes from the dataset with the largest error
//     error[d] = weight[d] * max(n, 1) - taken[d]
// in float64, the first of equals; the product and the difference are each rounded (this file is
// compiled without contraction to fused multiply-adds). `dataset_index` gets d,
// `dataset_sample_index` the number of samples taken from d before. The result does not depend on
// the number of threads.
void blend_by_weights(std::span<const double> weights, std::span<std::int16_t> dataset_index,
                      std::span<std::int64_t> dataset_sample_index, int threads);

// The exhaustive rule: the same with weights size[d] / sum(sizes), over the datasets that are not
// spent, until every dataset is. The outputs hold sum(sizes) numbers.
void blend_by_sizes(std::span<const std::int64_t> sizes, std::span<std::int16_t> dataset_index,
                    std::span<std::int64_t> dataset_sample_index, int threads);

}  // namespace millrace
