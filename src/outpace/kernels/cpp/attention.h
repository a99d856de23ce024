// Attention of rows over their slot: committed rows in their order, then the rows of the pass that each sees.
// Python reference: outpace.models.attention.reference_attention.
//
// The rows of a request and the query heads that share a key head are computed together, with a query to each lane of a
// vector (by_query.h) or a key (by_key.h), whichever is faster; both have the same bits. Keys and values are read once for
// all of them, in tiles of positions; the largest score and the sums go from tile to tile, and from span to span. Where
// tiles, spans and the halves of a tile end depends on logical positions alone: a token has the same bits in a tree, in
// a chain and alone, on any number of threads. Through a view, positions are those of the rows that it names: a tile of
// them is copied together, unless they lie together.
#pragma once
#include <memory>

#include "by_key.h"
#include "by_query.h"
#include "pool.h"

constexpr int kMostQueries = 128;  // of a task, so that its sums stay in the caches of its core
constexpr int kFewestMost = 16;    // limit for smaller tasks, where there are many threads: a vector, or a tile of AMX

// Tasks of a pass: pieces of the rows of a part, for each key head; and their spans, where these are shared out too.
struct Tasks {
  int count = 0, spans = 1, numbers = 0;  // numbers: of the sums of a task
  int most = kMostQueries;                // queries of a task

  Tasks(const Part* parts, int part_count, int heads, int kv_heads, int width, int threads) {
    divide(parts, part_count, heads, kv_heads, width);
    // Smaller tasks read keys and values more often, but otherwise threads would be idle.
    for (; count * spans < threads && most > kFewestMost; divide(parts, part_count, heads, kv_heads, width)) most /= 2;
    if (count >= 4 * threads) spans = 1;  // enough for all threads to be busy
  }

  // How many numbers all sums of a pass have with this many threads, or with one, as while others use the cores
  // (pool.h).
  static size_t room(const Part* parts, int part_count, int heads, int kv_heads, int width, int threads) {
    const auto needed = [&](int size) {
      const Tasks tasks(parts, part_count, heads, kv_heads, width, size);
      return tasks.spans > 1 ? size_t(tasks.count) * tasks.spans * tasks.numbers : 0;
    };
    return std::max(needed(threads), needed(1));
  }

  int rows_together(int count, int group) const {
    const int pieces = std::max(1, (count * group + most - 1) / most);
    return (count + pieces - 1) / pieces;
  }

 private:
  void divide(const Part* parts, int part_count, int heads, int kv_heads, int width) {
    count = numbers = 0;
    for (int part = 0; part < part_count; ++part) {
      const int rows = rows_together(parts[part].count, heads / kv_heads), queries = rows * heads / kv_heads;
      count += (parts[part].count + rows - 1) / rows * kv_heads;
      const int before = View(parts[part], 0, 0).count + parts[part].scratch;
      spans = std::max(spans, (before + parts[part].count + kSpan - 1) / kSpan);
      numbers = std::max(numbers, (queries + kLanes - 1) / kLanes * kLanes * (width + 2));
    }
  }
};

// A block, and both ways to compute its attention.
template <class Number>
struct Ways {
  Block<Number> block;
  ByQuery<Number> by_query{block};
  ByKey<Number> by_key{block};
};

template <class Number>
static void attend_typed(Team& team, const Attention& a, float* room) {
  const int group = a.heads / a.kv_heads;
  const Tasks tasks(a.parts, a.part_count, a.heads, a.kv_heads, a.kv.head_dim, team.size);
  static thread_local const std::unique_ptr<Ways<Number>> own(new Ways<Number>);
  Ways<Number>& ways = *own;  // a reference: compilers look up a thread-local variable at every use
  Block<Number>& block = ways.block;
  // Open a task's block, and do `work` the faster way.
  const auto open = [&](int task, auto work) {
    int piece = task / a.kv_heads, rows;
    const Part* part = a.parts;
    for (int own;; ++part, piece -= own) {
      rows = tasks.rows_together(part->count, group), own = (part->count + rows - 1) / rows;
      if (piece < own) break;
    }
    const int first = piece * rows;
    block.open(a, task % a.kv_heads, *part, first, std::min(rows, part->count - first));
    if constexpr (kMostByKey > 0)
      if (!ways.by_query.uses_amx() && ways.by_key.is_faster()) return work(ways.by_key);
    work(ways.by_query);
  };
  if (tasks.spans == 1) {
    static thread_local std::vector<float> sums;
    return team.share(tasks.count, [&](int task) {
      open(task, [&](auto& way) {
        sums.resize(std::max(sums.size(), size_t(2 * block.numbers())));
        float *all = sums.data(), *later = all + block.numbers();
        way.take_queries();
        way.attend(block.first_span(), all);
        for (int span = block.first_span() + 1; span <= block.last_span(); ++span) {
          way.attend(span, later);
          way.add(later, all);
        }
        way.close(all);
      });
    });
  }
  const auto sums_of = [&](int task, int span) { return room + (size_t(task) * tasks.spans + span) * tasks.numbers; };
  team.share(tasks.count * tasks.spans, [&](int item) {
    const int task = item / tasks.spans, span = item % tasks.spans;
    open(task, [&](auto& way) {
      if (span < block.first_span() || span > block.last_span()) return;
      way.take_queries();
      way.attend(span, sums_of(task, span));
    });
  });
  team.share(tasks.count, [&](int task) {
    open(task, [&](auto& way) {
      float* all = sums_of(task, block.first_span());
      for (int span = block.first_span() + 1; span <= block.last_span(); ++span) way.add(sums_of(task, span), all);
      way.close(all);
    });
  });
}

// Attention of all parts of a pass, shared by a team; `room` as large as Tasks says.
static inline void attend_parts(Team& team, const Attention& a, float* room) {
  if (a.kv.kind == kFloat32) attend_typed<float>(team, a, room);
  else if (a.kv.kind == kInt8) attend_typed<int8_t>(team, a, room);
  else attend_typed<uint16_t>(team, a, room);
}
