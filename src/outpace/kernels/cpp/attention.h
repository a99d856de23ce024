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

// A piece of a part's rows, for a key head; its spans, and how many of them the tasks before it have.
struct Task {
  const Part* part = nullptr;
  int first = 0, rows = 0, kv_head = 0, spans = 0, before = 0;
};

// Tasks of a pass; and their spans, where these are shared out too.
struct Tasks {
  int count = 0, spans = 0, longest = 0;  // tasks, the spans of all of them, and those of the longest one
  int numbers = 0;                        // of the sums of a task
  int most = kMostQueries;                // queries of a task
  bool are_split = false;                 // whether spans are shared out

  Tasks(const Part* parts, int part_count, int heads, int kv_heads, int width, int threads)
      : parts_(parts), part_count_(part_count), group_(heads / kv_heads), kv_heads_(kv_heads) {
    divide(width);
    // Smaller tasks read keys and values more often, but otherwise threads would be idle.
    for (; spans < threads && most > kFewestMost; divide(width)) most /= 2;
    // Enough tasks keep all threads busy, unless the longest one takes longer than a thread's share: behind a long
    // context beside short ones the others would wait for it, as they do if other processes use the cores (pool.h).
    are_split = longest > 1 && (count < 4 * threads || longest * threads > spans);
  }

  // How many numbers all sums of a pass have with this many threads, or with one, as while others use the cores
  // (pool.h).
  static size_t room(const Part* parts, int part_count, int heads, int kv_heads, int width, int threads) {
    const auto needed = [&](int size) {
      const Tasks tasks(parts, part_count, heads, kv_heads, width, size);
      return tasks.are_split ? size_t(tasks.spans) * tasks.numbers : 0;
    };
    return std::max(needed(threads), needed(1));
  }

  // The task of a number: its own, or that of one of the spans of all tasks.
  Task find(int number, bool is_span) const {
    Task found;
    for (found.part = parts_;; ++found.part) {
      const int rows = rows_together(*found.part), tasks = tasks_of(*found.part);
      found.spans = spans_of(*found.part);
      const int each = is_span ? found.spans : 1;
      if (number < tasks * each) {
        const int task = number / each;
        found.before += task * found.spans;
        found.kv_head = task % kv_heads_, found.first = task / kv_heads_ * rows;
        found.rows = std::min(rows, found.part->count - found.first);
        return found;
      }
      number -= tasks * each, found.before += tasks * found.spans;
    }
  }

 private:
  const Part* parts_;
  int part_count_, group_, kv_heads_;

  int rows_together(const Part& part) const {
    const int pieces = std::max(1, (part.count * group_ + most - 1) / most);
    return (part.count + pieces - 1) / pieces;
  }

  int tasks_of(const Part& part) const {
    const int rows = rows_together(part);
    return (part.count + rows - 1) / rows * kv_heads_;
  }

  static int spans_of(const Part& part) {
    return (View(part, 0, 0).count + part.scratch + part.count + kSpan - 1) / kSpan;
  }

  void divide(int width) {
    count = spans = longest = numbers = 0;
    for (int part = 0; part < part_count_; ++part) {
      const int tasks = tasks_of(parts_[part]), own = spans_of(parts_[part]);
      count += tasks, spans += tasks * own, longest = std::max(longest, own);
      const int queries = rows_together(parts_[part]) * group_;
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
  const Tasks tasks(a.parts, a.part_count, a.heads, a.kv_heads, a.kv.head_dim, team.size);
  static thread_local const std::unique_ptr<Ways<Number>> own(new Ways<Number>);
  Ways<Number>& ways = *own;  // a reference: compilers look up a thread-local variable at every use
  Block<Number>& block = ways.block;
  // Open a task's block, and do `work` the faster way.
  const auto open = [&](const Task& task, auto work) {
    block.open(a, task.kv_head, *task.part, task.first, task.rows);
    if constexpr (kMostByKey > 0)
      if (!ways.by_query.uses_amx() && ways.by_key.is_faster()) return work(ways.by_key);
    work(ways.by_query);
  };
  if (!tasks.are_split) {
    static thread_local std::vector<float> sums;
    return team.share(tasks.count, [&](int number) {
      open(tasks.find(number, false), [&](auto& way) {
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
  const auto sums_of = [&](int span) { return room + size_t(span) * tasks.numbers; };
  team.share(tasks.spans, [&](int number) {
    const Task task = tasks.find(number, true);
    const int span = number - task.before;
    open(task, [&](auto& way) {
      if (span < block.first_span() || span > block.last_span()) return;
      way.take_queries();
      way.attend(span, sums_of(number));
    });
  });
  team.share(tasks.count, [&](int number) {
    const Task task = tasks.find(number, false);
    open(task, [&](auto& way) {
      float* all = sums_of(task.before + block.first_span());
      for (int span = block.first_span() + 1; span <= block.last_span(); ++span) way.add(sums_of(task.before + span), all);
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
