// A process that forks (data loaders, servers with workers) goes on in both halves.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>
#include <vector>

#include "each_tier.hpp"
#include "error.hpp"
#include "layers.hpp"

using kt::Context;
using kt::check::Batch;
using kt::check::Kernel;
using kt::check::make_batch;
using kt::check::make_layer;
using kt::check::same_bits;
using kt::check::Shape;

namespace {

constexpr Shape kShape{4, 130, 66};
constexpr int kHung = 1000;

// Runs `work` in a child; true there is status 0. A child that does not end in twenty seconds is killed.
template <class Work>
int status_of_child(const Work& work) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    bool fine = false;
    try {
      fine = work();
    } catch (...) {
    }
    _exit(fine ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) return WTERMSIG(status) == SIGALRM ? kHung : 128 + WTERMSIG(status);
  return WEXITSTATUS(status);
}

}  // namespace

TEST_EACH_FORMAT("fork: a child computes with its parent's layer, and so does the parent afterwards") {
  const auto layer = make_layer(kShape);
  for (const std::size_t threads : {1, 3}) {
    Kernel kernel(layer, c.format, *c.table, {threads, 16});
    const Batch batch = make_batch(kShape, 40, 2);
    const std::vector<float> expected = kernel(batch);
    for (int i = 0; i < 3; ++i) {
      CHECK_EQ(
          status_of_child([&] { return same_bits(kernel(batch), expected) && same_bits(kernel(batch), expected); }), 0);
      CHECK_SAME_BITS(kernel(batch), expected, kShape.hidden);
    }
  }
}

TEST_EACH_FORMAT("fork: while another thread is in its first and ever larger batches") {
  const auto layer = make_layer(kShape);
  const Batch batch = make_batch(kShape, 40, 2);
  const std::vector<float> expected = Kernel(layer, c.format, *c.table, {2, 64})(batch);
  for (int i = 0; i < 4; ++i) {
    Kernel kernel(layer, c.format, *c.table, {2, 64});  // new: nothing has its size yet
    std::atomic<bool> stop{false};
    std::thread caller([&] {
      for (std::size_t tokens = 1; !stop.load(); tokens = tokens % 60 + 1) {
        kernel(make_batch(kShape, tokens, 2));
        std::this_thread::yield();  // the emulator changes threads only where they let it: a run waits for nobody
      }
    });
    const int status = status_of_child([&] { return same_bits(kernel(batch), expected); });
    stop = true;
    caller.join();
    CHECK_EQ(status, 0);
    CHECK_SAME_BITS(kernel(batch), expected, kShape.hidden);
  }
}

TEST("fork: a grandchild too, and a child may submit") {
  Kernel kernel(make_layer(kShape), kt::Format::kInt8, kt::check::generic(), {2, 64});
  const Batch batch = make_batch(kShape, 7, 2);
  const std::vector<float> expected = kernel(batch);
  const auto submits = [&] {
    std::vector<float> y;
    kernel.moe().submit(kt::check::arguments(batch, y))->wait();
    return same_bits(y, expected);
  };
  CHECK_EQ(status_of_child([&] { return submits() && status_of_child(submits) == 0 && submits(); }), 0);
  CHECK(submits());
}

TEST("fork: what a child inherits is destroyed there without waiting for threads it does not have") {
  auto context = std::make_unique<Context>(4);
  {
    const Context::Session started(*context);
  }
  context->submit([] {})->wait();
  CHECK_EQ(status_of_child([&] {
             context.reset();
             return true;
           }),
           0);
}

TEST("fork: while other threads compute and submit") {
  const auto layer = make_layer({3, 64, 32});
  Kernel kernel(layer, kt::Format::kInt8, kt::check::generic(), {2, 4});
  const Batch batch = make_batch(layer.shape, 11, 2);
  const std::vector<float> expected = kernel(batch);
  std::atomic<bool> stop{false};
  std::thread caller([&] {
    while (!stop.load()) {
      kernel(batch);
      std::this_thread::yield();
    }
  });
  std::thread submitter([&] {
    std::vector<float> y;
    while (!stop.load()) kernel.moe().submit(kt::check::arguments(batch, y))->wait();
  });
  int status = 0;
  for (int i = 0; i < 60 && status == 0; ++i) {
    status = status_of_child([&] { return same_bits(kernel(batch), expected); });
  }
  CHECK_EQ(status, 0);
  stop = true;
  caller.join();
  submitter.join();
}

TEST("fork: work that was in flight is an error in the child, not an endless wait") {
  Context context(2);
  std::atomic<bool> go{false};
  const auto pending = context.submit([&] {
    while (!go.load()) std::this_thread::yield();
  });
  const auto finished = [] {
    Context other(1);
    const auto done = other.submit([] {});
    done->wait();
    return done;
  }();
  CHECK_EQ(status_of_child([&] {
             finished->wait();  // done before the fork: nothing is missing
             if (!finished->done() || pending->done()) return false;
             try {
               pending->wait();
             } catch (const kt::ForkError&) {
               return true;
             }
             return false;
           }),
           0);
  go = true;
  pending->wait();
}
