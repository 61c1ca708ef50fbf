#include "cpu/context.hpp"

#include <atomic>
#include <cfenv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "each_tier.hpp"
#include "error.hpp"
#include "layers.hpp"

using kt::Context;
using kt::Phase;
using kt::check::Batch;
using kt::check::Kernel;
using kt::check::make_batch;
using kt::check::make_layer;
using kt::check::Shape;

namespace {

constexpr Shape kShape{4, 130, 66};

void run_one(Context::Session& session, const Phase& phase) {
  session.run({&phase, 1});
}

}  // namespace

TEST("context: a number of threads that cannot be is refused") {
  CHECK_THROWS(Context(0), kt::Error, "between 1 and 4096");
  CHECK_THROWS(Context(4097), kt::Error, "4097");
  CHECK_EQ(Context(3).threads(), 3u);
}

TEST("context: scratch is aligned, grows, and never shrinks") {
  Context context(2);
  Context::Session session(context);
  std::size_t most = 0;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{1000}, std::size_t{3} << 20, std::size_t{10}}) {
    std::byte* p = session.scratch(bytes);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(p) % 64, 0u);
    most = std::max(most, bytes);
    CHECK(session.scratch_bytes() >= most);
    p[0] = p[bytes - 1] = std::byte{1};
  }
}

TEST("context: memory that is not there is a bad_alloc, and the context works on") {
  Context context(1);
  Context::Session session(context);
  CHECK_THROWS(session.scratch(std::size_t{1} << 60), std::bad_alloc);
  CHECK_THROWS(session.scratch(~std::size_t{0} - 5), std::bad_alloc);
  CHECK(session.scratch(100) != nullptr);
}

TEST("context: a session puts the floating-point modes to the default and gives the caller's back") {
  Context context(1);
  std::fesetround(FE_UPWARD);
  int inside = -1;
  {
    Context::Session session(context);
    inside = std::fegetround();
  }
  const int after = std::fegetround();
  std::fesetround(FE_TONEAREST);
  CHECK_EQ(inside, FE_TONEAREST);
  CHECK_EQ(after, FE_UPWARD);
}

TEST("context: a job that asks for its own context again is told, on every thread") {
  Context context(3);
  std::atomic<int> told{0};
  const Phase phase{3, 1, [&](std::size_t, std::size_t, std::size_t) {
                      try {
                        Context::Session nested(context);
                      } catch (const kt::Error&) {
                        ++told;
                      }
                    }};
  int calls = 0;
  {
    Context::Session session(context);
    run_one(session, phase);
    calls = told.load();
    CHECK_THROWS(Context::Session(context), kt::Error, "own context");
  }
  CHECK(calls >= 1);
  Context::Session again(context);  // free again
}

TEST("context: a job may use another context") {
  Context outer(2), inner(2);
  std::atomic<std::size_t> items{0};
  Context::Session session(outer);
  run_one(session, {5, 1, [&](std::size_t b, std::size_t e, std::size_t) {
                      for (std::size_t i = b; i < e; ++i) {
                        Context::Session nested(inner);
                        run_one(nested, {4, 1, [&](std::size_t nb, std::size_t ne, std::size_t) { items += ne - nb; }});
                      }
                    }});
  CHECK_EQ(items.load(), 20u);
}

TEST("context: submitted work runs in order of submission, on one thread that is not the caller") {
  Context context(1);
  std::vector<int> order;  // only the submission thread writes, and wait() orders it before us
  std::vector<std::thread::id> threads;
  std::vector<std::shared_ptr<kt::Pending>> pending;
  for (int i = 0; i < 200; ++i) {
    pending.push_back(context.submit([&, i] { order.push_back(i), threads.push_back(std::this_thread::get_id()); }));
  }
  pending.back()->wait();
  for (const auto& p : pending) CHECK(p->done());
  for (int i = 0; i < 200; ++i) CHECK_EQ(order[static_cast<std::size_t>(i)], i);
  for (const auto& id : threads) CHECK(id == threads[0] && id != std::this_thread::get_id());
}

TEST("context: the error of submitted work arrives at each wait, and later work runs") {
  Context context(2);
  const auto failed = context.submit([] { throw std::runtime_error("submitted"); });
  const auto fine = context.submit([] {});
  for (int i = 0; i < 3; ++i) CHECK_THROWS(failed->wait(), std::runtime_error, "submitted");
  CHECK(failed->done());
  fine->wait();
  fine->wait();
}

TEST("context: many threads may wait for one piece of work") {
  Context context(1);
  std::atomic<bool> go{false};
  std::atomic<int> seen{0};
  const auto pending = context.submit([&] {
    while (!go.load()) std::this_thread::yield();
  });
  CHECK(!pending->done());
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i) waiters.emplace_back([&] { pending->wait(), ++seen; });
  go = true;
  for (std::thread& waiter : waiters) waiter.join();
  CHECK_EQ(seen.load(), 4);
}

TEST("context: work that is still queued is done before the context goes") {
  std::atomic<int> done{0};
  {
    Context context(2);
    for (int i = 0; i < 50; ++i) context.submit([&] { ++done; });
  }
  CHECK_EQ(done.load(), 50);
}

TEST_EACH_FORMAT("context: two threads calling one layer at once both get their answer") {
  const auto layer = make_layer(kShape);
  Kernel kernel(layer, c.format, *c.table, {2, 16});
  const Batch batches[] = {make_batch(kShape, 37, 2, 1), make_batch(kShape, 5, 3, 2)};
  const std::vector<float> expected[] = {kernel(batches[0]), kernel(batches[1])};
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (std::size_t caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 20; ++i) wrong += !kt::check::same_bits(kernel(batches[caller % 2]), expected[caller % 2]);
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST_EACH_FORMAT("context: layers that share a context, called and submitted together") {
  const auto first = make_layer(kShape, 1), second = make_layer({2, 64, 200}, 2);
  Kernel one(first, c.format, *c.table, {3, 64}), two(second, c.format, *c.table, {3, 64});
  const Batch a = make_batch(first.shape, 30, 2), b = make_batch(second.shape, 9, 1);
  const std::vector<float> expected_a = one(a), expected_b = two(b);
  for (int i = 0; i < 20; ++i) {
    std::vector<float> ya, yb;
    const auto pending_a = one.moe().submit(kt::check::arguments(a, ya));
    const auto pending_b = two.moe().submit(kt::check::arguments(b, yb));
    CHECK_SAME_BITS(two(b), expected_b, 64);
    pending_b->wait();
    CHECK(pending_a->done());
    CHECK_SAME_BITS(ya, expected_a, kShape.hidden);
    CHECK_SAME_BITS(yb, expected_b, 64);
  }
}

TEST("context: a layer is packed while another one computes on the same context") {
  const auto layer = make_layer(kShape);
  Kernel kernel(layer, kt::Format::kInt8, kt::check::generic(), {2, 64});
  const Batch batch = make_batch(kShape, 20, 2);
  const std::vector<float> expected = kernel(batch);
  std::thread packer([&] {
    for (int i = 0; i < 10; ++i) kt::check::pack(layer, kt::Format::kInt8, true, nullptr, 2);
  });
  for (int i = 0; i < 30; ++i) CHECK_SAME_BITS(kernel(batch), expected, kShape.hidden);
  packer.join();
}
