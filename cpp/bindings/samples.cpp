// Batches of samples.
#include "arrays.hpp"
#include "gather.hpp"
#include "mapping.hpp"
#include "rows.hpp"
#include "sources.hpp"

namespace millrace {
namespace {

using Samples = std::tuple<Out<std::int64_t>, Out<std::int64_t>, Out<float>, Out<std::int64_t>>;

// Reads a `millrace.options.SampleOptions`.
SampleOptions options_from(nb::handle options) {
  const auto read = [options]<class T>(T& field, const char* name) {
    field = nb::cast<T>(options.attr(name));
  };
  SampleOptions out{};
  read(out.sequence_length, "sequence_length");
  read(out.add_extra_token, "add_extra_token");
  read(out.eod_token, "eod_token");
  read(out.pad_token, "pad_token");
  read(out.reset_position_ids, "reset_position_ids");
  read(out.eod_mask_loss, "eod_mask_loss");
  return out;
}

// Four arrays of one row for each sample, in one allocation. As four, glibc gives the end of its
// heap back to the kernel with every batch that is freed, and the next batch faults all its pages in
// again: half of the time of a batch.
class Rows {
 public:
  Rows(std::size_t num_rows, std::int64_t sequence_length)
      : num_rows_(num_rows),
        length_(static_cast<std::size_t>(sequence_length)),
        memory_(allocate<std::int64_t>(3 * size() + (size() + 1) / 2)) {}

  SampleRow first() noexcept {
    std::int64_t* tokens = memory_.data.get();
    return {tokens, tokens + size(), reinterpret_cast<float*>(tokens + 3 * size()),
            tokens + 2 * size()};
  }

  Samples take() {
    const SampleRow row = first();
    nb::capsule owner(memory_.data.release(),
                      [](void* pointer) noexcept { FreeMemory{}(pointer); });
    const std::initializer_list<std::size_t> shape{num_rows_, length_};
    return {Out<std::int64_t>(row.tokens, shape, owner),
            Out<std::int64_t>(row.labels, shape, owner), Out<float>(row.loss_mask, shape, owner),
            Out<std::int64_t>(row.position_ids, shape, owner)};
  }

 private:
  std::size_t size() const noexcept { return num_rows_ * length_; }

  std::size_t num_rows_;
  std::size_t length_;
  Buffer<std::int64_t> memory_;
};

Samples py_gather_samples(const nb::tuple& token_sources, const nb::tuple& orders,
                          const In<std::int64_t>& source_numbers,
                          const In<std::int64_t>& sample_numbers, nb::handle options) {
  const std::size_t num_samples = sample_numbers.shape(0);
  if (source_numbers.shape(0) != num_samples || token_sources.size() != orders.size()) {
    throw std::invalid_argument(
        "source_numbers and sample_numbers, or token_sources and orders, differ in size");
  }
  std::vector<SampleSource> sources;
  sources.reserve(num_samples);
  for (std::size_t i = 0; i < num_samples; ++i) {
    const std::int64_t number = column_of(source_numbers)[i];
    if (number < 0 || static_cast<std::size_t>(number) >= orders.size()) {
      throw std::invalid_argument("source number " + std::to_string(number) + " is outside [0, " +
                                  std::to_string(orders.size()) + ")");
    }
    const auto place = static_cast<std::size_t>(number);
    sources.push_back({&nb::cast<const PyTokenSource&>(token_sources[place]),
                       &nb::cast<const Order&>(orders[place])});
    if (!sources.back().tokens->is_mapped()) {
      throw std::invalid_argument("source " + std::to_string(number) + " is not mapped");
    }
  }
  const SampleOptions plain = options_from(options);
  Rows rows(num_samples, plain.sequence_length);
  {
    nb::gil_scoped_release unlocked;
    GatherSpace space;
    read_mapped([&] {
      gather_samples(sources, column_of(sample_numbers), plain, rows.first(), space);
    });
  }
  return rows.take();
}

Samples py_fill_rows(const AnyArray& tokens, const In<std::int64_t>& ends, nb::handle options) {
  const SampleOptions plain = options_from(options);
  const Tokens typed = tokens_of(tokens);
  const auto num_tokens = static_cast<std::int64_t>(tokens.size());
  Rows rows(ends.shape(0), plain.sequence_length);
  {
    nb::gil_scoped_release unlocked;
    fill_rows(typed, num_tokens, column_of(ends), plain, rows.first());
  }
  return rows.take();
}

}  // namespace

void add_samples(nb::module_& module) {
  module.def("gather_samples", &py_gather_samples, "token_sources"_a, "orders"_a,
             "source_numbers"_a, "sample_numbers"_a, "options"_a);
  module.def("fill_rows", &py_fill_rows, "tokens"_a, "ends"_a, "options"_a);
}

}  // namespace millrace
