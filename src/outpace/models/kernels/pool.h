// Threads that share a pass and sleep between passes.
//
// Inside a pass they wait for each other some microseconds long with their eyes open, then hand the core to whoever
// wants it: spinning on, they would take the core from the one they wait for where something else runs beside.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

static inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Ready>
static inline void wait_until(Ready ready, int spins) {
  for (int turn = 0; !ready(); ++turn) {
    if (turn < spins) pause_briefly();
    else std::this_thread::yield();
  }
}

constexpr int kSpinsInPass = 2000;     // some 30 microseconds
constexpr int kSpinsBetween = 500;     // a worker that was awake a moment ago is asked again at once

// What the threads of one pass share.
class Team {
 public:
  explicit Team(int size) : size(size) {}
  const int size;

  // Wait for the others.
  void meet() {
    if (size == 1) return;
    const unsigned now = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(now + 1, std::memory_order_release);
    } else {
      wait_until([&] { return phase_.load(std::memory_order_acquire) != now; }, kSpinsInPass);
    }
  }

  // Do `work(piece)` for all pieces, each by whoever is free, and meet.
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
  // Run `work(team)` on `size` threads, this one among them.
  void run(int size, const std::function<void(Team&)>& work) {
    std::lock_guard<std::mutex> one_at_a_time(turn_);
    Team team(size);
    if (size > 1) {
      hire(size - 1);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        team_ = &team, work_ = &work, wanted_ = size - 1;
        busy_.store(size - 1);
        job_.fetch_add(1, std::memory_order_release);
      }
      wake_.notify_all();
    }
    work(team);
    wait_until([&] { return busy_.load(std::memory_order_acquire) == 0; }, kSpinsInPass);
  }

 private:
  void hire(int count) {
    for (; hired_ < count; ++hired_)
      std::thread([this, index = hired_, seen = job_.load()] { serve(index, seen); }).detach();
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

  std::mutex turn_, mutex_;
  std::condition_variable wake_;
  std::atomic<unsigned> job_{0};
  std::atomic<int> busy_{0};
  Team* team_ = nullptr;
  const std::function<void(Team&)>* work_ = nullptr;
  int wanted_ = 0, hired_ = 0;
};
