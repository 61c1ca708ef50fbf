// What must not change a token's result: threads, batch, chunks, scratch, order, the caller's floating-point modes.
#include <cfenv>
#include <cmath>
#include <memory>
#include <utility>

#include "each_tier.hpp"
#include "layers.hpp"
#include "reference.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using kt::DType;
using kt::Format;
using kt::check::Batch;
using kt::check::Kernel;
using kt::check::Layer;
using kt::check::make_batch;
using kt::check::make_layer;
using kt::check::pack;
using kt::check::Shape;

namespace {

constexpr Shape kShape{5, 130, 65};

std::vector<float> token(const std::vector<float>& y, std::size_t t, std::size_t hidden) {
  const auto first = y.begin() + static_cast<std::ptrdiff_t>(t * hidden);
  return {first, first + static_cast<std::ptrdiff_t>(hidden)};
}

}  // namespace

TEST_EACH_FORMAT("bits: any number of threads gives the same") {
  const Layer layer = make_layer(kShape);
  for (const std::size_t tokens : {1, 3, 40, 200}) {  // 200 x 130 is enough for every phase to use the threads
    const Batch batch = make_batch(kShape, tokens, 2);
    const std::vector<float> expected = Kernel(layer, c.format, *c.table)(batch);
    for (const std::size_t threads : {2, 3, 5, 7}) {
      CHECK_SAME_BITS(Kernel(layer, c.format, *c.table, {threads, 64})(batch), expected, kShape.hidden);
    }
  }
}

TEST_EACH_FORMAT("bits: a token alone and in a batch of any size gives the same") {
  const Layer layer = make_layer({1, 130, 65});
  const Batch batch = make_batch(layer.shape, 130, 1);
  Kernel kernel(layer, c.format, *c.table, {1, 1000});
  const std::vector<float> all = kernel(batch);
  for (std::size_t t = 0; t < batch.tokens; ++t) {
    CHECK_SAME_BITS(kernel(batch.slice(t, t + 1)), token(all, t, 130), 130);
  }
  for (std::size_t n = 2; n < batch.tokens; ++n) {  // every number of rows, ending with the last token
    const std::vector<float> some = kernel(batch.slice(batch.tokens - n, batch.tokens));
    const std::vector<float> expected(all.end() - static_cast<std::ptrdiff_t>(n * 130), all.end());
    CHECK_SAME_BITS(some, expected, 130);
  }
}

// The vector and the tile path of a tier must round alike, also where sums cancel, are subnormal or overflow.
TEST_EACH_FORMAT("bits: a token alone and in a batch gives the same for numbers of all sizes") {
  Layer layer = make_layer({1, 130, 65}, 6);
  kt::check::Random random{6};
  const auto spread = [&](std::vector<float>& values, int lowest, int highest) {
    for (float& value : values) value *= std::ldexp(1.0f, random.between(lowest, highest));
  };
  spread(layer.gate, -6, 6), spread(layer.up, -30, 6), spread(layer.down, -60, 60);
  Kernel kernel(layer, c.format, *c.table, {1, 1000});
  for (const auto& [lowest, highest] :
       {std::pair{-8, 8}, std::pair{-126, -90}, std::pair{-140, 30}, std::pair{20, 60}}) {
    Batch batch = make_batch(layer.shape, 37, 1);
    spread(batch.x, lowest, highest);
    const std::vector<float> all = kernel(batch);
    for (std::size_t t = 0; t < batch.tokens; ++t) {
      CHECK_SAME_BITS(kernel(batch.slice(t, t + 1)), token(all, t, 130), 130);
      if (t > 2) CHECK_SAME_BITS(token(kernel(batch.slice(t - 2, t + 1)), 2, 130), token(all, t, 130), 130);
    }
  }
}

TEST_EACH_FORMAT("bits: long inputs processed in chunks give the same") {
  const Layer layer = make_layer(kShape);
  const Batch batch = make_batch(kShape, 70, 3);
  const std::vector<float> expected = Kernel(layer, c.format, *c.table, {1, 1000})(batch);
  for (const std::size_t max_tokens : {1, 2, 7, 16, 69, 70, 71}) {
    CHECK_SAME_BITS(Kernel(layer, c.format, *c.table, {3, max_tokens})(batch), expected, kShape.hidden);
  }
}

TEST_EACH_FORMAT("bits: more rows than one chunk ever holds, in the memory of one chunk") {
  const Layer layer = make_layer({3, 16, 16});
  const Batch batch = make_batch(layer.shape, 3000, 8);  // 24000 rows, of which a chunk holds 16384
  kt::MoE moe(std::make_shared<kt::Context>(2), pack(layer, c.format), *c.table, layer.gate_formula, 8, 100000);
  std::vector<float> one_chunk, y;
  const Batch first = batch.slice(0, 2048);
  moe.forward(kt::check::arguments(first, one_chunk));
  const std::size_t bytes = moe.scratch_bytes();
  moe.forward(kt::check::arguments(batch, y));
  CHECK_EQ(moe.scratch_bytes(), bytes);
  Kernel kernel(layer, c.format, *c.table);
  for (const std::size_t t : {0, 2047, 2048, 2999}) {  // around the cut
    CHECK_SAME_BITS(kernel(batch.slice(t, t + 1)), token(y, t, 16), 16);
  }
}

