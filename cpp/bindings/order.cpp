// The sample index, and orders.
#include "order.hpp"

#include "arrays.hpp"
#include "gpt_order.hpp"
#include "mapping.hpp"
#include "sample_index.hpp"

namespace millrace {
namespace {

template <class T>
Out<T> py_sample_index(const In<std::int32_t>& sequence_lengths,
                       const In<std::int32_t>& document_index, std::int64_t sequence_length,
                       std::int64_t num_samples, bool add_extra_token, bool allow_partial) {
  const auto num_rows = static_cast<std::size_t>(num_samples) + 1;
  auto rows = allocate<T>(2 * num_rows);
  {
    nb::gil_scoped_release unlocked;
    walk_samples(column_of(sequence_lengths), column_of(document_index), sequence_length,
                 std::int64_t{add_extra_token ? 1 : 0}, allow_partial, rows.span());
  }
  return to_numpy(std::move(rows), {num_rows, std::size_t{2}});
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
  throw std::invalid_argument(message);
}

// An order over arrays, and the references that keep them alive.
class PyGPTOrder : public GPTOrder {
 public:
  PyGPTOrder(const In<std::int32_t>& sequence_lengths, const In<std::int32_t>& document_index,
             const AnyArray& sample_index, const AnyArray& shuffle_index,
             std::int64_t sequence_length, bool add_extra_token)
      : GPTOrder(column_of(sequence_lengths), column_of(document_index),
                 either_column<std::int32_t, std::int64_t>(
                     sample_index, "sample_index must be int32 or int64"),
                 either_column<std::uint32_t, std::int64_t>(
                     shuffle_index, "shuffle_index must be uint32 or int64"),
                 sequence_length, add_extra_token),
        arrays_(sequence_lengths, document_index, sample_index, shuffle_index) {}

 private:
  std::tuple<In<std::int32_t>, In<std::int32_t>, AnyArray, AnyArray> arrays_;
};

using Numbers = Out<std::int64_t>;

std::tuple<Numbers, Numbers, Numbers, Numbers> py_spans(
    const Order& order, const In<std::int64_t>& sample_numbers) {
  auto bounds = allocate<std::int64_t>(sample_numbers.shape(0) + 1);
  std::vector<Span> spans;
  Buffer<std::int64_t> sequences;
  Buffer<std::int64_t> offsets;
  Buffer<std::int64_t> counts;
  {
    nb::gil_scoped_release unlocked;
    read_mapped(
        [&] { collect_spans(order, column_of(sample_numbers), spans, bounds.span()); });
    sequences = allocate<std::int64_t>(spans.size());
    offsets = allocate<std::int64_t>(spans.size());
    counts = allocate<std::int64_t>(spans.size());
    for (std::size_t i = 0; i < spans.size(); ++i) {
      sequences.span()[i] = spans[i].sequence;
      offsets.span()[i] = spans[i].offset;
      counts.span()[i] = spans[i].count;
    }
  }
  return {to_numpy(std::move(sequences)), to_numpy(std::move(offsets)),
          to_numpy(std::move(counts)), to_numpy(std::move(bounds))};
}

}  // namespace

void add_order(nb::module_& module) {
  module.def("sample_index_int32", &py_sample_index<std::int32_t>, "sequence_lengths"_a,
             "document_index"_a, "sequence_length"_a, "num_samples"_a, "add_extra_token"_a,
             "allow_partial"_a);
  module.def("sample_index_int64", &py_sample_index<std::int64_t>, "sequence_lengths"_a,
             "document_index"_a, "sequence_length"_a, "num_samples"_a, "add_extra_token"_a,
             "allow_partial"_a);
  nb::class_<Order>(module, "Order");
  nb::class_<PyGPTOrder, Order>(module, "GPTOrder")
      .def(nb::init<const In<std::int32_t>&, const In<std::int32_t>&, const AnyArray&,
                    const AnyArray&, std::int64_t, bool>(),
           "sequence_lengths"_a, "document_index"_a, "sample_index"_a, "shuffle_index"_a,
           "sequence_length"_a, "add_extra_token"_a);
  module.def("spans", &py_spans, "order"_a, "sample_numbers"_a);
}

}  // namespace millrace
