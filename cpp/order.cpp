#include "order.hpp"

namespace millrace {

void collect_spans(const Order& order, Column<std::int64_t> sample_numbers,
                   std::vector<Span>& spans, std::span<std::int64_t> bounds) {
  bounds[0] = 0;
  for (std::size_t i = 0; i < sample_numbers.size(); ++i) {
    order.append_spans(sample_numbers[i], spans);
    bounds[i + 1] = static_cast<std::int64_t>(spans.size());
  }
}

}  // namespace millrace