TEST_EACH_FORMAT("bits: what scratch memory held before never reaches an output") {
  const Layer layer = make_layer(kShape);
  Kernel kernel(layer, c.format, *c.table, {3, 64});
  kernel.moe().fill_scratch(0xff);  // before any forward has made scratch
  const Batch large = make_batch(kShape, 64, 2);
  const std::vector<float> expected = kernel(large);
  for (const std::size_t tokens : {1, 2, 17, 64}) {
    for (const int byte : {0xff, 0x7f, 0x00}) {
      kernel.moe().fill_scratch(byte);
      const std::vector<float> some = kernel(large.slice(0, tokens));
      CHECK_SAME_BITS(
          some, std::vector<float>(expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(some.size())), 130);
    }
  }
  CHECK(kernel.moe().scratch_bytes() > 0);
}

TEST_EACH_FORMAT("bits: the order of tokens does not matter") {
  const Layer layer = make_layer(kShape);
  const Batch batch = make_batch(kShape, 33, 2);
  Kernel kernel(layer, c.format, *c.table);
  const std::vector<float> expected = kernel(batch);
  Batch reversed = batch.slice(0, 0);
  reversed.tokens = 33;
  for (std::size_t t = 33; t-- > 0;) {
    const Batch one = batch.slice(t, t + 1);
    reversed.x.insert(reversed.x.end(), one.x.begin(), one.x.end());
    reversed.ids.insert(reversed.ids.end(), one.ids.begin(), one.ids.end());
    reversed.weights.insert(reversed.weights.end(), one.weights.begin(), one.weights.end());
  }
  const std::vector<float> y = kernel(reversed);
  for (std::size_t t = 0; t < 33; ++t) CHECK_SAME_BITS(token(y, 32 - t, 130), token(expected, t, 130), 130);
}

TEST_EACH_FORMAT("bits: the caller's rounding and flush-to-zero modes change nothing and are given back") {
  Layer layer = make_layer(kShape);
  for (float& w : layer.down) w *= 1e-36f;  // outputs at the edge of the normal numbers
  const Batch batch = make_batch(kShape, 40, 2);
  const auto packed = pack(layer, c.format);
  const std::vector<float> expected = Kernel(packed, layer.gate_formula, *c.table)(batch);
  for (const std::size_t threads : {1, 3}) {
    for (const int rounding : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
      Kernel kernel(packed, layer.gate_formula, *c.table, {threads, 64});
      std::fesetround(rounding);
#if defined(__x86_64__)
      constexpr unsigned kFlush = 0x8040;  // flush-to-zero and denormals-are-zero
      _mm_setcsr(_mm_getcsr() | kFlush);
#endif
      const std::vector<float> y = kernel(batch);
#if defined(__x86_64__)
      const bool kept = (_mm_getcsr() & kFlush) == kFlush;
      _mm_setcsr(_mm_getcsr() & ~kFlush);
      CHECK(kept);
#endif
      const int after = std::fegetround();
      std::fesetround(FE_TONEAREST);
      CHECK_EQ(after, rounding);
      CHECK_SAME_BITS(y, expected, kShape.hidden);
    }
  }
}

TEST_EACH_FORMAT("bits: threads made while the creator had other floating-point modes compute the same") {
  const Layer layer = make_layer(kShape);
  const Batch batch = make_batch(kShape, 200, 2);
  const auto packed = pack(layer, c.format);
  const std::vector<float> expected = Kernel(packed, layer.gate_formula, *c.table)(batch);
  std::fesetround(FE_UPWARD);
  const auto context = std::make_shared<kt::Context>(4);
  std::fesetround(FE_TONEAREST);
  kt::MoE moe(context, packed, *c.table, layer.gate_formula, 8, 64);
  std::vector<float> y;
  moe.forward(kt::check::arguments(batch, y));
  CHECK_SAME_BITS(y, expected, kShape.hidden);
}

TEST_EACH_FORMAT("bits: warming up changes nothing and needs no input") {
  const Layer layer = make_layer(kShape);
  const Batch batch = make_batch(kShape, 5, 2);
  Kernel warm(layer, c.format, *c.table, {2, 64}), cold(layer, c.format, *c.table, {2, 64});
  warm.moe().warm_up();
  CHECK_SAME_BITS(warm(batch), cold(batch), kShape.hidden);
}

TEST_EACH_FORMAT("bits: 16-bit inputs, weights and outputs are the fp32 run's, rounded") {
  const Layer layer = make_layer(kShape);
  Batch batch = make_batch(kShape, 20, 3);
  Kernel kernel(layer, c.format, *c.table);
  for (const DType type : {DType::kBf16, DType::kF16}) {
    const auto narrow = [&](std::vector<float>& values) {
      std::vector<std::uint16_t> bits;
      for (float& v : values) {
        bits.push_back(type == DType::kBf16 ? kt::check::nearest_bf16(v) : kt::check::nearest_f16(v));
        v = static_cast<float>(type == DType::kBf16 ? kt::check::bf16_value(bits.back())
                                                    : kt::check::f16_value(bits.back()));
      }
      return bits;
    };
    const std::vector<std::uint16_t> x = narrow(batch.x), weights = narrow(batch.weights);
    std::vector<float> wide = kernel(batch);
    std::vector<std::uint16_t> y(wide.size(), 0xaaaa);
    kernel.moe().forward({batch.tokens,
                          batch.k,
                          x.data(),
                          type,
                          {batch.ids.data(), kt::IdType::kInt64, weights.data(), type},
                          y.data(),
                          type});
    CHECK(y == narrow(wide));
  }
}
