// The functions that other languages call, and the threads that serve them.
#include "context.h"
#include "decoder.h"
#include "domino_head.h"
#include "draw.h"
#include "growth.h"
#include "lattice.h"
#include "quantize.h"
#include "topk.h"
#include <cerrno>
#include <unistd.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(_WIN32)
#define NOMINMAX
#include <windows.h>
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace {

enum : int32_t { kPlaced, kNotFinite, kUnread };  // results of laying out a weight, as in blocks.py

// The threads of this process: a fork has only the thread that made it. Never destroyed, because they sleep until the
// end.
Pool& pool() {
  static std::atomic<Pool*> threads{nullptr};
  static std::atomic<pid_t> owner{0};
  if (owner.load() != getpid()) threads.store(new Pool), owner.store(getpid());
  return *threads.load();
}

// Do `work(piece)` for all pieces, of which there may be few: then threads without one wait for the others, however idle
// the machine is.
template <class Work>
void share_pieces(int32_t threads, int64_t pieces, const Work& work) {
  pool().run(int(std::min<int64_t>(threads, pieces)), [&](Team& team) { team.share(int(pieces), work); }, false);
}

#if defined(_WIN32)
// As POSIX has it, of a handle of the system, whose 32 bits count: a library built by MinGW may be linked to another C
// library than Python, whose descriptors it does not know.
ssize_t pread(int handle, void* to, size_t bytes, int64_t offset) {
  OVERLAPPED place = {};
  place.Offset = DWORD(offset), place.OffsetHigh = DWORD(offset >> 32);
  DWORD count = 0;
  return ReadFile((HANDLE)intptr_t(handle), to, DWORD(std::min(bytes, size_t(1) << 30)), &count, &place) ? count : 0;
}
#endif

// Read a part of a file; false where it ends before.
bool read_part(int descriptor, uint8_t* to, size_t bytes, int64_t offset) {
  while (bytes > 0) {
    const ssize_t count = pread(descriptor, to, bytes, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    to += count, bytes -= count, offset += count;
  }
  return true;
}

}  // namespace

// A decoder's pass.
EXPORT void outpace_run(const Decoder* decoder, const Pass* pass, int32_t threads) {
  static thread_local Work work;
  Work& own = work;
  own.grow(*decoder, pass->rows);
  own.sums.resize(Tasks::room(pass->parts, pass->part_count, decoder->heads, decoder->kv_heads, decoder->head_dim, threads));
  pool().run(threads, [&](Team& team) { run_layers(team, *decoder, *pass, own); });
}

// Keys and values that a block drafter makes of the target's features [rows, inputs of fc]; `pass` says where they go,
// and its x receives the fused rows.
EXPORT void outpace_context(const Decoder* decoder, const Matrix* fc, const float* norm, const float* features,
                     const Pass* pass, int32_t threads) {
  static thread_local Work work;
  Work& own = work;
  own.grow(*decoder, pass->rows, fc->inputs);
  pool().run(threads, [&](Team& team) { write_context(team, *decoder, *fc, norm, features, *pass, own); });
}

// One more token in each row of a causal head, and the head's correction of the logits.
EXPORT void outpace_correct(const CausalHead* head, const Correction* rows, int32_t threads) {
  static thread_local HeadWork work;
  HeadWork& own = work;
  own.grow(*head, *rows);
  pool().run(threads, [&](Team& team) { correct(team, *head, *rows, own); });
}

// to[row] = weight * from[row] + bias.
EXPORT void outpace_linear(const Matrix* matrix, const float* from, int32_t rows, float* to, int32_t threads) {
  static thread_local Work work;
  Work& own = work;
  own.space.grow(rows, matrix->inputs);
  pool().run(threads, [&](Team& team) {
    prepare_rows(team, from, rows, nullptr, 0, *matrix, own.space);
    multiply(team, *matrix, own.space.operand(*matrix, rows), false, to, outputs_of(*matrix));
  });
}

// Attention of a packed pass: queries and results [rows, heads, head_dim], keys and values already in the store.
EXPORT void outpace_attend(const Store* kv, const Part* parts, int32_t part_count, int32_t layer, int32_t heads,
                    int32_t kv_heads, const Sight* sight, const float* query, float* out, int32_t threads) {
  const int width = heads * kv->head_dim;
  const Attention attention = {*kv, parts, part_count, layer, heads, kv_heads, *sight, query, out, width, width};
  std::vector<float> sums(Tasks::room(parts, part_count, heads, kv_heads, kv->head_dim, threads));
  pool().run(threads, [&](Team& team) { attend_parts(team, attention, sums.data()); });
}

EXPORT int64_t outpace_packed_bytes(const Matrix* m) { return int64_t(panels_of(*m)) * panel_bytes(*m); }

// Lay out a weight [outputs, inputs], float32, in panels; int8 is rotated and rounded on the way.
EXPORT void outpace_pack(const Matrix* m, const float* weight, void* panels, float* scales, int32_t threads) {
  const int together = inputs_together(m->kind), stride = padded(m->inputs);
  pool().run(threads, [&](Team& team) {
    team.share(panels_of(*m), [&](int panel) {
      std::vector<float> row(m->inputs), numbers(stride);
      char* base = (char*)panels + panel * panel_bytes(*m);
      std::memset(base, m->kind == kInt8 ? 128 : 0, panel_bytes(*m));  // by all threads: pages lie near their writer
      const int count = std::min(kPanel, m->outputs - panel * kPanel);
      for (int output = 0; output < count; ++output) {
        const int index = panel * kPanel + output;
        std::memcpy(row.data(), weight + size_t(index) * m->inputs, sizeof(float) * m->inputs);
        int32_t total;
        const Operand to = {numbers.data(), scales + index, nullptr, &total, stride, 1};
        prepare(row.data(), m->inputs, m->kind, m->block, to, 0);
        for (int k = 0; k < m->inputs; ++k) {
          const size_t at = (size_t(k / together) * kPanel + output) * together + k % together;
          if (m->kind == kFloat32) ((float*)base)[at] = numbers[k];
          else if (m->kind == kHalves) ((uint16_t*)base)[at] = to_half(row[k]);
          else if (m->kind == kBfloat16 || m->kind == kWidened) ((uint16_t*)base)[at] = to_bfloat16(row[k]);
          else ((uint8_t*)base)[at] = uint8_t(((int8_t*)numbers.data())[k] + 128);
        }
      }
    });
  });
}

// Ask for pages of 2 MB before memory is first written: with small ones, reading weights takes up to half as long again.
EXPORT void outpace_prefer_large_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 1 << 21;
  const uintptr_t first = ((uintptr_t)memory + kPage - 1) / kPage * kPage, last = ((uintptr_t)memory + bytes) / kPage * kPage;
  if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
}

