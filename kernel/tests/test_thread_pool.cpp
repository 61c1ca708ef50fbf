#include "cpu/thread_pool.hpp"

#include <atomic>
#include <cfenv>
#include <chrono>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"

using kt::Phase;
using kt::ThreadPool;

namespace {

constexpr std::size_t kThreads[] = {1, 2, 3, 5, 8};

// How often each item was taken; threads write their own items only if nothing is taken twice.
struct Taken {
  explicit Taken(std::size_t items) : times(items), threads(items) {}
  Phase phase(std::size_t grain = 1) {
    return {times.size(), grain, [this](std::size_t begin, std::size_t end, std::size_t thread) {
              if (begin >= end) empty = true;
              for (std::size_t i = begin; i < end; ++i) times[i].fetch_add(1), threads[i] = thread;
            }};
  }
  void check(std::size_t pool_threads) const {
    for (const auto& count : times) CHECK_EQ(count.load(), 1);
    for (const std::size_t thread : threads) CHECK(thread < pool_threads);
    CHECK(!empty);
  }
  std::vector<std::atomic<int>> times;
  std::vector<std::size_t> threads;
  std::atomic<bool> empty{false};
};

void run(ThreadPool& pool, std::vector<Phase> phases) {
  pool.run(phases);
}

// One item a thread; each waits until all are taken, so that every thread takes part.
Phase everybody(const ThreadPool& pool, std::atomic<std::size_t>& arrived, std::function<void(std::size_t)> work) {
  return {pool.threads(), 1,
          [&pool, &arrived, work = std::move(work)](std::size_t begin, std::size_t end, std::size_t thread) {
            arrived.fetch_add(end - begin);
            while (arrived.load() < pool.threads()) std::this_thread::yield();
            work(thread);
          }};
}

}  // namespace

TEST("pool: every item is taken exactly once, for odd numbers of threads, items and grains") {
  for (const std::size_t threads : kThreads) {
    ThreadPool pool(threads);
    CHECK_EQ(pool.threads(), threads);
    for (const std::size_t items : {0, 1, 2, 3, 7, 16, 17, 101, 1000}) {
      for (const std::size_t grain : {1, 2, 7, 64, 5000}) {
        Taken taken(items);
        run(pool, {taken.phase(grain)});
        taken.check(threads);
      }
    }
  }
}

TEST("pool: a phase begins when all of the one before is done") {
  for (const std::size_t threads : kThreads) {
    ThreadPool pool(threads);
    for (int round = 0; round < 50; ++round) {
      std::vector<int> first(97, 0), second(131, 0);  // plain memory: the barrier alone orders it
      std::atomic<int> wrong{0};
      const Phase write{first.size(), 1, [&](std::size_t b, std::size_t e, std::size_t) {
                          for (std::size_t i = b; i < e; ++i) first[i] = 1;
                        }};
      const Phase read{second.size(), 1, [&](std::size_t b, std::size_t e, std::size_t) {
                         for (std::size_t i = b; i < e; ++i) {
                           for (const int value : first) second[i] += value;
                         }
                       }};
      const Phase check{second.size(), 1, [&](std::size_t b, std::size_t e, std::size_t) {
                          for (std::size_t i = b; i < e; ++i) wrong += second[i] != 97;
                        }};
      run(pool, {write, read, Phase{0, 1, nullptr}, check});
      CHECK_EQ(wrong.load(), 0);
    }
  }
}

// More threads than cores: most wake late, in the middle of a run, behind it or in one of the next.
TEST("pool: short runs on the heels of each other, with threads that come late") {
  ThreadPool pool(8);
  for (std::size_t round = 0; round < 5000; ++round) {
    std::vector<std::size_t> first(1 + round % 9), second(1 + round % 5);  // of this run alone, and plain
    const Phase write{first.size(), 1, [&](std::size_t b, std::size_t e, std::size_t) {
                        for (std::size_t i = b; i < e; ++i) first[i] = round;
                      }};
    const Phase add{second.size(), 1, [&](std::size_t b, std::size_t e, std::size_t) {
                      for (std::size_t i = b; i < e; ++i) second[i] = std::accumulate(first.begin(), first.end(), i);
                    }};
    run(pool, {write, add});
    for (std::size_t i = 0; i < second.size(); ++i) CHECK_EQ(second[i], round * first.size() + i);
  }
}

