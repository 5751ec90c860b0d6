#include "blend.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

namespace millrace {
namespace {

// Draws until the outputs are full, over the datasets in `open` (ascending); `limit[d]` is the
// number of samples after which d is spent.
void draw(std::span<const double> weights, std::vector<std::size_t> open,
          std::span<const std::int64_t> limits, std::span<std::int16_t> dataset_index,
          std::span<std::int64_t> dataset_sample_index) {
  std::vector<std::int64_t> taken(weights.size(), 0);
  for (std::size_t sample = 0; sample < dataset_index.size(); ++sample) {
    const double position = static_cast<double>(std::max<std::size_t>(sample, 1));
    std::size_t best = open[0];
    double best_error = weights[best] * position - static_cast<double>(taken[best]);
    for (std::size_t i = 1; i < open.size(); ++i) {
      const std::size_t dataset = open[i];
      const double error = weights[dataset] * position - static_cast<double>(taken[dataset]);
      if (error > best_error) {
        best = dataset;
        best_error = error;
      }
    }
    dataset_index[sample] = static_cast<std::int16_t>(best);
    dataset_sample_index[sample] = taken[best]++;
    if (!limits.empty() && taken[best] == limits[best]) {
      open.erase(std::find(open.begin(), open.end(), best));
    }
  }
}

}  // namespace

void blend_by_weights(std::span<const double> weights, std::span<std::int16_t> dataset_index,
                      std::span<std::int64_t> dataset_sample_index) {
  std::vector<std::size_t> open(weights.size());
  std::iota(open.begin(), open.end(), std::size_t{0});
  draw(weights, std::move(open), {}, dataset_index, dataset_sample_index);
}

void blend_by_sizes(std::span<const std::int64_t> sizes, std::span<std::int16_t> dataset_index,
                    std::span<std::int64_t> dataset_sample_index) {
  const auto total = static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
  std::vector<double> weights;
  std::vector<std::size_t> open;
  for (std::size_t dataset = 0; dataset < sizes.size(); ++dataset) {
    weights.push_back(static_cast<double>(sizes[dataset]) / total);
    if (sizes[dataset] > 0) {
      open.push_back(dataset);
    }
  }
  draw(weights, std::move(open), sizes, dataset_index, dataset_sample_index);
}

}  // namespace millrace