// Lay out rows of a weight in a format of files: row `order[i]`, or row i where `order` is null. The rows are at `from`,
// in the file's layout or in panels, or, where a descriptor is given, at `offset` in its file: reading a panel's rows
// into a small buffer costs a fifth of the page faults of a mapping, and the pages are no memory of this process.
EXPORT int32_t outpace_place(const Matrix* m, const uint8_t* from, int32_t is_packed, int32_t descriptor, int64_t offset,
                      const int64_t* order, void* panels, int32_t threads) {
  const size_t row_bytes = file_row_bytes(m->kind - kFromFile, m->inputs), bytes = panel_bytes(*m);
  std::atomic<int32_t> outcome{kPlaced};
  pool().run(threads, [&](Team& team) {
    std::vector<uint8_t> read(descriptor < 0 ? 0 : kPanel * row_bytes);
    team.share(panels_of(*m), [&](int panel) {
      Row rows[kPanel];
      const int first = panel * kPanel, count = std::min(kPanel, m->outputs - first);
      for (int output = 0; output < count; ++output) {
        const int64_t index = order ? order[first + output] : first + output;
        if (descriptor < 0) {
          rows[output] = row_of(m->kind - kFromFile, from, is_packed, index, m->inputs);
          continue;
        }
        rows[output].start = &read[output * row_bytes];
        // Rows in the file's order are read together.
        const size_t together = order ? 1 : output == 0 ? count : 0;
        if (!read_part(descriptor, &read[output * row_bytes], together * row_bytes, offset + index * row_bytes)) {
          outcome = kUnread;
          return;
        }
      }
      if (!place_panel(m->kind - kFromFile, rows, count, m->inputs, (uint8_t*)panels + panel * bytes)) outcome = kNotFinite;
    });
  });
  return outcome;
}

