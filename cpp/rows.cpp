#include "rows.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>

#include "errors.hpp"
#include "prefetch.hpp"
#include "vector.hpp"

namespace millrace {
namespace {

// Token files may hold sequences at any byte, hence memcpy for each token; it compiles to plain
// (vector) loads.
template <class T>
T token_at(const std::uint8_t* bytes, std::int64_t place) noexcept {
  T token;
  std::memcpy(&token, bytes + place * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return token;
}

template <class T>
std::int64_t num_tokens_of(const Run& run) noexcept {
  return run.count / static_cast<std::int64_t>(sizeof(T));
}

// The token in the type of a file; none, if the file cannot hold it.
template <class T>
std::optional<T> as(std::optional<std::int64_t> token) noexcept {
  return token && std::in_range<T>(*token) ? std::optional<T>(static_cast<T>(*token))
                                           : std::nullopt;
}

// Whether there is a token that `is_wanted`. It is as wide as a token until the end, so that vector
// code need not widen: to look among the narrow tokens of a file costs a tenth of writing a row.
template <class T, class Wanted>
bool contains(std::span<const Run> runs, Wanted is_wanted) {
  T is_there = 0;
  for (const Run& run : runs) {
    for (std::int64_t i = 0; i < num_tokens_of<T>(run); ++i) {
      is_there = static_cast<T>(is_there | static_cast<T>(is_wanted(token_at<T>(run.bytes, i))));
    }
  }
  return is_there != 0;
}

template <class T>
bool contains(std::span<const Run> runs, std::optional<std::int64_t> token) {
  const std::optional<T> value = as<T>(token);
  return value && contains<T>(runs, [wanted = *value](T one) { return one == wanted; });
}

// The first token outside [least, limit) that is not the pad token.
template <class T>
std::optional<BadToken> find_bad(std::span<const Run> runs, std::int64_t least, std::int64_t limit,
                                 std::optional<std::int64_t> pad) {
  using Limits = std::numeric_limits<T>;
  const T low = static_cast<T>(std::max<std::int64_t>(least, Limits::min()));
  const T high = static_cast<T>(std::min<std::int64_t>(limit - 1, Limits::max()));
  if (low == Limits::min() && high == Limits::max()) {
    return std::nullopt;
  }
  const T pad_or_ok = as<T>(pad).value_or(high);
  const auto is_bad = [=](T one) { return ((one < low) | (one > high)) & (one != pad_or_ok); };
  if (!contains<T>(runs, is_bad)) {
    return std::nullopt;
  }
  std::int64_t place = 0;
  for (const Run& run : runs) {
    for (std::int64_t i = 0; i < num_tokens_of<T>(run); ++i, ++place) {
      const T one = token_at<T>(run.bytes, i);
      if (is_bad(one)) {
        return BadToken{0, place, static_cast<std::int64_t>(one), least, limit};
      }
    }
  }
  return std::nullopt;
}

// Copies tokens, widened; pad tokens become 0.
template <class In, class Out>
void convert(const std::uint8_t* __restrict bytes, std::int64_t count, std::optional<In> pad,
             Out* __restrict out) {
  if (pad) {
    for (std::int64_t i = 0; i < count; ++i) {
      const In token = token_at<In>(bytes, i);
      out[i] = static_cast<Out>(token == *pad ? In{0} : token);
    }
  } else if constexpr (std::is_same_v<In, Out>) {
    std::memcpy(out, bytes, static_cast<std::size_t>(count) * sizeof(In));
  } else {
    for (std::int64_t i = 0; i < count; ++i) {
      out[i] = static_cast<Out>(token_at<In>(bytes, i));
    }
  }
}

// Calls `work` with the pieces of the runs that hold tokens `first` up to `first + length`, and where
// each starts in the row. Returns how many tokens that are.
template <class T, class Work>
std::int64_t for_each_piece(std::span<const Run> runs, std::span<const Run> next_runs,
                            std::int64_t first, std::int64_t length, Work work) {
  std::int64_t at = -first;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (i < next_runs.size()) {
      prefetch_run(next_runs[i]);
    }
    const std::int64_t count = num_tokens_of<T>(runs[i]);
    const std::int64_t start = std::clamp<std::int64_t>(-at, 0, count);
    const std::int64_t stop = std::min(count, length - at);
    if (stop > start) {
      work(at + start, runs[i].bytes + start * static_cast<std::int64_t>(sizeof(T)), stop - start);
    }
    at += count;
  }
  return std::clamp<std::int64_t>(at, 0, length);
}

// The same for each token.
template <class T, class Work>
void for_each_token(std::span<const Run> runs, std::int64_t first, std::int64_t length, Work work) {
  for_each_piece<T>(runs, {}, first, length,
                    [&](std::int64_t at, const std::uint8_t* bytes, std::int64_t count) {
                      for (std::int64_t i = 0; i < count; ++i) {
                        work(at + i, token_at<T>(bytes, i));
                      }
                    });
}

// Writes `length` tokens of the runs, from token `first` on; what they lack is 0.
template <class In, class Out>
void write_tokens(std::span<const Run> runs, std::span<const Run> next_runs, std::int64_t first,
                  std::int64_t length, std::optional<In> pad, Out* out) {
  const std::int64_t count = for_each_piece<In>(
      runs, next_runs, first, length,
      [&](std::int64_t at, const std::uint8_t* bytes, std::int64_t num_tokens) {
        convert<In>(bytes, num_tokens, pad, out + at);
      });
  std::fill(out + count, out + length, Out{0});
}

// Whether arrays of type Out may hold tokens of type In: these are the pairs that are compiled.
template <class In, class Out>
constexpr bool is_possible = std::is_same_v<Out, std::int64_t> ||
                             std::is_same_v<Out, std::int32_t> || std::is_same_v<In, Out>;

MILLRACE_VECTOR_CODE
void write_tokens(const Tokens& type, std::span<const Run> runs, std::span<const Run> next_runs,
                  std::int64_t first, std::int64_t length, std::optional<std::int64_t> pad,
                  const Tokens& out_type, std::uint8_t* out) {
  // Two visits of one variant each: GCC makes switches of them, and so compiles the loops into each
  // version of this function.
  std::visit(
      [&]<class In>(const In*) {
        std::visit(
            [&]<class Out>(const Out*) {
              if constexpr (is_possible<In, Out>) {
                write_tokens<In>(runs, next_runs, first, length, as<In>(pad),
                                 reinterpret_cast<Out*>(out));
              }
            },
            out_type);
      },
      type);
}

MILLRACE_VECTOR_CODE
void write_loss_mask(const Tokens& type, std::span<const Run> runs, const SampleOptions& options,
                     bool has_pads, std::int64_t num_labels, float* out) {
  const std::int64_t length = options.sequence_length;
  std::fill(out, out + num_labels, 1.0F);
  std::visit(
      [&]<class T>(const T*) {
        if (const std::optional<T> eod = as<T>(options.eod_token); options.eod_mask_loss && eod) {
          for_each_token<T>(runs, 0, length,
                            [&](std::int64_t i, T one) { out[i] = one == *eod ? 0.0F : 1.0F; });
        }
        if (const std::optional<T> pad = as<T>(options.pad_token); has_pads && pad) {
          for_each_token<T>(runs, 1, length, [&](std::int64_t i, T one) {
            out[i] = one == *pad ? 0.0F : out[i];
          });
        }
      },
      type);
  std::fill(out + num_labels, out + length, 0.0F);
}

MILLRACE_VECTOR_CODE
void write_position_ids(const Tokens& type, std::span<const Run> runs,
                        const SampleOptions& options, std::int64_t num_tokens,
                        std::int64_t* out) {
  const std::int64_t length = options.sequence_length;
  if (!options.reset_position_ids || !options.eod_token) {
    std::iota(out, out + length, std::int64_t{0});
    return;
  }
  std::int64_t start = 0;
  std::visit(
      [&]<class T>(const T*) {
        const std::optional<T> eod = as<T>(options.eod_token);
        for_each_token<T>(runs, 0, length, [&](std::int64_t i, T one) {
          out[i] = i - start;
          start = eod && one == *eod ? i + 1 : start;
        });
      },
      type);
  // Filling counts as pad tokens, which may be EOD too.
  for (std::int64_t i = num_tokens; i < length; ++i) {
    out[i] = i - start;
    start = options.pad_token == options.eod_token ? i + 1 : start;
  }
}

// Surveys one sample; see survey_samples.
MILLRACE_VECTOR_CODE
std::optional<BadToken> survey_sample(const Tokens& type, std::span<const Run> runs,
                                      const SampleOptions& options, const RowForm& form,
                                      bool& has_pads) {
  return std::visit(
      [&]<class T>(const T*) -> std::optional<BadToken> {
        has_pads = has_pads || contains<T>(runs, options.pad_token);
        using Int32 = std::numeric_limits<std::int32_t>;
        const bool is_int32 = form.token_type == TokenType::int32;
        if (is_int32 || form.vocab_size) {
          const std::int64_t end =
              is_int32 ? std::int64_t{Int32::max()} + 1 : std::numeric_limits<std::int64_t>::max();
          return find_bad<T>(runs, form.vocab_size ? 0 : Int32::min(),
                             std::min(form.vocab_size.value_or(end), end), options.pad_token);
        }
        return std::nullopt;
      },
      type);
}

}  // namespace

void prefetch_run(const Run& run) noexcept {
  constexpr std::int64_t limit = 4096;  // a page: the hardware's own prefetching stops at its end
  prefetch_bytes(run.bytes, run.count, limit);
}

std::int64_t TokenRuns::num_tokens(std::size_t sample) const noexcept {
  const std::int64_t width = size_of_token(types[sample]);
  std::int64_t count = 0;
  for (const Run& run : of(sample)) {
    count += run.count / width;
  }
  return count;
}

void split_samples(const Tokens& tokens, std::int64_t num_tokens, Column<std::int64_t> ends,
                   TokenRuns& samples) {
  const std::int64_t width = size_of_token(tokens);
  samples.types.assign(ends.size(), tokens);
  samples.bounds.assign(1, 0);
  std::int64_t start = 0;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const std::int64_t end = ends[i];
    if (end < start || end > num_tokens) {
      fail("a row from token ", start, " to ", end, " does not fit ", num_tokens, " tokens");
    }
    samples.runs.push_back({bytes_of(tokens) + start * width, (end - start) * width});
    samples.bounds.push_back(samples.runs.size());
    start = end;
  }
}

