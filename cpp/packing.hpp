// Documents into packs: rows of a fixed number of tokens that hold whole documents.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "column.hpp"

namespace millrace {

// Packs of some documents, of which none is empty: pack k has the documents
// documents[ends[k - 1]] up to documents[ends[k]], as places among the lengths.
struct Packs {
  std::vector<std::int64_t> documents;
  std::vector<std::int64_t> ends;
};

// Best fit, the longest document first: each document goes to the fullest pack that has room for it,
// of several to the one that was filled last, and else begins a pack. Documents of one length are
// taken in their order. Packs are in the order in which they began, and a pack's documents in theirs.
// Throws std::invalid_argument for a length outside [1, capacity].
Packs pack(Column<std::int32_t> lengths, std::int64_t capacity);

}  // namespace millrace
