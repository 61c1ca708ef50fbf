// One MoE layer, decode and prefill, as percentages of what the machine can do; probes and kernel interleaved in one
// process.
//
//   bench_moe [--threads N] [--experts 128] [--top-k 8] [--hidden 2048] [--intermediate 768] [--tokens 1,512] [--rounds
//   7]
//             [--tier NAME] [--format INT8|BF16|INT4|INT8_GROUPED|FP8]
//
// Every round times each arithmetic probe and each kernel case once, and reads memory right before each case, so that
// the two see the same minute of a shared machine; figures are medians over rounds. Probes run on the kernel's own
// threads. A decode round runs enough tokens, each with its own random experts, to read far more than the last-level
// cache holds.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/topology.hpp"
#include "moe/moe.hpp"
#include "probe.hpp"
#include "tiers/registry.hpp"

namespace kt::bench {
namespace {

struct Options {
  std::size_t threads = 0, experts = 128, top_k = 8, hidden = 2048, intermediate = 768, rounds = 7;
  std::vector<std::size_t> tokens = {1, 512};
  std::string tier, format;
};

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Seconds that `work(thread)` takes on all threads of the context at once.
template <class Work>
double timed_on_threads(Context& context, const Work& work) {
  Context::Session session(context);
  std::atomic<std::size_t> ready{0};
  const std::size_t threads = context.threads();
  std::atomic<double> start{0};
  const Phase phase{threads, 1, [&](std::size_t begin, std::size_t, std::size_t) {
                      if (ready.fetch_add(1) + 1 == threads) start = seconds();  // every thread is awake: now
                      while (ready.load() < threads) std::this_thread::yield();
                      work(begin);
                    }};
  session.run({&phase, 1});
  return seconds() - start;
}

double bandwidth(const Probes& probes, const AlignedBuffer& buffer, Context& context) {
  const std::size_t share = buffer.size() / context.threads() / 4096 * 4096;
  const double time = timed_on_threads(context, [&](std::size_t t) {
    volatile std::uint64_t sink;
    probes.read(reinterpret_cast<const char*>(buffer.data()) + t * share, share, &sink);
    (void)sink;
  });
  return static_cast<double>(share * context.threads()) / time;
}

double rate(ArithmeticProbe probe, Context& context) {
  constexpr long kRounds = 4'000'000;
  std::vector<double> done(context.threads());
  const double time = timed_on_threads(context, [&](std::size_t t) {
    volatile double sink;
    done[t] = probe(kRounds, &sink);
    (void)sink;
  });
  double total = 0;
  for (const double d : done) total += d;
  return total / time;
}

using Layer = std::shared_ptr<PackedExperts>;

Layer make_layer(const Options& o, Format format, Context& context) {
  auto packed = std::make_shared<PackedExperts>(LayerLayout(format, {}, o.experts, o.hidden, o.intermediate));
  std::mt19937 random(0);
  std::normal_distribution<float> normal(0.0f, 0.03f);
  std::vector<float> weights(o.hidden * o.intermediate);
  for (float& w : weights) w = normal(random);
  const auto h = static_cast<std::ptrdiff_t>(o.hidden), i = static_cast<std::ptrdiff_t>(o.intermediate);
  const TierTable* best = all_tiers()[0].table;
  for (const Tier& tier : all_tiers()) {
    if (tier.table != nullptr && missing(cpu_features(), tier.needs_cpu).empty() &&
        missing(cpu_features(), tier.needs_os).empty())
      best = tier.table;
  }
  for (std::size_t e = 0; e < o.experts; ++e) {
    packed->pack(context, *best, e,
                 {{weights.data(), DType::kF32, h, 1},
                  {weights.data(), DType::kF32, h, 1},
                  {weights.data(), DType::kF32, i, 1}});
  }
  return packed;
}

// One timed call sequence. Decode: `calls` single tokens with distinct experts; prefill: one call.
struct Case {
  std::string tier;
  Format format;
  std::size_t tokens;
  std::shared_ptr<MoE> moe;
  std::size_t calls;
  double bytes = 0;  // weights read
  double operations = 0;
  std::vector<double> times;
  std::vector<double> read_shares;  // bytes per second over the read probe's, taken just before
};

void time_case(Case& c, const Options& o, const Layer& layer, std::mt19937& random) {
  std::vector<std::uint16_t> x(c.tokens * o.hidden), y(c.tokens * o.hidden);
  for (std::uint16_t& v : x) v = static_cast<std::uint16_t>(0x3f00 + random() % 0x100 + (random() % 2 << 15));
  const std::vector<float> weights(c.tokens * o.top_k, 1.0f / static_cast<float>(o.top_k));
  std::vector<std::int64_t> order(o.experts), ids(c.tokens * o.top_k);
  for (std::size_t e = 0; e < o.experts; ++e) order[e] = static_cast<std::int64_t>(e);
  double time = 0;
  c.bytes = c.operations = 0;
  for (std::size_t call = 0; call < c.calls; ++call) {
    std::vector<bool> used(o.experts);
    for (std::size_t t = 0; t < c.tokens; ++t) {
      std::shuffle(order.begin(), order.end(), random);
      for (std::size_t s = 0; s < o.top_k; ++s) {
        ids[t * o.top_k + s] = order[s];
        used[static_cast<std::size_t>(order[s])] = true;
      }
    }
    const double start = seconds();
    c.moe->forward({c.tokens,
                    o.top_k,
                    x.data(),
                    DType::kBf16,
                    {ids.data(), IdType::kInt64, weights.data(), DType::kF32},
                    y.data(),
                    DType::kBf16});
    time += seconds() - start;
    c.bytes += static_cast<double>(std::count(used.begin(), used.end(), true)) *
               static_cast<double>(layer->layout().expert_bytes);
    c.operations += 6.0 * static_cast<double>(c.tokens * o.top_k * o.hidden) * static_cast<double>(o.intermediate);
  }
  c.times.push_back(time);
}

std::vector<std::size_t> numbers(const char* text) {
  std::vector<std::size_t> values;
  for (const char* p = text; *p != 0;) {
    char* end;
    values.push_back(std::strtoul(p, &end, 10));
    p = *end == ',' ? end + 1 : end;
  }
  return values;
}

Options parse(int argc, char** argv) {
  Options o;
  const std::map<std::string, std::size_t*> sizes = {
      {"--threads", &o.threads}, {"--experts", &o.experts},           {"--top-k", &o.top_k},
      {"--hidden", &o.hidden},   {"--intermediate", &o.intermediate}, {"--rounds", &o.rounds}};
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (const auto found = sizes.find(name); found != sizes.end()) {
      *found->second = std::strtoul(argv[i + 1], nullptr, 10);
    } else if (name == "--tokens") {
      o.tokens = numbers(argv[i + 1]);
    } else if (name == "--tier") {
      o.tier = argv[i + 1];
    } else if (name == "--format") {
      o.format = argv[i + 1];
    } else {
      std::fprintf(stderr, "bench_moe: unknown option %s\n", argv[i]);
      std::exit(2);
    }
  }
  if (o.threads == 0) o.threads = static_cast<std::size_t>(read_topology().default_threads);
  return o;
}

struct Peak {
  const char* name;
  ArithmeticProbe probe;
  std::vector<double> rates;
};

// The arithmetic that a tier could use at most, by its own instructions.
std::string peak_of(const std::string& tier, Format format) {
  if (format != Format::kBf16 && format != Format::kFp8) {  // FP8 is multiplied as bf16
    if (tier == "amx") return "amx int8";
    if (tier == "avx_vnni") return "vnni256";
    return tier == "avx512_vnni" || tier == "avx512_bf16" ? "vnni512" : "dot256";
  }
  if (tier == "amx") return "amx bf16";
  if (tier == "avx512_bf16") return "dpbf16";
  return tier == "avx512_vnni" || tier == "avx512" ? "fma512" : "fma256";
}

int run(const Options& o) {
  const CpuFeatures& cpu = cpu_features();
  if (!cpu.avx2) {
    std::fprintf(stderr, "bench_moe: the probes need AVX2\n");
    return 1;
  }
  Probes reader = avx2_probes();
  std::vector<Peak> peaks = {{"fma256", reader.fp32, {}}, {"dot256", reader.int8, {}}};
#if KT_BENCH_AVX512
  if (cpu.avx512_bf16 && cpu.avx512_vnni && cpu.os_avx512) {
    const Probes p = avx512_probes();
    reader.read = p.read;
    peaks.insert(peaks.end(), {{"fma512", p.fp32, {}}, {"vnni512", p.int8, {}}, {"dpbf16", p.bf16, {}}});
  }
#endif
#if KT_BENCH_AMX
  if (cpu.amx_int8 && cpu.amx_bf16 && cpu.os_amx) {
    const Probes p = amx_probes();
    peaks.insert(peaks.end(), {{"amx int8", p.int8, {}}, {"amx bf16", p.bf16, {}}});
  }
#endif
  const auto context = std::make_shared<Context>(o.threads);
  AlignedBuffer buffer(std::size_t{768} << 20);
  std::memset(buffer.data(), 1, buffer.size());
  std::vector<double> reads;

  std::map<Format, Layer> layers;
  std::vector<Case> cases;
  for (const auto& [format, name, functions] : all_formats()) {
    if (functions_of(*all_tiers()[0].table, format).gate_up == nullptr) continue;
    if (!o.format.empty() && o.format != name) continue;
    layers[format] = make_layer(o, format, *context);
    for (const Tier& tier : all_tiers()) {
      const bool usable =
          tier.table != nullptr && missing(cpu, tier.needs_cpu).empty() && missing(cpu, tier.needs_os).empty();
      if (!usable || functions_of(*tier.table, format).gate_up == nullptr ||
          (o.tier.empty() ? tier.name == "generic" : o.tier != tier.name))
        continue;
      const auto moe = std::make_shared<MoE>(context, layers[format], *tier.table, Gate{}, o.top_k, 1u << 20);
      for (const std::size_t tokens : o.tokens) {
        const std::size_t calls = std::max<std::size_t>(1, o.experts / o.top_k / tokens);
        cases.push_back({std::string(tier.name), format, tokens, moe, calls, 0, 0, {}, {}});
      }
    }
  }
  std::mt19937 random(1);
  for (std::size_t round = 0; round <= o.rounds; ++round) {
    if (round == 1) {  // the first round warms up
      reads.clear();
      for (Peak& p : peaks) p.rates.clear();
      for (Case& c : cases) c.times.clear(), c.read_shares.clear();
    }
    for (Peak& p : peaks) p.rates.push_back(rate(p.probe, *context));
    for (Case& c : cases) {
      reads.push_back(bandwidth(reader, buffer, *context));
      time_case(c, o, layers[c.format], random);
      c.read_shares.push_back(c.bytes / c.times.back() / reads.back());
    }
  }
  std::printf("%s, %zu threads; E=%zu k=%zu H=%zu I=%zu; medians of %zu rounds\n", cpu_name().c_str(), o.threads,
              o.experts, o.top_k, o.hidden, o.intermediate, o.rounds);
  const double read = median(reads);
  std::printf("read %.2f GB/s", read / 1e9);
  std::map<std::string, double> peak;
  for (const Peak& p : peaks) {
    peak[p.name] = median(p.rates);
    std::printf("  %s %.1f", p.name, peak[p.name] / 1e9);
  }
  // The same ports take the instruction at half the width.
  peak["vnni256"] = peak.contains("vnni512") ? peak["vnni512"] / 2 : peak["dot256"];
  std::printf(" GOP/s\n%-12s %-12s %7s %10s %9s %8s %9s %8s\n", "tier", "fmt", "tokens", "ms/call", "GB/s", "% read",
              "GOP/s", "% peak");
  for (const Case& c : cases) {
    const double time = median(c.times);
    std::printf("%-12s %-12s %7zu %10.3f %9.2f %7.1f%% %9.1f %7.1f%%\n", c.tier.c_str(),
                std::string(format_name(c.format)).c_str(), c.tokens, time / static_cast<double>(c.calls) * 1e3,
                c.bytes / time / 1e9, 100 * median(c.read_shares), c.operations / time / 1e9,
                100 * c.operations / time / peak[peak_of(c.tier, c.format)]);
  }
  return 0;
}

}  // namespace
}  // namespace kt::bench

int main(int argc, char** argv) {
  return kt::bench::run(kt::bench::parse(argc, argv));
}
