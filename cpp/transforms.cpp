#include "transforms.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "errors.hpp"
#include "philox.hpp"

namespace millrace {
namespace {

// Calls `work(sample, start, end)` for each sample.
template <class Work>
void for_each_sample(SampleEnds ends, std::size_t num_tokens, Work work) {
  const auto limit = static_cast<std::int64_t>(num_tokens);
  std::int64_t start = 0;
  for (std::size_t sample = 0; sample < ends.size(); ++sample) {
    const std::int64_t end = ends[sample];
    if (end < start || end > limit) {
      fail("sample ", sample, " goes from token ", start, " to ", end, " of ", limit);
    }
    work(sample, static_cast<std::size_t>(start), static_cast<std::size_t>(end));
    start = end;
  }
  if (start != limit) {
    fail("the samples end at token ", start, " of ", limit);
  }
}

void check_size(const char* name, std::size_t size, std::size_t expected) {
  if (size != expected) {
    fail(name, " has ", size, " entries; ", expected, " are needed");
  }
}

// True with probability `rate`.
bool is_drawn(std::uint64_t word, double rate) {
  return static_cast<double>(word >> 11) * 0x1p-53 < rate;
}

// One sample, written from its start to its end: its tokens, and the old place of each in the batch,
// or -1.
class SampleWriter {
 public:
  SampleWriter(std::span<const std::int64_t> tokens, std::size_t first,
               std::span<std::int64_t> tokens_out, std::span<std::int64_t> take_out)
      : tokens_(tokens), first_(first), tokens_out_(tokens_out), take_out_(take_out) {}

  std::size_t room() const noexcept { return tokens_out_.size() - size_; }

  void insert(std::int64_t token) {
    tokens_out_[size_] = token;
    take_out_[size_] = -1;
    ++size_;
  }

  void copy(std::size_t start, std::size_t stop) {
    const auto at = static_cast<std::ptrdiff_t>(size_);
    std::copy(tokens_.data() + start, tokens_.data() + stop, tokens_out_.begin() + at);
    size_ += stop - start;
    std::iota(take_out_.begin() + at, take_out_.begin() + static_cast<std::ptrdiff_t>(size_),
              static_cast<std::int64_t>(first_ + start));
  }

  // What is left of the output is the end of the sample, which is all padding.
  void copy_padding() { copy(size_, tokens_out_.size()); }

 private:
  std::span<const std::int64_t> tokens_;
  std::size_t first_;
  std::span<std::int64_t> tokens_out_;
  std::span<std::int64_t> take_out_;
  std::size_t size_ = 0;
};

void permute(std::size_t start, std::size_t stop, const PhiloxBlock& draw,
             const FillInMiddle& options, SampleWriter& out) {
  const std::uint64_t num_places = stop - start + 1;
  const auto [first, second] =
      std::minmax({high_word(draw[2], num_places), high_word(draw[3], num_places)});
  const std::size_t middle = start + first;
  const std::size_t suffix = start + second;
  out.insert(options.prefix_token);
  if (is_drawn(draw[1], options.spm_rate)) {
    out.insert(options.suffix_token);
    out.copy(suffix, stop);
    out.insert(options.middle_token);
    out.copy(start, suffix);
  } else {
    out.copy(start, middle);
    out.insert(options.suffix_token);
    out.copy(suffix, stop);
    out.insert(options.middle_token);
    out.copy(middle, suffix);
  }
}

void fill_in_sample(std::span<const std::int64_t> tokens, std::int64_t sample_number,
                    const FillInMiddle& options, SampleWriter& out) {
  constexpr std::size_t num_inserted = 3;
  std::size_t num_tokens = tokens.size();
  while (options.pad_token && num_tokens > 0 && tokens[num_tokens - 1] == *options.pad_token) {
    --num_tokens;
  }
  std::size_t start = 0;
  for (std::uint64_t document = 0; start < num_tokens && out.room() > 0; ++document) {
    std::size_t stop = num_tokens;
    if (options.eod_token) {
      const std::int64_t* first = tokens.data() + start;
      stop = start + static_cast<std::size_t>(
                         std::find(first, tokens.data() + num_tokens, *options.eod_token) - first);
    }
    // NumPy's Philox counts before it draws: its counter is one less.
    const PhiloxBlock draw =
        philox({document + 1, static_cast<std::uint64_t>(sample_number), 0, 0}, {options.seed, 0});
    const std::size_t room = out.room();
    const std::size_t kept = std::min(stop - start, room - std::min(room, num_inserted));
    if (kept >= min_fim_tokens && is_drawn(draw[0], options.rate)) {
      permute(start, start + kept, draw, options, out);
    } else {
      out.copy(start, start + std::min(stop - start, room));
    }
    if (stop < num_tokens && out.room() > 0) {
      out.copy(stop, stop + 1);  // EOD
    }
    start = stop + 1;
  }
  out.copy_padding();
}

// Marks the runs of one period in a sample: `least` matches in a row (a token and the one `period`
// after it) or more. The last of `least` places is looked at first: most often it ends the search there.
bool mark_period(std::span<const std::int64_t> sample, std::size_t period, std::size_t least,
                 std::span<std::uint8_t> marks) {
  const std::size_t num_pairs = sample.size() - period;
  const auto matches = [&](std::size_t at) { return sample[at] == sample[at + period]; };
  bool has_run = false;
  std::size_t first = 0;  // where the next run may start: behind a place without a match
  while (first + least <= num_pairs) {
    std::size_t stop = first + least;
    std::size_t start = stop;
    while (start > first && matches(start - 1)) {
      --start;
    }
    if (start > first) {
      first = start;
      continue;
    }
    while (stop < num_pairs && matches(stop)) {
      ++stop;
    }
    std::fill(marks.begin() + static_cast<std::ptrdiff_t>(start),
              marks.begin() + static_cast<std::ptrdiff_t>(stop + period), std::uint8_t{1});
    has_run = true;
    first = stop + 1;
  }
  return has_run;
}

}  // namespace

void fill_in_middle(std::span<const std::int64_t> tokens, SampleEnds ends,
                    std::span<const std::int64_t> sample_numbers, const FillInMiddle& options,
                    std::span<std::int64_t> tokens_out, std::span<std::int64_t> take_out) {
  check_size("sample_numbers", sample_numbers.size(), ends.size());
  for_each_sample(ends, tokens.size(), [&](std::size_t sample, std::size_t start, std::size_t end) {
    const std::size_t size = end - start;
    const std::span<const std::int64_t> old = tokens.subspan(start, size);
    SampleWriter out(old, start, tokens_out.subspan(start, size), take_out.subspan(start, size));
    fill_in_sample(old, sample_numbers[sample], options, out);
  });
}

void mark_repeats(std::span<const std::int64_t> tokens, SampleEnds ends, std::int64_t max_period,
                  std::int64_t min_repeats, bool is_whole, std::span<std::uint8_t> marks) {
  std::fill(marks.begin(), marks.end(), std::uint8_t{0});
  const auto repeats = static_cast<std::size_t>(min_repeats);
  for_each_sample(ends, tokens.size(), [&](std::size_t, std::size_t start, std::size_t end) {
    const auto sample = tokens.subspan(start, end - start);
    const auto sample_marks = marks.subspan(start, end - start);
    const std::size_t longest =
        std::min(static_cast<std::size_t>(max_period), sample.size() / repeats);
    bool has_run = false;
    for (std::size_t period = 1; period <= longest && !(is_whole && has_run); ++period) {
      has_run = mark_period(sample, period, period * (repeats - 1), sample_marks) || has_run;
    }
    if (is_whole && has_run) {
      std::fill(sample_marks.begin(), sample_marks.end(), std::uint8_t{1});
    }
  });
}

std::int64_t sum_of_counts(std::span<const std::int64_t> counts) {
  constexpr std::int64_t limit = std::int64_t{1} << 48;  // more than memory holds
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) {
    sum += checked(count, limit - sum, "the number of tokens of a span");
  }
  return sum;
}

