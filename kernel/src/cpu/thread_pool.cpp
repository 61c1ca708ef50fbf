#include "cpu/thread_pool.hpp"

#include <algorithm>
#include <cfenv>
#include <utility>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace kt {
namespace {

// How long a thread polls before it sleeps. A pause is 40 to 140 cycles on today's x86, so this is some 10 to 50 µs:
// longer than the gap between two phases of a decode step, shorter than what the caller's other work between two layers
// would miss of the core.
constexpr int kSpins = 1000;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void wait_until_changed(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(std::size_t threads) {
  try {
    workers_.reserve(threads - 1);
    for (std::size_t i = 1; i < threads; ++i) workers_.emplace_back([this, i] { worker(i); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  stop();
}

void ThreadPool::stop() {
  stopping_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (std::thread& thread : workers_) thread.join();
}

bool ThreadPool::works_on(std::thread::id id) const {
  return std::any_of(workers_.begin(), workers_.end(), [id](const std::thread& t) { return t.get_id() == id; });
}

void ThreadPool::run(std::span<const Phase> phases) {
  if (phases.empty()) return;
  phases_ = phases;
  next_ = std::vector<std::atomic<std::size_t>>(phases.size());
  failed_.store(false, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  run_phases(0);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::worker(std::size_t thread) {
  std::fesetenv(FE_DFL_ENV);  // threads inherit the creator's rounding and flush-to-zero modes; results must not
  std::uint32_t seen = 0;
  for (;;) {
    wait_until_changed(epoch_, seen);
    if (stopping_.load(std::memory_order_relaxed)) return;
    ++seen;  // one run per change: run() returns only after every worker has passed the last barrier
    run_phases(thread);
  }
}

void ThreadPool::run_phases(std::size_t thread) {
  const std::size_t count = phases_.size();
  for (std::size_t i = 0; i < count; ++i) {
    run_items(phases_[i], next_[i], thread);
    barrier();
  }
}

void ThreadPool::run_items(const Phase& phase, std::atomic<std::size_t>& next, std::size_t thread) {
  try {
    std::size_t begin = next.load(std::memory_order_relaxed);
    while (begin < phase.items && !failed_.load(std::memory_order_relaxed)) {
      // Shrinking shares: long sequential streams first, single grains at the end to even out.
      const std::size_t share = std::max(phase.grain, (phase.items - begin) / (2 * threads()));
      const std::size_t end = std::min(phase.items, begin + share);
      if (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      phase.work(begin, end, thread);
      begin = next.load(std::memory_order_relaxed);
    }
  } catch (...) {
    if (!failed_.exchange(true, std::memory_order_acq_rel)) error_ = std::current_exception();
  }
}

void ThreadPool::barrier() {
  if (workers_.empty()) return;
  const std::uint32_t generation = generation_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads()) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  } else {
    wait_until_changed(generation_, generation);
  }
}

}  // namespace kt
