#include "draws.hpp"

#include <stdexcept>
#include <string>

namespace millrace {

void look_up_draws(Column<std::int16_t> dataset_index, Column<std::int64_t> dataset_sample_index,
                   Column<std::int64_t> sample_numbers, std::span<std::int16_t> datasets,
                   std::span<std::int64_t> dataset_samples) {
  if (dataset_sample_index.size() != dataset_index.size()) {
    throw std::invalid_argument("dataset_index and dataset_sample_index differ in size");
  }
  const auto size = static_cast<std::int64_t>(dataset_index.size());
  for (std::size_t i = 0; i < sample_numbers.size(); ++i) {
    const std::int64_t number = sample_numbers[i];
    if (number < 0 || number >= size) {
      throw std::out_of_range("there is no sample " + std::to_string(number) +
                              "; the blend has 0 to " + std::to_string(size - 1));
    }
    datasets[i] = dataset_index[static_cast<std::size_t>(number)];
    dataset_samples[i] = dataset_sample_index[static_cast<std::size_t>(number)];
  }
}

}  // namespace millrace
