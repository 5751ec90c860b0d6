// The arrays of samples as plain C makes them: shuffle index, sample index, document index, pointers,
// and two copies. `bench_feed.py` compiles it with -DTOKEN (the file's type) and -DOUT (the arrays').
#include <stdint.h>
#include <stdlib.h>

typedef struct {
  const TOKEN* tokens;
  const int64_t* pointers;  // of sequences, in bytes
  const int32_t* lengths;   // of sequences, in tokens
  const int32_t* document_index;
  const int32_t* sample_index;  // pairs: place in the document index, token in that sequence
  const uint32_t* shuffle_index;
} Data;

static void copy(const TOKEN* from, int64_t count, OUT* to) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = (OUT)from[i];
  }
}

static void fill_sample(const Data* data, int64_t number, int64_t length, OUT* tokens, OUT* labels) {
  const int64_t place = data->shuffle_index[number];
  const int32_t* start = data->sample_index + 2 * place;
  int64_t document = start[0], offset = start[1];
  for (int64_t size = 0; size < length + 1;) {
    const int32_t sequence = data->document_index[document];
    const TOKEN* from = data->tokens + data->pointers[sequence] / (int64_t)sizeof(TOKEN) + offset;
    int64_t count = data->lengths[sequence] - offset;
    if (count > length + 1 - size) {
      count = length + 1 - size;
    }
    copy(from, count < length - size ? count : length - size, tokens + size);
    if (size == 0) {
      copy(from + 1, count - 1, labels);
    } else {
      copy(from, count, labels + size - 1);
    }
    size += count;
    offset = 0;
    ++document;
  }
}

// Makes batches one after the other, each in new memory, and keeps the previous one alive. The last
// batch is in `tokens` and `labels`, to be freed with `release`. Returns 0, or 1 without memory.
int make_batches(const Data* data, int64_t first, int64_t num_batches, int64_t batch_size,
                 int64_t length, OUT** tokens, OUT** labels) {
  OUT *old_tokens = NULL, *old_labels = NULL;
  for (int64_t batch = 0; batch < num_batches; ++batch) {
    const size_t bytes = (size_t)(batch_size * length) * sizeof(OUT);
    OUT* new_tokens = malloc(bytes);
    OUT* new_labels = malloc(bytes);
    if (new_tokens == NULL || new_labels == NULL) {
      return 1;
    }
    for (int64_t row = 0; row < batch_size; ++row) {
      fill_sample(data, first + batch * batch_size + row, length, new_tokens + row * length,
                  new_labels + row * length);
    }
    free(old_tokens);
    free(old_labels);
    old_tokens = new_tokens;
    old_labels = new_labels;
  }
  *tokens = old_tokens;
  *labels = old_labels;
  return 0;
}

void release(void* memory) { free(memory); }
