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
  if (progress_.size() < phases.size()) progress_ = std::vector<Progress>(phases.size());
  for (Progress& progress : progress_) {
    progress.next.store(0, std::memory_order_relaxed);
    progress.done.store(0, std::memory_order_relaxed);
  }
  finished_.store(0, std::memory_order_relaxed);
  failed_.store(false, std::memory_order_relaxed);
  helpers_.store(0, std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  run_phases(0);
  dismiss_helpers();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::worker(std::size_t thread) {
  std::fesetenv(FE_DFL_ENV);  // threads inherit the creator's rounding and flush-to-zero modes; results must not
  std::uint32_t seen = 0;
  for (;;) {
    wait_until_changed(epoch_, seen);
    if (stopping_.load(std::memory_order_relaxed)) return;
    seen = epoch_.load(std::memory_order_acquire);
    if (!join()) continue;
    run_phases(thread);
    leave();
  }
}

bool ThreadPool::join() {
  std::uint32_t helpers = helpers_.load(std::memory_order_relaxed);
  while ((helpers & kClosed) == 0) {
    if (helpers_.compare_exchange_weak(helpers, helpers + 1, std::memory_order_acquire)) return true;
  }
  return false;
}

void ThreadPool::leave() {
  if (helpers_.fetch_sub(1, std::memory_order_release) - 1 == kClosed) helpers_.notify_all();
}

void ThreadPool::dismiss_helpers() {
  std::uint32_t helpers = helpers_.fetch_or(kClosed, std::memory_order_acquire) | kClosed;
  while (helpers != kClosed) {
    wait_until_changed(helpers_, helpers);
    helpers = helpers_.load(std::memory_order_acquire);
  }
}

void ThreadPool::run_phases(std::size_t thread) {
  for (std::uint32_t i = 0; i < phases_.size(); ++i) {
    run_items(i, thread);
    std::uint32_t finished = finished_.load(std::memory_order_acquire);
    while (finished <= i) {
      wait_until_changed(finished_, finished);
      finished = finished_.load(std::memory_order_acquire);
    }
    if (finished == kGivenUp) return;
  }
}

void ThreadPool::run_items(std::uint32_t index, std::size_t thread) {
  const Phase& phase = phases_[index];
  Progress& progress = progress_[index];
  if (phase.items == 0) finish(index);
  try {
    std::size_t begin = progress.next.load(std::memory_order_relaxed);
    while (begin < phase.items && !failed_.load(std::memory_order_relaxed)) {
      // Shrinking shares: long sequential streams first, single grains at the end to even out.
      const std::size_t share = std::max(phase.grain, (phase.items - begin) / (2 * threads()));
      const std::size_t end = std::min(phase.items, begin + share);
      if (!progress.next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      phase.work(begin, end, thread);
      if (progress.done.fetch_add(end - begin, std::memory_order_acq_rel) + (end - begin) == phase.items) finish(index);
      begin = progress.next.load(std::memory_order_relaxed);
    }
  } catch (...) {
    if (!failed_.exchange(true, std::memory_order_acq_rel)) error_ = std::current_exception();
    // An exchange, as before every notify: a plain store may still be on its way when notify looks for who waits.
    finished_.exchange(kGivenUp, std::memory_order_acq_rel);
    finished_.notify_all();
  }
}

// Of an empty phase any thread may say so, and late: what was given up or went on stays so.
void ThreadPool::finish(std::uint32_t index) {
  std::uint32_t expected = index;
  if (finished_.compare_exchange_strong(expected, index + 1, std::memory_order_acq_rel)) finished_.notify_all();
}

}  // namespace kt
