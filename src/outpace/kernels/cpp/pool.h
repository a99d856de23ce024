// Threads that share a pass and sleep between passes.
//
// Inside a pass they spin for some microseconds while they wait for each other, and then yield the core: if another
// process runs on this machine, further spinning would take the core from the thread that they wait for.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

static inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield` does nothing on CPUs without hardware threads: spins would end at once
#endif
}

static inline int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

constexpr int kSpinsInPass = 2000;  // some 30 microseconds

// Returns the wait beyond the spins, in nanoseconds: the time that another process has the core of the awaited thread.
template <class Ready>
static inline int64_t wait_until(Ready ready) {
  for (int turn = 0; turn < kSpinsInPass; ++turn) {
    if (ready()) return 0;
    pause_briefly();
  }
  if (ready()) return 0;
  const int64_t start = nanoseconds();
  while (!ready()) std::this_thread::yield();
  return nanoseconds() - start;
}

constexpr int kSpinsBetween = 500;  // the next task often comes right after the last

// Whether passes are faster on one thread. If another process runs on a core, the system suspends the thread there for
// milliseconds at a time, and all others wait for it at the next meeting: with two busy processes, two threads take
// three times as long as one. So after a pass that waited for much of its time some passes have one thread, and then
// all threads are tried again.
class Crowd {
 public:
  // Number of threads, up to `size`, for the next pass.
  int take(int size) {
    if (alone_ == 0) return size;
    --alone_;
    return 1;
  }

  // Learn from a pass of `size` threads: its nanoseconds, and those that all threads together waited. If one thread is
  // suspended, all others wait.
  void learn(int size, int64_t all, int64_t waited) {
    if (waited * 4 < all * (size - 1)) {
      strikes_ = std::max(strikes_ - 1, 0);
      if (strikes_ == 0) pause_ = kFirstPause;
      return;
    }
    if (++strikes_ < kStrikes) return;
    strikes_ = kStrikes - 1;  // at the next try one strike is enough
    alone_ = pause_;
    pause_ = std::min(2 * pause_, kLongestPause);
  }

 private:
  static constexpr int kStrikes = 3, kFirstPause = 16, kLongestPause = 256;
  int strikes_ = 0, alone_ = 0, pause_ = kFirstPause;
};

// What the threads of one pass share.
class Team {
 public:
  explicit Team(int size) : size(size) {}
  const int size;
  std::atomic<int64_t> waited{0};  // nanoseconds of all threads together, beyond the usual waits

  // Wait for the others.
  void meet() {
    if (size == 1) return;
    const unsigned now = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(now + 1, std::memory_order_release);
    } else {
      waited += wait_until([&] { return phase_.load(std::memory_order_acquire) != now; });
    }
  }

  // Do `work(piece)` for all pieces, each on the next free thread, and meet.
  template <class Work>
  void share(int pieces, Work work) {
    if (size == 1) {
      for (int piece = 0; piece < pieces; ++piece) work(piece);
      return;
    }
    for (int piece; (piece = next_.fetch_add(1, std::memory_order_relaxed)) < pieces;) work(piece);
    meet();
  }

 private:
  std::atomic<int> arrived_{0}, next_{0};
  std::atomic<unsigned> phase_{0};
};

class Pool {
 public:
  // Run `work(team)` on `size` threads, this one among them. `is_even`: its pieces keep all threads busy, so that long
  // waits mean that other processes run; else nothing is learned of them.
  void run(int size, const std::function<void(Team&)>& work, bool is_even = true) {
    std::lock_guard<std::mutex> one_at_a_time(turn_);
    size = size > 1 ? crowd_.take(size) : 1;
    if (size > 1 && !hire(size - 1)) size = 1;
    Team team(size);
    if (size == 1) return work(team);
    const int64_t start = nanoseconds();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      team_ = &team, work_ = &work, wanted_ = size - 1;
      busy_.store(size - 1);
      job_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    work(team);
    team.waited += wait_until([&] { return busy_.load(std::memory_order_acquire) == 0; });
    if (is_even) crowd_.learn(size, nanoseconds() - start, team.waited.load());
  }

 private:
  // Start threads up to this number; false if the system refuses one, as in a container with a limit.
  bool hire(int count) {
    try {
      for (; hired_ < count; ++hired_)
        std::thread([this, index = hired_, seen = job_.load()] { serve(index, seen); }).detach();
    } catch (const std::system_error&) {
      return false;
    }
    return true;
  }

  void serve(int index, unsigned seen) {
    for (;;) {
      for (int turn = 0; turn < kSpinsBetween && job_.load(std::memory_order_acquire) == seen; ++turn) pause_briefly();
      Team* team;
      const std::function<void(Team&)>* work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return job_.load() != seen; });
        seen = job_.load();
        if (index >= wanted_) continue;
        team = team_, work = work_;
      }
      (*work)(*team);
      busy_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  Crowd crowd_;
  std::mutex turn_, mutex_;
  std::condition_variable wake_;
  std::atomic<unsigned> job_{0};
  std::atomic<int> busy_{0};
  Team* team_ = nullptr;
  const std::function<void(Team&)>* work_ = nullptr;
  int wanted_ = 0, hired_ = 0;
};
