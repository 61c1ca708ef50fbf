#include "cpu/bandwidth.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>

#include "error.hpp"

namespace kt {
namespace {

constexpr std::size_t kPage = 4096;
// The first pass warms up clocks and page tables; of the rest the best is what the machine can do.
constexpr int kPasses = 5;

// Baseline instructions: one core asks memory for less than even 16-byte loads take in.
std::uint64_t read(const std::byte* data, std::size_t bytes) {
  std::uint64_t sums[8] = {};
  for (std::size_t i = 0; i < bytes; i += sizeof(sums)) {
    // A page ahead, as the kernels prefetch: without it a core reads up to a third less.
    __builtin_prefetch(data + i + kPage, 0, 2);
    std::uint64_t line[8];
    std::memcpy(line, data + i, sizeof(line));
    for (int j = 0; j < 8; ++j) sums[j] += line[j];
  }
  std::uint64_t total = 0;
  for (const std::uint64_t sum : sums) total += sum;
  return total;
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds that `work(thread)` takes on all threads at once, counted from when the last of them is awake.
template <class Work>
double timed(Context::Session& session, std::size_t threads, const Work& work) {
  std::atomic<std::size_t> ready{0};
  std::atomic<double> start{0};
  const Phase phase{threads, 1, [&](std::size_t, std::size_t, std::size_t thread) {
                      if (ready.fetch_add(1) + 1 == threads) start = seconds();
                      while (ready.load() < threads) std::this_thread::yield();
                      work(thread);  // its own share, wherever the item came from
                    }};
  session.run({&phase, 1});
  return seconds() - start;
}

}  // namespace

double read_bandwidth(Context& context, std::size_t bytes) {
  const std::size_t threads = context.threads();
  const std::size_t share = bytes / threads / kPage * kPage;
  if (share == 0) {
    throw Error(std::to_string(bytes) + " bytes are less than a page for each of " + std::to_string(threads) +
                " threads");
  }
  // A page more: the last prefetches lie behind the last share.
  AlignedBuffer buffer(share * threads + kPage);
  Context::Session session(context);
  timed(session, threads, [&](std::size_t t) { std::memset(buffer.data() + t * share, 1, share); });
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const double time = timed(session, threads, [&](std::size_t t) {
      volatile std::uint64_t sink = read(buffer.data() + t * share, share);
      (void)sink;
    });
    if (time > 0) best = std::max(best, static_cast<double>(share * threads) / time);
  }
  return best;
}

}  // namespace kt