void mark_ranges(Column<std::int32_t> ranges, std::span<const std::int64_t> sequences,
                 std::span<const std::int64_t> offsets, std::span<const std::int64_t> counts,
                 std::span<std::uint8_t> marks) {
  check_size("offsets", offsets.size(), sequences.size());
  check_size("counts", counts.size(), sequences.size());
  std::fill(marks.begin(), marks.end(), std::uint8_t{0});
  const std::size_t num_ranges = ranges.size() / 3;
  const auto sequence_of = [&](std::size_t range) { return std::int64_t{ranges[3 * range]}; };
  std::uint8_t* out = marks.data();
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const std::int64_t begin = offsets[i];
    if (begin < 0 || begin > (std::int64_t{1} << 48)) {
      fail("span ", i, " starts at token ", begin, " of its sequence");
    }
    const std::int64_t end = begin + counts[i];
    // The first range that ends behind the start of the span.
    std::size_t low = first_not(num_ranges, [&](std::size_t range) {
      const std::int64_t stop = ranges[3 * range + 2];
      return std::pair{sequence_of(range), stop} <= std::pair{sequences[i], begin};
    });
    for (; low < num_ranges && sequence_of(low) == sequences[i]; ++low) {
      const std::int64_t start = std::max(std::int64_t{ranges[3 * low + 1]}, begin);
      const std::int64_t stop = std::min(std::int64_t{ranges[3 * low + 2]}, end);
      if (start >= end) {
        break;
      }
      if (start < stop) {
        std::fill(out + (start - begin), out + (stop - begin), std::uint8_t{1});
      }
    }
    out += counts[i];
  }
}

void mask_losses(std::span<const float> loss_masks, std::int64_t length, Flags flags,
                 SampleEnds ends, std::span<float> out) {
  const auto row_size = static_cast<std::size_t>(length);
  check_size("loss_masks", loss_masks.size(), ends.size() * row_size);
  for_each_sample(ends, flags.size(), [&](std::size_t sample, std::size_t start, std::size_t end) {
    const float* old = loss_masks.data() + sample * row_size;
    float* row = out.data() + sample * row_size;
    const std::size_t num_labels = std::max<std::size_t>(end - start, 1) - 1;
    if (num_labels > row_size) {
      fail("sample ", sample, " has ", end - start, " tokens, above ", row_size + 1);
    }
    for (std::size_t i = 0; i < num_labels; ++i) {
      row[i] = flags[start + 1 + i] != 0 ? old[i] : 0.0F;
    }
    std::copy(old + num_labels, old + row_size, row + num_labels);
  });
}

}  // namespace millrace
