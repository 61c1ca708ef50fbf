// Where weights come from: strides, types, values that cannot be.
#include <cmath>
#include <cstring>
#include <limits>

#include "error.hpp"
#include "each_tier.hpp"
#include "layers.hpp"
#include "reference.hpp"

using kt::DType;
using kt::ExpertSource;
using kt::Format;
using kt::LayerLayout;
using kt::PackedExperts;
using kt::WeightView;
using kt::check::Layer;
using kt::check::make_layer;

namespace {

constexpr std::size_t kHidden = 70, kInner = 35;

std::vector<std::byte> bytes_of(const ExpertSource& source, Format format = Format::kInt8, bool rotated = true) {
  PackedExperts packed(LayerLayout(format, {.rotated = rotated}, 1, kHidden, kInner));
  packed.pack(*kt::check::context(2), kt::check::generic(), 0, source);
  return {packed.data(), packed.data() + packed.layout().bytes()};
}

Layer a_layer() {
  return make_layer({1, kHidden, kInner}, 9);
}

std::vector<float> transposed(const std::vector<float>& m, std::size_t rows) {
  const std::size_t columns = m.size() / rows;
  std::vector<float> t(m.size());
  for (std::size_t i = 0; i < m.size(); ++i) t[i % columns * rows + i / columns] = m[i];
  return t;
}

// Rounds a layer to a 16-bit type; returns it in fp32 and in that type.
struct Narrow {
  Layer wide;
  std::vector<std::uint16_t> gate, up, down;
};

Narrow narrowed(DType dtype) {
  Narrow n{a_layer(), {}, {}, {}};
  const auto narrow = [&](std::vector<float>& m, std::vector<std::uint16_t>& out) {
    for (float& w : m) {
      out.push_back(dtype == DType::kBf16 ? kt::check::nearest_bf16(w) : kt::check::nearest_f16(w));
      w = static_cast<float>(dtype == DType::kBf16 ? kt::check::bf16_value(out.back())
                                                   : kt::check::f16_value(out.back()));
    }
  };
  narrow(n.wide.gate, n.gate), narrow(n.wide.up, n.up), narrow(n.wide.down, n.down);
  return n;
}

}  // namespace

TEST("pack sources: transposed weights need no copy") {
  const Layer layer = a_layer();
  const std::vector<float> gate = transposed(layer.gate, kInner), up = transposed(layer.up, kInner),
                           down = transposed(layer.down, kHidden);
  const ExpertSource source{{gate.data(), DType::kF32, 1, kInner},
                            {up.data(), DType::kF32, 1, kInner},
                            {down.data(), DType::kF32, 1, kHidden}};
  CHECK(bytes_of(source) == bytes_of(layer.source(0)));
}

TEST("pack sources: gate and up interleaved by rows, and backwards") {
  const Layer layer = a_layer();
  std::vector<float> mixed(2 * layer.matrix()), backwards(layer.down.rbegin(), layer.down.rend());
  for (std::size_t c = 0; c < kInner; ++c) {
    for (std::size_t i = 0; i < kHidden; ++i) {
      mixed[2 * c * kHidden + i] = layer.gate[c * kHidden + i];
      mixed[(2 * c + 1) * kHidden + i] = layer.up[c * kHidden + i];
    }
  }
  const auto row = static_cast<std::ptrdiff_t>(kInner);
  const ExpertSource source{{mixed.data(), DType::kF32, 2 * kHidden, 1},
                            {mixed.data() + kHidden, DType::kF32, 2 * kHidden, 1},
                            {backwards.data() + backwards.size() - 1, DType::kF32, -row, -1}};
  CHECK(bytes_of(source) == bytes_of(layer.source(0)));
}

TEST("pack sources: one stored channel can serve all (stride 0)") {
  Layer layer = a_layer();
  for (std::size_t c = 1; c < kInner; ++c) {
    std::copy_n(layer.gate.begin(), kHidden, layer.gate.begin() + static_cast<std::ptrdiff_t>(c * kHidden));
  }
  ExpertSource source = layer.source(0);
  source.gate.channel_stride = 0;
  CHECK(bytes_of(source) == bytes_of(layer.source(0)));
}

