// What the kernel's objects share: threads, scratch memory, a queue for submitted work. No global state anywhere else.
#pragma once

#include <sys/types.h>

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
  void wait();  // blocks until done; rethrows the work's exception
  bool done() const;

 private:
  friend class Context;
  void finish(std::exception_ptr error);

  mutable std::mutex mutex_;
  std::condition_variable condition_;
  bool done_ = false;
  std::exception_ptr error_;
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
  // flush-to-zero modes: they are put to the default and restored.
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
  std::shared_ptr<struct ContextState> state();

  const std::size_t threads_;
  pid_t process_;
  std::mutex guard_;
  std::shared_ptr<struct ContextState> state_;
};

}  // namespace kt
