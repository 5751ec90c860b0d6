// Token sources, orders, and batches of samples.
#include <array>
#include <new>

#include "arrays.hpp"
#include "gather.hpp"
#include "gpt_order.hpp"
#include "instant_order.hpp"
#include "mapping.hpp"
#include "order.hpp"
#include "pack_order.hpp"
#include "rows.hpp"
#include "tokens.hpp"

namespace millrace {
namespace {

using Numbers = Out<std::int64_t>;

template <class Array>
Tokens tokens_of(const Array& array) {
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

void make_token_source(TokenSource* self, const AnyVector& tokens,
                       const In<std::int64_t>& sequence_pointers,
                       const In<std::int32_t>& sequence_lengths, std::int64_t num_bytes) {
  new (self) TokenSource(tokens_of(tokens), static_cast<std::int64_t>(tokens.size()), num_bytes,
                         column_of(sequence_pointers), column_of(sequence_lengths));
}

void make_sharded_source(TokenSource* self, const nb::tuple& shards,
                         const In<std::int64_t>& shard_sizes, std::int64_t sequence_length,
                         bool is_mapped) {
  if (shards.size() != shard_sizes.shape(0)) {
    fail("there are ", shards.size(), " shards with ", shard_sizes.shape(0), " sizes");
  }
  std::vector<Tokens> tokens;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto shard = nb::cast<AnyArray>(shards[i], false);
    tokens.push_back(tokens_of(shard));
    const std::int64_t num_tokens = is_mapped ? span_of(shard_sizes)[i] * sequence_length : 0;
    if (static_cast<std::int64_t>(shard.size()) != num_tokens || tokens[i].index() != tokens[0].index()) {
      fail("shard ", i, " has ", shard.size(), " tokens, not ", num_tokens, ", or another dtype");
    }
  }
  new (self) TokenSource(tokens, span_of(shard_sizes), sequence_length, is_mapped);
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

void make_pack_order(PackOrder* self, const In<std::int32_t>& sequence_lengths,
                     const AnyArray& pieces, const In<std::int64_t>& pack_ends,
                     std::int64_t capacity, std::int64_t num_samples, std::uint64_t key) {
  new (self) PackOrder(column_of(sequence_lengths),
                       either_column<std::uint32_t, std::int64_t>(
                           pieces, "pieces must be uint32 or int64"),
                       column_of(pack_ends), capacity, num_samples, key);
}

void make_instant_order(InstantOrder* self, std::tuple<std::int64_t, std::int64_t> tokens,
                        std::uint64_t key, std::tuple<std::int64_t, std::int64_t, std::int64_t> position,
                        std::int64_t sequence_length, bool add_extra_token) {
  const auto [first_token, num_tokens] = tokens;
  const auto [epoch, window_length, drawn] = position;
  new (self) InstantOrder({first_token, num_tokens, key}, {epoch, window_length, drawn},
                          sequence_length, add_extra_token ? 1 : 0);
}

// One field of all spans.
Numbers field_of(const std::vector<Span>& spans, std::int64_t Span::*field) {
  return make_array<std::int64_t>(spans.size(), [&](auto out) {
    std::transform(spans.begin(), spans.end(), out.begin(),
                   [field](const Span& span) { return span.*field; });
  });
}

std::tuple<Numbers, Numbers, Numbers, Numbers> py_spans(
    const Order& order, const In<std::int64_t>& sample_numbers, const TokenSource* tokens) {
  std::vector<Span> spans;
  Numbers bounds = make_array<std::int64_t>(sample_numbers.shape(0) + 1, [&](auto out) {
    read_mapped([&] { collect_spans(order, column_of(sample_numbers), tokens, spans, out); });
  });
  return {field_of(spans, &Span::sequence), field_of(spans, &Span::offset),
          field_of(spans, &Span::count), bounds};
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
  nb::handle name;  // created once: creating it takes longer than the look-up
};

template <class T>
OptionField<T> option(T SampleOptions::*member, const char* name) {
  return {member, PyUnicode_InternFromString(name)};
}

// Reads a `millrace.options.SampleOptions`, for a batch of some rows.
SampleOptions options_from(nb::handle options, std::size_t num_rows) {
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
  constexpr std::size_t max_numbers = std::size_t{1} << 48;  // more than memory holds
  if (out.sequence_length < 1 ||
      static_cast<std::size_t>(out.sequence_length) >= max_numbers / (num_rows + 1)) {
    fail("sequence_length is ", out.sequence_length, " for ", num_rows, " rows; 1 to ",
         max_numbers / (num_rows + 1) - 1, " is possible");
  }
  return out;
}

RowForm make_row_form(bool tokens, bool labels, bool loss_mask, bool position_ids, bool parts,
                      const std::string& token_dtype, bool share_labels,
                      std::optional<std::int64_t> vocab_size) {
  const TokenType type = token_dtype == "int64"   ? TokenType::int64
                         : token_dtype == "int32" ? TokenType::int32
                                                  : TokenType::file;
  return {tokens, labels, loss_mask, position_ids, parts, type, share_labels, vocab_size};
}

// The arrays of a batch, one row for each sample, in one allocation. As several, glibc gives the end
// of its heap back to the kernel with every batch that is freed, and the next batch faults all its
// pages in again: half of the time of a batch.
class Rows {
 public:
  Rows(std::size_t num_rows, std::int64_t sequence_length, const Tokens& type, const RowForm& form)
      : num_rows_(num_rows), length_(static_cast<std::size_t>(sequence_length)) {
    shares_labels_ = form.share_labels && form.tokens && form.labels;
    const std::size_t stride = length_ + (shares_labels_ ? 1 : 0);
    const auto width = static_cast<std::size_t>(size_of_token(type));
    const std::size_t row_bytes = num_rows_ * stride * width;
    std::size_t size = 0;
    const auto add = [&size](bool is_needed, std::size_t bytes) {
      const std::size_t start = size;
      size += is_needed ? (bytes + line_size - 1) / line_size * line_size : 0;
      return is_needed ? std::optional(start) : std::nullopt;
    };
    const auto position_ids = add(form.position_ids, num_rows * length_ * 8);
    const auto tokens = add(form.tokens, row_bytes);
    const auto labels = add(form.labels && !shares_labels_, row_bytes);
    const auto loss_mask = add(form.loss_mask, num_rows * length_ * 4);
    memory_ = allocate<std::int64_t>((size + 7) / 8);
    auto* start = reinterpret_cast<std::uint8_t*>(memory_.data.get());
    const auto at = [start](std::optional<std::size_t> place) {
      return place ? start + *place : nullptr;
    };
    arrays_ = {type,
               at(tokens),
               at(labels),
               static_cast<std::int64_t>(stride),
               reinterpret_cast<float*>(at(loss_mask)),
               reinterpret_cast<std::int64_t*>(at(position_ids))};
  }

  const RowArrays& arrays() const noexcept { return arrays_; }

  // Tokens, labels, loss mask and position ids; None for what was not written.
  std::array<nb::object, 4> take() {
    nb::capsule owner(memory_.data.release(),
                      [](void* pointer) noexcept { FreeMemory{}(pointer); });
    const std::uint8_t* labels =
        shares_labels_ ? arrays_.tokens + size_of_token(arrays_.type) : arrays_.labels;
    return {tokens_at(arrays_.tokens, owner), tokens_at(labels, owner),
            array_at(arrays_.loss_mask, length_, owner),
            array_at(arrays_.position_ids, length_, owner)};
  }

 private:
  static constexpr std::size_t line_size = 64;

  template <class T>
  nb::object array_at(T* start, std::size_t stride, const nb::capsule& owner) const {
    if (start == nullptr) {
      return nb::none();
    }
    const std::size_t shape[] = {num_rows_, length_};
    const std::int64_t strides[] = {static_cast<std::int64_t>(stride), 1};
    return nb::cast(Out<T>(start, 2, shape, owner, strides));
  }

  nb::object tokens_at(const std::uint8_t* start, const nb::capsule& owner) const {
    return std::visit(
        [&]<class T>(const T*) {
          return array_at(reinterpret_cast<T*>(const_cast<std::uint8_t*>(start)),
                          static_cast<std::size_t>(arrays_.stride), owner);
        },
        arrays_.type);
  }

  std::size_t num_rows_;
  std::size_t length_;
  bool shares_labels_;
  RowArrays arrays_;
  Buffer<std::int64_t> memory_;
};

// The type of the arrays of tokens.
Tokens type_of(const RowForm& form, const Tokens& file_type) {
  switch (form.token_type) {
    case TokenType::int64:
      return static_cast<const std::int64_t*>(nullptr);
    case TokenType::int32:
      return static_cast<const std::int32_t*>(nullptr);
    case TokenType::file:
      break;
  }
  return file_type;
}

// The rows of samples that were read already, without the GIL.
std::array<nb::object, 4> rows_of(const TokenRuns& samples, const SampleOptions& options,
                                  const RowForm& form, bool has_pads, const Tokens& file_type,
                                  const auto& finish) {
  Rows rows(samples.size(), options.sequence_length, type_of(form, file_type), form);
  {
    nb::gil_scoped_release unlocked;
    read_mapped([&] { write_rows(samples, options, has_pads, rows.arrays()); });
    finish(rows.arrays());
  }
  return rows.take();
}

std::vector<SampleSource> sources_of(const nb::tuple& token_sources, const nb::tuple& orders,
                                     const In<std::int64_t>& source_numbers,
                                     const In<std::int64_t>& sample_numbers) {
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
  return sources;
}

// The type of the first sample's token file, or of the first file if there is no sample.
Tokens file_type_of(const nb::tuple& token_sources, const std::vector<SampleSource>& sources) {
  if (!sources.empty()) {
    return sources[0].tokens->tokens();
  }
  return token_sources.size() > 0 ? nb::cast<const TokenSource&>(token_sources[0]).tokens()
                                  : Tokens(static_cast<const std::int64_t*>(nullptr));
}

nb::tuple py_gather_samples(const nb::tuple& token_sources, const nb::tuple& orders,
                            const In<std::int64_t>& source_numbers,
                            const In<std::int64_t>& sample_numbers, nb::handle options,
                            const RowForm* form_or_none) {
  static const RowForm all_arrays;
  const RowForm& form = form_or_none == nullptr ? all_arrays : *form_or_none;
  const std::vector<SampleSource> sources =
      sources_of(token_sources, orders, source_numbers, sample_numbers);
  const Tokens file_type = file_type_of(token_sources, sources);
  const SampleOptions plain = options_from(options, sources.size());
  bool has_pads = false;
  LocatedSamples located;
  {
    nb::gil_scoped_release unlocked;
    std::optional<BadToken> bad;
    read_mapped([&] {
      locate_samples(sources, column_of(sample_numbers), form.parts, located);
      bad = survey_samples(located.runs, plain, form, has_pads);
    });
    if (bad) {
      fail<BadData>(describe(located, *bad));
    }
  }
  auto [tokens, labels, loss_mask, position_ids] =
      rows_of(located.runs, plain, form, has_pads, file_type, [](const RowArrays&) {});
  if (!form.parts) {
    return nb::make_tuple(tokens, labels, loss_mask, position_ids);
  }
  Numbers bounds = make_array<std::int64_t>(located.runs.bounds.size(), [&](auto out) {
    std::copy(located.runs.bounds.begin(), located.runs.bounds.end(), out.begin());
  });
  return nb::make_tuple(tokens, labels, loss_mask, position_ids, field_of(located.spans, &Span::sequence),
                        field_of(located.spans, &Span::count), bounds);
}

nb::tuple py_fill_rows(const AnyArray& tokens, const In<std::int64_t>& ends, nb::handle options,
                       const RowForm* form_or_none,
                       const std::optional<In<std::int64_t>>& part_starts) {
  static const RowForm all_arrays;
  const RowForm& form = form_or_none == nullptr ? all_arrays : *form_or_none;
  const SampleOptions plain = options_from(options, ends.shape(0));
  const Tokens typed = tokens_of(tokens);
  bool has_pads = false;
  TokenRuns samples;
  {
    nb::gil_scoped_release unlocked;
    split_samples(typed, static_cast<std::int64_t>(tokens.size()), column_of(ends), samples);
    std::optional<BadToken> bad;
    read_mapped([&] { bad = survey_samples(samples, plain, form, has_pads); });
    if (bad) {
      fail<BadData>("token id ", bad->id, " is outside [", bad->least, ", ", bad->limit, "): it is token ",
           bad->place, " of row ", bad->sample);
    }
  }
  if (part_starts && form.share_labels) {
    fail("labels that end with the parts cannot be a view of the tokens");
  }
  auto [tokens_rows, labels, loss_mask, position_ids] =
      rows_of(samples, plain, form, has_pads, typed, [&](const RowArrays& arrays) {
        if (part_starts) {
          cut_at_parts(column_of(*part_starts), column_of(ends), plain.sequence_length, arrays);
        }
      });
  return nb::make_tuple(tokens_rows, labels, loss_mask, position_ids);
}

// The tokens of samples in the type of their files, int64 if these have several; where each sample
// ends; and the spans that they are.
nb::tuple py_gather_tokens(const nb::tuple& token_sources, const nb::tuple& orders,
                           const In<std::int64_t>& source_numbers,
                           const In<std::int64_t>& sample_numbers) {
  const std::vector<SampleSource> sources =
      sources_of(token_sources, orders, source_numbers, sample_numbers);
  Tokens type = file_type_of(token_sources, sources);
  LocatedSamples located;
  std::int64_t num_tokens = 0;
  {
    nb::gil_scoped_release unlocked;
    read_mapped([&] { locate_samples(sources, column_of(sample_numbers), true, located); });
    for (std::size_t i = 0; i < located.runs.size(); ++i) {
      num_tokens += located.runs.num_tokens(i);
      if (located.runs.types[i].index() != type.index()) {
        type = static_cast<const std::int64_t*>(nullptr);
      }
    }
  }
  auto ends = allocate<std::int64_t>(sources.size());
  const auto count = static_cast<std::size_t>(num_tokens);
  nb::object tokens = std::visit(
      [&]<class T>(const T*) {
        return nb::cast(make_array<T>(count, [&](auto out) {
          read_mapped([&] {
            write_samples(located.runs, type, reinterpret_cast<std::uint8_t*>(out.data()),
                          ends.span());
          });
        }));
      },
      type);
  return nb::make_tuple(tokens, to_numpy(std::move(ends)), field_of(located.spans, &Span::sequence),
                        field_of(located.spans, &Span::offset), field_of(located.spans, &Span::count));
}

Numbers py_find_documents(const In<std::int64_t>& document_indices,
                          const In<std::int64_t>& sequences) {
  return make_array<std::int64_t>(sequences.shape(0), [&](auto out) {
    read_mapped([&] { find_documents(column_of(document_indices), column_of(sequences), out); });
  });
}

}  // namespace

// Sources and orders read the caller's own arrays (hence no conversion), and keep them alive.
void add_samples(nb::module_& module) {
  nb::class_<TokenSource>(module, "TokenSource")
      .def("__init__", &make_token_source, "tokens"_array, "sequence_pointers"_array,
           "sequence_lengths"_array, "num_bytes"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("__init__", &make_sharded_source, "shards"_a, "shard_sizes"_array, "sequence_length"_a,
           "is_mapped"_a, nb::keep_alive<1, 2>());
  nb::class_<RowForm>(module, "RowForm")
      .def(nb::new_(&make_row_form), "tokens"_a = true, "labels"_a = true, "loss_mask"_a = true,
           "position_ids"_a = true, "parts"_a = false, "token_dtype"_a = "int64",
           "share_labels"_a = false, "vocab_size"_a = nb::none());
  nb::class_<Order>(module, "Order");
  nb::class_<GPTOrder, Order>(module, "GPTOrder")
      .def("__init__", &make_gpt_order, "sequence_lengths"_array, "document_index"_array,
           "sample_index"_array, "shuffle_index"_array, "sequence_length"_a, "add_extra_token"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>());
  nb::class_<PackOrder, Order>(module, "PackOrder")
      .def("__init__", &make_pack_order, "sequence_lengths"_array, "pieces"_array,
           "pack_ends"_array, "capacity"_a, "num_samples"_a, "key"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
  nb::class_<InstantOrder, Order>(module, "InstantOrder")
      .def("__init__", &make_instant_order, "tokens"_a, "key"_a, "position"_a, "sequence_length"_a,
           "add_extra_token"_a);
  nb::class_<SequenceOrder, Order>(module, "SequenceOrder")
      .def(nb::init<std::int64_t, std::int64_t>(), "num_sequences"_a, "sequence_length"_a);
  module.def("spans", &py_spans, "order"_a, "sample_numbers"_array,
             "token_source"_a = nb::none());
  module.def("locate_spans", &py_locate_spans, "token_source"_a, "sequences"_array,
             "offsets"_array, "counts"_array);
  module.def("gather_samples", &py_gather_samples, "token_sources"_a, "orders"_a,
             "source_numbers"_array, "sample_numbers"_array, "options"_a,
             "form"_a = nb::none());
  module.def("gather_tokens", &py_gather_tokens, "token_sources"_a, "orders"_a,
             "source_numbers"_array, "sample_numbers"_array);
  module.def("find_documents", &py_find_documents, "document_indices"_array, "sequences"_array);
  module.def("fill_rows", &py_fill_rows, "tokens"_a, "ends"_array, "options"_a,
             "form"_a = nb::none(), "part_starts"_a.noconvert() = nb::none());
}

}  // namespace millrace
