// Token sources, orders, and batches of samples.
#include "arrays.hpp"
#include "gather.hpp"
#include "gpt_order.hpp"
#include "mapping.hpp"
#include "order.hpp"
#include "rows.hpp"
#include "tokens.hpp"

namespace millrace {
namespace {

using Numbers = Out<std::int64_t>;
using Samples = std::tuple<Numbers, Numbers, Out<float>, Numbers>;

Tokens tokens_of(const AnyArray& array) {
  const void* data = array.data();
  const nb::dlpack::dtype dtype = array.dtype();
  if (dtype == nb::dtype<std::uint8_t>()) return static_cast<const std::uint8_t*>(data);
  if (dtype == nb::dtype<std::int8_t>()) return static_cast<const std::int8_t*>(data);
  if (dtype == nb::dtype<std::int16_t>()) return static_cast<const std::int16_t*>(data);
  if (dtype == nb::dtype<std::uint16_t>()) return static_cast<const std::uint16_t*>(data);
  if (dtype == nb::dtype<std::int32_t>()) return static_cast<const std::int32_t*>(data);
  if (dtype == nb::dtype<std::int64_t>()) return static_cast<const std::int64_t*>(data);
  fail("tokens must be of an integer dtype");
}

// The array as a column of one of two types.
template <class A, class B>
std::variant<Column<A>, Column<B>> either_column(const AnyArray& array, const char* message) {
  if (array.dtype() == nb::dtype<A>()) {
    return Column<A>(array.data(), array.size());
  }
  if (array.dtype() == nb::dtype<B>()) {
    return Column<B>(array.data(), array.size());
  }
  fail(message);
}

void make_token_source(TokenSource* self, const AnyArray& tokens,
                       const In<std::int64_t>& sequence_pointers,
                       const In<std::int32_t>& sequence_lengths, std::int64_t num_bytes) {
  new (self) TokenSource(tokens_of(tokens), static_cast<std::int64_t>(tokens.size()), num_bytes,
                         column_of(sequence_pointers), column_of(sequence_lengths));
}

void make_gpt_order(GPTOrder* self, const In<std::int32_t>& sequence_lengths,
                    const In<std::int32_t>& document_index, const AnyArray& sample_index,
                    const AnyArray& shuffle_index, std::int64_t sequence_length,
                    bool add_extra_token) {
  new (self) GPTOrder(column_of(sequence_lengths), column_of(document_index),
                      either_column<std::int32_t, std::int64_t>(
                          sample_index, "sample_index must be int32 or int64"),
                      either_column<std::uint32_t, std::int64_t>(
                          shuffle_index, "shuffle_index must be uint32 or int64"),
                      sequence_length, add_extra_token);
}

std::tuple<Numbers, Numbers, Numbers, Numbers> py_spans(
    const Order& order, const In<std::int64_t>& sample_numbers) {
  std::vector<Span> spans;
  Numbers bounds = make_array<std::int64_t>(sample_numbers.shape(0) + 1, [&](auto out) {
    read_mapped([&] { collect_spans(order, column_of(sample_numbers), spans, out); });
  });
  const auto column = [&spans](std::int64_t Span::*field) {
    return make_array<std::int64_t>(spans.size(), [&](auto out) {
      std::transform(spans.begin(), spans.end(), out.begin(),
                     [field](const Span& span) { return span.*field; });
    });
  };
  return {column(&Span::sequence), column(&Span::offset), column(&Span::count), bounds};
}

std::tuple<Numbers, Numbers> py_locate_spans(const TokenSource& source,
                                             const In<std::int64_t>& sequences,
                                             const In<std::int64_t>& offsets,
                                             const In<std::int64_t>& counts) {
  auto byte_offsets = allocate<std::int64_t>(sequences.shape(0));
  Numbers byte_counts = make_array<std::int64_t>(sequences.shape(0), [&](auto out) {
    read_mapped([&] {
      locate_spans(source, column_of(sequences), column_of(offsets), column_of(counts),
                   byte_offsets.span(), out);
    });
  });
  return {to_numpy(std::move(byte_offsets)), byte_counts};
}

template <class T>
struct OptionField {
  T SampleOptions::*member;
  nb::handle name;  // made once: to make it takes longer than to look it up
};

template <class T>
OptionField<T> option(T SampleOptions::*member, const char* name) {
  return {member, PyUnicode_InternFromString(name)};
}

// Reads a `millrace.options.SampleOptions`.
SampleOptions options_from(nb::handle options) {
  static const std::tuple fields{
      option(&SampleOptions::sequence_length, "sequence_length"),
      option(&SampleOptions::add_extra_token, "add_extra_token"),
      option(&SampleOptions::eod_token, "eod_token"),
      option(&SampleOptions::pad_token, "pad_token"),
      option(&SampleOptions::reset_position_ids, "reset_position_ids"),
      option(&SampleOptions::eod_mask_loss, "eod_mask_loss"),
  };
  SampleOptions out{};
  const auto read = [&]<class T>(const OptionField<T>& field) {
    out.*field.member = nb::cast<T>(options.attr(field.name));
  };
  std::apply([&](const auto&... field) { (read(field), ...); }, fields);
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
    return {Numbers(row.tokens, shape, owner), Numbers(row.labels, shape, owner),
            Out<float>(row.loss_mask, shape, owner), Numbers(row.position_ids, shape, owner)};
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
    fail("source_numbers and sample_numbers, or token_sources and orders, differ in size");
  }
  std::vector<SampleSource> sources;
  sources.reserve(num_samples);
  for (std::size_t i = 0; i < num_samples; ++i) {
    const std::int64_t number = column_of(source_numbers)[i];
    if (number < 0 || static_cast<std::size_t>(number) >= orders.size()) {
      fail("source number ", number, " is outside [0, ", orders.size(), ")");
    }
    const auto place = static_cast<std::size_t>(number);
    sources.push_back({&nb::cast<const TokenSource&>(token_sources[place]),
                       &nb::cast<const Order&>(orders[place])});
    if (!sources.back().tokens->is_mapped()) {
      fail("source ", number, " is not mapped");
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

// Sources and orders read the arrays that they are made of, and keep them alive: the caller's own, as
// they are not converted.
void add_samples(nb::module_& module) {
  nb::class_<TokenSource>(module, "TokenSource")
      .def("__init__", &make_token_source, "tokens"_a.noconvert(),
           "sequence_pointers"_a.noconvert(), "sequence_lengths"_a.noconvert(), "num_bytes"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
  nb::class_<Order>(module, "Order");
  nb::class_<GPTOrder, Order>(module, "GPTOrder")
      .def("__init__", &make_gpt_order, "sequence_lengths"_a.noconvert(),
           "document_index"_a.noconvert(), "sample_index"_a.noconvert(),
           "shuffle_index"_a.noconvert(), "sequence_length"_a, "add_extra_token"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>());
  module.def("spans", &py_spans, "order"_a, "sample_numbers"_a);
  module.def("locate_spans", &py_locate_spans, "token_source"_a, "sequences"_a, "offsets"_a,
             "counts"_a);
  module.def("gather_samples", &py_gather_samples, "token_sources"_a, "orders"_a,
             "source_numbers"_a, "sample_numbers"_a, "options"_a);
  module.def("fill_rows", &py_fill_rows, "tokens"_a, "ends"_a, "options"_a);
}

}  // namespace millrace