std::optional<BadToken> survey_samples(const TokenRuns& samples, const SampleOptions& options,
                                     const RowForm& form, bool& has_pads) {
  const bool reads = options.pad_token || form.vocab_size;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    if (reads && i + 1 < samples.size()) {
      for (const Run& run : samples.of(i + 1)) {
        prefetch_run(run);
      }
    }
    const std::int64_t size = samples.num_tokens(i);
    if (size > options.capacity()) {
      fail("a sample of ", size, " tokens does not fit its row of ", options.capacity());
    }
    if (form.token_type == TokenType::file && samples.types[i].index() != samples.types[0].index()) {
      fail("the token files of a batch have several dtypes, so that \"file\" is not one");
    }
    if (auto bad = survey_sample(samples.types[i], samples.of(i), options, form, has_pads)) {
      bad->sample = i;
      return bad;
    }
  }
  return std::nullopt;
}

void write_rows(const TokenRuns& samples, const SampleOptions& options, bool has_pads,
                const RowArrays& arrays) {
  const std::int64_t length = options.sequence_length;
  const std::int64_t row_bytes = arrays.stride * size_of_token(arrays.type);
  const std::optional<std::int64_t> pad = has_pads ? options.pad_token : std::nullopt;
  const std::span<const Run> all = samples.runs;
  for (std::size_t sample = 0; sample < samples.size(); ++sample) {
    const auto row = static_cast<std::int64_t>(sample);
    const Tokens& type = samples.types[sample];
    const std::span<const Run> runs = samples.of(sample);
    const std::span<const Run> next_runs =
        all.subspan(std::min(samples.bounds[sample] + prefetch_distance, all.size()));
    const auto write = [&](std::uint8_t* array, std::span<const Run> next, std::int64_t first,
                           std::int64_t count) {
      write_tokens(type, runs, next, first, count, pad, arrays.type, array + row * row_bytes);
    };
    if (arrays.stride > length) {  // one row for both
      write(arrays.tokens, next_runs, 0, length + 1);
    } else {
      if (arrays.tokens != nullptr) {
        write(arrays.tokens, next_runs, 0, length);
      }
      if (arrays.labels != nullptr) {
        write(arrays.labels, arrays.tokens == nullptr ? next_runs : all.first(0), 1, length);
      }
    }
    if (arrays.loss_mask == nullptr && arrays.position_ids == nullptr) {
      continue;
    }
    const std::int64_t size = samples.num_tokens(sample);
    if (arrays.loss_mask != nullptr) {
      // Without tokens the number of labels is 0, not -1.
      write_loss_mask(type, runs, options, has_pads, std::max<std::int64_t>(size - 1, 0),
                      arrays.loss_mask + row * length);
    }
    if (arrays.position_ids != nullptr) {
      write_position_ids(type, runs, options, std::min(size, length),
                         arrays.position_ids + row * length);
    }
  }
}