// Rows `order[i]` of a weight in a format of files as float32 [count, inputs], or row i where `order` is null. They are
// at `from`, in the file's layout or in panels.
EXPORT void outpace_dequantize(int32_t format, const uint8_t* from, int32_t is_packed, const int64_t* order, int64_t count,
                        int32_t inputs, float* to, int32_t threads) {
  share_pieces(threads, count, [&](int row) {
    const Row own = row_of(format, from, is_packed, order ? order[row] : row, inputs);
    dequantize_row(format, own, inputs, to + size_t(row) * inputs);
  });
}

// Rows of a weight [count, inputs] in blocks of `format`, by search.
EXPORT void outpace_quantize(int32_t format, const float* rows, int64_t count, int32_t inputs, uint8_t* blocks, int32_t threads) {
  const size_t row_bytes = file_row_bytes(format, inputs);
  share_pieces(threads, count, [&](int row) {
    quantize_row(format, rows + size_t(row) * inputs, inputs, blocks + size_t(row) * row_bytes);
  });
}

// The `wanted` largest numbers of each row; see `find_largest`. With draws, of their scores.
EXPORT void outpace_top(const float* numbers, int32_t rows, int32_t width, int32_t wanted, int32_t normalised,
                 const KeyedDraws* draws, float* values, int64_t* ids, int32_t threads) {
  static thread_local std::vector<float> scores, noise;
  std::vector<float>&own = scores, &noise_to = noise;
  if (draws) own.resize(size_t(rows) * width), noise_to.resize(size_t(draws->count) * width);
  pool().run(draws ? threads : std::min(threads, rows), [&](Team& team) {
    if (draws) compute_noise(team, *draws, width, noise_to.data());
    team.share(rows, [&](int row) {
      const size_t first = size_t(row) * wanted;
      const float* from = numbers + size_t(row) * width;
      if (draws) {
        float* to = own.data() + size_t(row) * width;
        std::memcpy(to, from, sizeof(float) * width);
        add_noise(*draws, row, width, noise_to.data(), to);
        from = to;
      }
      find_largest(from, width, wanted, normalised, values + first, ids + first);
    });
  }, false);
}

// Tokens of keyed draws.
EXPORT void outpace_draw(Drawn* drawn, int32_t count, int32_t threads) {
  share_pieces(threads, count, [&](int index) { draw(drawn[index]); });
}

// Suffix automata, each of one text.
EXPORT Automaton* outpace_text() { return new Automaton; }
EXPORT void outpace_text_end(Automaton* text) { delete text; }
EXPORT void outpace_text_extend(Automaton* text, const int64_t* ids, int64_t count) {
  for (int64_t at = 0; at < count; ++at) text->extend(int32_t(ids[at]));
}

// Trees of several requests, grown best-first.
EXPORT void outpace_grow(const Layout* layout, Growing* trees, int32_t count) {
  for (int index = 0; index < count; ++index) Grower(*layout, trees[index]).grow();
}

// Pair scores of several requests' blocks, and a tree for each that has a budget.
EXPORT void outpace_weave(Lattice* blocks, int32_t count, int32_t threads) {
  share_pieces(threads, count, [&](int index) {
    score_pairs(blocks[index]);
    grow_best_first(blocks[index]);
  });
}

// Learn from the verified trees, in the order of requests.
EXPORT void outpace_learn(const Learning* verified, int32_t count) {
  for (int index = 0; index < count; ++index) learn(verified[index]);
}