TEST("pool: every thread takes part when there is work for all") {
  for (const std::size_t threads : kThreads) {
    ThreadPool pool(threads);
    std::atomic<std::size_t> arrived{0};
    std::vector<std::size_t> seen(threads, 0);
    run(pool, {everybody(pool, arrived, [&](std::size_t thread) { ++seen[thread]; })});
    CHECK_EQ(seen, std::vector<std::size_t>(threads, 1));
  }
}

TEST("pool: the caller is thread 0, and the only one in a pool of one") {
  ThreadPool pool(1);
  const auto caller = std::this_thread::get_id();
  bool same = true;
  run(pool, {Phase{10, 1, [&](std::size_t, std::size_t, std::size_t thread) {
                     same = same && thread == 0 && std::this_thread::get_id() == caller;
                   }}});
  CHECK(same);
}

TEST("pool: an exception of any thread reaches the caller and ends the run") {
  for (const std::size_t threads : kThreads) {
    ThreadPool pool(threads);
    for (std::size_t thrower = 0; thrower < threads; ++thrower) {
      std::atomic<std::size_t> arrived{0};
      std::atomic<bool> later{false};
      const Phase failing = everybody(pool, arrived, [&](std::size_t thread) {
        if (thread == thrower) throw std::runtime_error("thread " + std::to_string(thread));
      });
      const Phase never{10, 1, [&](std::size_t, std::size_t, std::size_t) { later = true; }};
      CHECK_THROWS(run(pool, {failing, never, never}), std::runtime_error, std::to_string(thrower).c_str());
      CHECK(!later.load());
      Taken taken(100);  // and the pool goes on
      run(pool, {taken.phase(), taken.phase(200)});
      for (const auto& count : taken.times) CHECK_EQ(count.load(), 2);
    }
  }
}

TEST("pool: when all threads throw, one exception arrives") {
  ThreadPool pool(5);
  for (int round = 0; round < 200; ++round) {
    std::atomic<std::size_t> arrived{0};
    const Phase failing = everybody(pool, arrived, [](std::size_t) { throw std::runtime_error("all"); });
    CHECK_THROWS(run(pool, {failing}), std::runtime_error, "all");
  }
}

TEST("pool: an exception that is no std::exception arrives too") {
  ThreadPool pool(3);
  std::atomic<std::size_t> arrived{0};
  int caught = 0;
  try {
    run(pool, {everybody(pool, arrived, [](std::size_t thread) {
          if (thread == 2) throw 42;
        })});
  } catch (const int value) {
    caught = value;
  }
  CHECK_EQ(caught, 42);
}

TEST("pool: ten thousand small runs, none of which hangs or loses an item") {
  for (const std::size_t threads : {2, 3, 7}) {
    ThreadPool pool(threads);
    std::atomic<std::size_t> items{0};
    const Phase count{3, 1, [&](std::size_t b, std::size_t e, std::size_t) { items.fetch_add(e - b); }};
    for (int i = 0; i < 10000; ++i) run(pool, {count, count});
    CHECK_EQ(items.load(), 60000u);
  }
}

TEST("pool: runs after every thread has gone to sleep") {
  ThreadPool pool(4);
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(i % 4));  // longer than a thread polls
    Taken taken(9);
    run(pool, {taken.phase()});
    taken.check(4);
  }
}

TEST("pool: is made and destroyed without any run, many times") {
  for (int i = 0; i < 300; ++i) ThreadPool pool(1 + static_cast<std::size_t>(i) % 6);
  ThreadPool pool(3);
  run(pool, {});  // nothing to do is no run
}

TEST("pool: a work item may use another pool") {
  ThreadPool outer(3);
  std::atomic<std::size_t> items{0};
  run(outer, {Phase{6, 1, [&](std::size_t b, std::size_t e, std::size_t) {
                      for (std::size_t i = b; i < e; ++i) {
                        ThreadPool inner(2);
                        run(inner,
                            {Phase{5, 1, [&](std::size_t ib, std::size_t ie, std::size_t) { items += ie - ib; }}});
                      }
                    }}});
  CHECK_EQ(items.load(), 30u);
}

TEST("pool: workers compute in the default floating-point modes, whatever their creator's") {
  std::fesetround(FE_DOWNWARD);
  ThreadPool pool(3);
  std::fesetround(FE_TONEAREST);
  std::atomic<std::size_t> arrived{0};
  std::vector<int> modes(3, -1);
  run(pool, {everybody(pool, arrived, [&](std::size_t thread) { modes[thread] = std::fegetround(); })});
  CHECK_EQ(modes, std::vector<int>(3, FE_TONEAREST));
}
