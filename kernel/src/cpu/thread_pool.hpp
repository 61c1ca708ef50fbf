// Worker threads that run phases together: every item of a phase is done before the next phase begins. A worker that
// wakes late takes what is left; nobody waits for one that sleeps, or that the system has no core for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

namespace kt {

struct Phase {
  std::size_t items = 0;
  std::size_t grain = 1;  // items a thread takes at least at a time
  std::function<void(std::size_t begin, std::size_t end, std::size_t thread)> work;
};

// Owns threads-1 workers; the thread that calls run() is the first one. One run() at a time (Context sees to that).
class ThreadPool {
 public:
  explicit ThreadPool(std::size_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t threads() const { return workers_.size() + 1; }
  bool works_on(std::thread::id thread) const;

  // Runs the phases in order. The first exception thrown by any thread ends the run and is rethrown here.
  void run(std::span<const Phase> phases);

 private:
  struct alignas(64) Progress {        // a cache line: a phase's items are taken while the next one's are not
    std::atomic<std::size_t> next{0};  // first item not yet taken
    std::atomic<std::size_t> done{0};
  };
  static constexpr std::uint32_t kClosed = 1u << 31;
  static constexpr std::uint32_t kGivenUp = UINT32_MAX;

  void worker(std::size_t thread);
  bool join();
  void leave();
  void dismiss_helpers();
  void run_phases(std::size_t thread);
  void run_items(std::uint32_t index, std::size_t thread);
  void finish(std::uint32_t index);
  void stop();

  std::vector<std::thread> workers_;
  std::span<const Phase> phases_;
  std::vector<Progress> progress_;
  std::atomic<std::uint32_t> epoch_{0};          // a change wakes the workers
  std::atomic<std::uint32_t> helpers_{kClosed};  // workers in this run; closed to more between runs
  std::atomic<std::uint32_t> finished_{0};       // phases of which all is done, or kGivenUp
  std::atomic<bool> stopping_{false};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace kt
