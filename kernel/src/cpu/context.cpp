#include "cpu/context.hpp"

#include <unistd.h>

#include <cfenv>
#include <deque>
#include <thread>

#include "error.hpp"

namespace kt {

// Everything that a fork would leave unusable.
struct ContextState {
  explicit ContextState(std::size_t threads) : pool(threads) {}
  ~ContextState();

  void serve();

  std::mutex session;
  ThreadPool pool;
  AlignedBuffer scratch;

  struct Job {
    std::function<void()> work;
    std::function<void(std::exception_ptr)> finish;
  };
  std::mutex queue_mutex;
  std::condition_variable queue_changed;
  std::deque<Job> queue;
  bool stopping = false;
  std::thread submitter;  // started by the first submit
};

ContextState::~ContextState() {
  if (!submitter.joinable()) return;
  {
    const std::lock_guard lock(queue_mutex);
    stopping = true;
  }
  queue_changed.notify_one();
  submitter.join();
}

void ContextState::serve() {
  for (;;) {
    Job job;
    {
      std::unique_lock lock(queue_mutex);
      queue_changed.wait(lock, [this] { return stopping || !queue.empty(); });
      if (queue.empty()) return;
      job = std::move(queue.front());
      queue.pop_front();
    }
    std::exception_ptr error;
    try {
      job.work();
    } catch (...) {
      error = std::current_exception();
    }
    job.finish(error);
  }
}

void Pending::wait() {
  std::unique_lock lock(mutex_);
  condition_.wait(lock, [this] { return done_; });
  if (error_) std::rethrow_exception(error_);
}

bool Pending::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

void Pending::finish(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
    error_ = std::move(error);
  }
  condition_.notify_all();
}

Context::Context(std::size_t threads) : threads_(threads), process_(getpid()) {
  if (threads == 0 || threads > 4096)
    throw Error("a context needs between 1 and 4096 threads, not " + std::to_string(threads));
  state_ = std::make_shared<ContextState>(threads);
}

Context::~Context() {
  // In a forked child the threads do not exist and joining them would hang: leave the parent's state alone.
  if (process_ != getpid()) new std::shared_ptr<ContextState>(std::move(state_));
}

std::shared_ptr<ContextState> Context::state() {
  const std::lock_guard lock(guard_);
  if (process_ != getpid()) {
    new std::shared_ptr<ContextState>(
        std::move(state_));  // never destroyed: its locks may be held by threads that are gone
    state_ = std::make_shared<ContextState>(threads_);
    process_ = getpid();
  }
  return state_;
}

std::shared_ptr<Pending> Context::submit(std::function<void()> work) {
  const std::shared_ptr<ContextState> current = state();
  auto pending = std::make_shared<Pending>();
  {
    const std::lock_guard lock(current->queue_mutex);
    if (!current->submitter.joinable()) current->submitter = std::thread([raw = current.get()] { raw->serve(); });
    current->queue.push_back(
        {std::move(work), [pending](std::exception_ptr error) { pending->finish(std::move(error)); }});
  }
  current->queue_changed.notify_one();
  return pending;
}

struct Context::Session::FloatingPointModes {
  FloatingPointModes() {
    std::fegetenv(&saved);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatingPointModes() { std::fesetenv(&saved); }
  std::fenv_t saved;
};

Context::Session::Session(Context& context)
    : state_(context.state()), lock_(state_->session), modes_(std::make_unique<FloatingPointModes>()) {}

Context::Session::~Session() = default;

void Context::Session::run(std::span<const Phase> phases) {
  state_->pool.run(phases);
}

std::byte* Context::Session::scratch(std::size_t bytes) {
  if (state_->scratch.size() < bytes) {
    state_->scratch = AlignedBuffer();  // give the old block back first: the peak is one block
    state_->scratch = AlignedBuffer(bytes);
  }
  return state_->scratch.data();
}

std::size_t Context::Session::scratch_bytes() const {
  return state_->scratch.size();
}

}  // namespace kt