void cut_at_parts(Column<std::int64_t> part_starts, Column<std::int64_t> ends, std::int64_t length,
                  const RowArrays& arrays) {
  std::size_t part = 0;
  std::int64_t start = 0;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const std::int64_t first = static_cast<std::int64_t>(i) * length;  // of the row
    const std::int64_t size = ends[i] - start;
    std::int64_t place = 0;  // of the part in its row
    for (std::int64_t next = 0; place < size; place = next) {
      if (part >= part_starts.size() || part_starts[part] != start + place) {
        fail("no part starts at token ", start + place, ", which sample ", i, " or a part starts with");
      }
      next = ++part < part_starts.size() ? std::min(part_starts[part] - start, size) : size;
      if (next <= place) {
        fail("part ", part, " starts at token ", start + next, ", the one before it at ", start + place);
      }
      if (arrays.position_ids != nullptr) {
        std::iota(arrays.position_ids + first + std::min(place, length),
                  arrays.position_ids + first + std::min(next, length), std::int64_t{0});
      }
      const std::int64_t last = first + next - 1;  // whose label is another document's
      if (next < size && arrays.labels != nullptr) {
        const std::int64_t width = size_of_token(arrays.type);
        std::memset(arrays.labels + last * width, 0, static_cast<std::size_t>(width));
      }
      if (next < size && arrays.loss_mask != nullptr) {
        arrays.loss_mask[last] = 0.0F;
      }
    }
    if (arrays.position_ids != nullptr && size < length) {
      std::iota(arrays.position_ids + first + size, arrays.position_ids + first + length,
                std::int64_t{0});
    }
    start = ends[i];
  }
  if (part != part_starts.size()) {
    fail("part ", part, " starts at token ", part_starts[part], "; the samples have ", start);
  }
}

void write_samples(const TokenRuns& samples, const Tokens& type, std::uint8_t* tokens,
                   std::span<std::int64_t> ends) {
  const std::span<const Run> all = samples.runs;
  std::int64_t end = 0;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const std::int64_t count = samples.num_tokens(i);
    write_tokens(samples.types[i], samples.of(i),
                 all.subspan(std::min(samples.bounds[i] + prefetch_distance, all.size())), 0, count,
                 std::nullopt, type, tokens + end * size_of_token(type));
    end += count;
    ends[i] = end;
  }
}

}  // namespace millrace