TEST("pack sources: bf16 and fp16 weights pack like the same numbers in fp32") {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    const Narrow n = narrowed(dtype);
    const ExpertSource source{
        {n.gate.data(), dtype, kHidden, 1}, {n.up.data(), dtype, kHidden, 1}, {n.down.data(), dtype, kInner, 1}};
    for (const Format format : {Format::kInt8, Format::kBf16, Format::kInt4, Format::kInt8Grouped}) {
      CHECK(bytes_of(source, format) == bytes_of(n.wide.source(0), format));
    }
  }
}

TEST("pack sources: every finite bf16 and fp16 weight is taken, subnormals included") {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    std::vector<std::uint16_t> narrow;
    std::vector<float> wide;
    for (unsigned bits = 0; bits < 65536; ++bits) {
      const auto b = static_cast<std::uint16_t>(bits);
      const double value = dtype == DType::kBf16 ? kt::check::bf16_value(b) : kt::check::f16_value(b);
      if (!std::isfinite(value)) continue;
      narrow.push_back(b);
      wide.push_back(static_cast<float>(value));
    }
    const std::size_t h = narrow.size() / 16;  // 16 channels
    const auto pack = [&](const void* data, DType type) {
      const WeightView view{data, type, static_cast<std::ptrdiff_t>(h), 1};
      const WeightView down{data, type, 16, 1};
      PackedExperts packed(LayerLayout(Format::kBf16, {.rotated = false}, 1, h, 16));
      packed.pack(*kt::check::context(1), kt::check::generic(), 0, {view, view, down});
      return std::vector<std::byte>(packed.data(), packed.data() + packed.layout().bytes());
    };
    CHECK(pack(narrow.data(), dtype) == pack(wide.data(), DType::kF32));
  }
}

TEST("pack sources: a NaN or infinite weight is named by projection, channel and input") {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const Format format : {Format::kInt8, Format::kBf16, Format::kInt4, Format::kInt8Grouped}) {
    Layer layer = a_layer();
    layer.gate[34 * kHidden + 69] = nan;
    CHECK_THROWS(bytes_of(layer.source(0), format), kt::WeightsValueError,
                 "gate weight at channel 34, input 69 is NaN");
    layer = a_layer();
    layer.up[0] = -inf;
    CHECK_THROWS(bytes_of(layer.source(0), format), kt::WeightsValueError,
                 "up weight at channel 0, input 0 is infinite");
    layer = a_layer();
    layer.down[69 * kInner + 1] = inf;
    CHECK_THROWS(bytes_of(layer.source(0), format), kt::WeightsValueError, "down weight at channel 69, input 1 is inf");
  }
  CHECK(!bytes_of(a_layer().source(0)).empty());  // the context packs on after an error
}

TEST("pack sources: weights too large to rotate are named, and packed without rotation") {
  Layer layer = a_layer();
  for (std::size_t i = 0; i < kHidden; ++i) layer.up[7 * kHidden + i] = 3e38f;
  for (const Format format : {Format::kInt8, Format::kInt4}) {
    CHECK_THROWS(bytes_of(layer.source(0), format), kt::WeightsValueError, "up weights of channel 7");
    CHECK(!bytes_of(layer.source(0), format, false).empty());
  }
}

TEST("pack sources: a channel of zeros has scale zero and unpacks to zeros") {
  Layer layer = a_layer();
  for (std::size_t i = 0; i < kHidden; ++i) layer.gate[20 * kHidden + i] = 0.0f;
  const auto packed = kt::check::pack(layer, Format::kInt8);
  std::vector<float> gate(layer.matrix()), up(layer.matrix()), down(layer.matrix());
  packed->unpack(kt::check::generic(), 0, gate.data(), up.data(), down.data());
  for (std::size_t i = 0; i < kHidden; ++i) CHECK_EQ(gate[20 * kHidden + i], 0.0f);
  CHECK(gate[19 * kHidden] != 0.0f && gate[21 * kHidden] != 0.0f);
}

TEST("pack sources: an expert that does not exist") {
  PackedExperts packed(LayerLayout(Format::kInt8, {.rotated = true}, 3, kHidden, kInner));
  const Layer layer = a_layer();
  CHECK_THROWS(packed.pack(*kt::check::context(1), kt::check::generic(), 3, layer.source(0)), kt::Error,
               "expert 3 of 3");
  CHECK_THROWS(packed.unpack(kt::check::generic(), 3, nullptr, nullptr, nullptr), kt::Error, "expert 3 of 3");
}
