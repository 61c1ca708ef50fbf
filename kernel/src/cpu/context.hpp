// What the kernel's objects share: threads, scratch memory, a queue for submitted work. No global state anywhere else.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>

#include "cpu/aligned_buffer.hpp"
#include "cpu/thread_pool.hpp"

namespace kt {

// The outcome of submitted work.
class Pending {
 public:
  // Blocks until done; rethrows the work's exception. ForkError in a forked child, where nobody is left to finish it.
  void wait();
  bool done() const { return done_.load(std::memory_order_acquire); }

 private:
  friend class Context;
  void finish(std::exception_ptr error);

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable condition_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;  // written before done_
};

// Survives fork: a child finds its parent's threads gone and makes its own.
class Context {
 public:
  explicit Context(std::size_t threads);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  std::size_t threads() const { return threads_; }

  // The right to use threads and scratch, held for a whole forward. Results do not depend on the caller's rounding or
  // flush-to-zero modes: they are put to the default and restored. Error when a job asks for its own context.
  class Session {
   public:
    explicit Session(Context& context);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    void run(std::span<const Phase> phases);
    std::byte* scratch(std::size_t bytes);  // 64-byte aligned, contents unspecified, valid until the next call
    std::size_t scratch_bytes() const;

   private:
    struct FloatingPointModes;
    std::shared_ptr<struct ContextState> state_;
    std::unique_lock<std::mutex> lock_;
    std::unique_ptr<FloatingPointModes> modes_;
  };

  // Runs `work` on the context's submission thread, in order of submission.
  std::shared_ptr<Pending> submit(std::function<void()> work);

 private:
  struct Generation;

  std::shared_ptr<struct ContextState> state();

  const std::size_t threads_;
  std::atomic<Generation*> current_;  // no lock: a fork may happen while another thread would hold it
};

}  // namespace kt
