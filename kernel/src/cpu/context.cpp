#include "cpu/context.hpp"

#include <cfenv>
#include <deque>
#include <thread>

#include "error.hpp"

namespace kt {

// Everything that a fork would leave unusable.
struct ContextState {
  explicit ContextState(std::size_t threads) : pool(threads) {}
  ~ContextState();

  std::unique_lock<std::mutex> enter();
  void leave() { owner.store({}, std::memory_order_relaxed); }
  void serve();

  std::mutex session;
  std::atomic<std::thread::id> owner{};  // of the session
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

// Waiting for oneself would never end.
std::unique_lock<std::mutex> ContextState::enter() {
  const std::thread::id self = std::this_thread::get_id();
  if (owner.load(std::memory_order_relaxed) == self || pool.works_on(self))
    throw Error("a job asked for its own context while it runs; give nested work another context");
  std::unique_lock lock(session);
  owner.store(self, std::memory_order_relaxed);
  return lock;
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
  if (!done()) {
    if (process_ != getpid())
      throw ForkError("this work was submitted before the process forked: only the parent gets its result");
    std::unique_lock lock(mutex_);
    condition_.wait(lock, [this] { return done(); });
  }
  if (error_) std::rethrow_exception(error_);
}

void Pending::finish(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
  }
  condition_.notify_all();
}

struct Context::Generation {
  pid_t process;
  std::shared_ptr<ContextState> state;
};

Context::Context(std::size_t threads) : threads_(threads), current_(nullptr) {
  if (threads == 0 || threads > 4096)
    throw Error("a context needs between 1 and 4096 threads, not " + std::to_string(threads));
  current_ = new Generation{getpid(), std::make_shared<ContextState>(threads)};
}

Context::~Context() {
  const Generation* current = current_.load(std::memory_order_acquire);
  // In a forked child the threads do not exist and joining them would hang: leave the parent's state alone.
  if (current->process == getpid()) delete current;
}

std::shared_ptr<ContextState> Context::state() {
  Generation* current = current_.load(std::memory_order_acquire);
  if (current->process == getpid()) return current->state;
  auto fresh = std::make_unique<Generation>(getpid(), std::make_shared<ContextState>(threads_));
  // The parent's state is never destroyed: its locks may be held by threads that are gone.
  if (current_.compare_exchange_strong(current, fresh.get(), std::memory_order_acq_rel)) return fresh.release()->state;
  return current->state;  // another thread of the child was first
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
    : state_(context.state()), lock_(state_->enter()), modes_(std::make_unique<FloatingPointModes>()) {}

Context::Session::~Session() {
  state_->leave();
}

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
