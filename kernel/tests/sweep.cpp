#include "sweep.hpp"

#include <algorithm>

#include "reference.hpp"

namespace kt::check {
namespace {

constexpr Shape kShapes[] = {
    {1, 1, 1},     {1, 64, 64}, {1, 65, 33},   {1, 129, 96},  {1, 17, 200},  {1, 512, 320}, {1, 640, 1},  {1, 2, 640},
    {2, 16, 16},   {2, 15, 17}, {2, 31, 64},   {2, 576, 192}, {2, 192, 513}, {3, 32, 48},   {3, 33, 31},  {3, 63, 65},
    {3, 128, 127}, {5, 96, 32}, {5, 127, 128}, {5, 200, 129}, {7, 48, 95},   {7, 320, 63},  {61, 64, 32}, {61, 33, 47},
};
constexpr std::size_t kTokens[] = {0, 1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127};
constexpr std::size_t kSlots[] = {1, 2, 3, 8, 4};
constexpr Gate kGates[] = {{}, {.limit = 1.5f}, {.alpha = 1.702f, .limit = 2.0f, .up_offset = 1.0f}};
constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16};

constexpr MatrixTraits grouped(Levels levels, std::size_t group, DType scales, bool minimums = false) {
  const Format format = levels == Levels::kInt8 ? Format::kInt8Grouped : Format::kInt4;
  return {.format = format, .group = group, .levels = levels, .minimums = minimums, .scales = scales};
}

// Every kind of levels, group and scales, on both sides; what GGUF files mix.
constexpr struct {
  Shape shape;
  bool rotated;
  MatrixTraits gate_up, down;
} kGroupedLayers[] = {
    {{3, 65, 33}, true, grouped(Levels::kNormal4, 32, DType::kBf16), grouped(Levels::kNormal4, 32, DType::kBf16)},
    {{2, 192, 130}, true, grouped(Levels::kNormal4, 64, DType::kBf16), grouped(Levels::kNormal4, 128, DType::kBf16)},
    {{2, 320, 96}, false, grouped(Levels::kInt4, 32, DType::kF16), grouped(Levels::kInt4, 128, DType::kF16)},
    {{2, 96, 320}, false, grouped(Levels::kInt4, 16, DType::kF32), grouped(Levels::kInt4, 64, DType::kF32, true)},
    {{5, 64, 64}, false, grouped(Levels::kUint4, 32, DType::kF32, true), grouped(Levels::kInt8, 16, DType::kF32)},
    {{2, 129, 31}, false, grouped(Levels::kUint4, 128, DType::kF16, true), grouped(Levels::kUint4, 16, DType::kBf16)},
    {{3, 160, 128}, false, grouped(Levels::kE2m1, 32, DType::kBf16), grouped(Levels::kE2m1, 32, DType::kBf16)},
    {{2, 47, 61}, true, grouped(Levels::kInt8, 32, DType::kF16), grouped(Levels::kInt8, 128, DType::kBf16, true)},
    {{2, 256, 200}, true, {}, grouped(Levels::kNormal4, 32, DType::kBf16)},
};

std::string name_of(const MatrixTraits& traits) {
  std::string text(format_name(traits.format));
  if (!is_grouped(traits.format)) return text;
  text += "/" + std::to_string(traits.group) + "/" + std::string(levels_name(traits.levels));
  text += traits.scales == DType::kF32 ? "/f32" : traits.scales == DType::kBf16 ? "/bf16" : "/f16";
  return text + (traits.minimums ? "/min" : "");
}

const char* name_of(const Gate& gate) {
  return gate.up_offset != 0.0f ? "oai" : gate.limit > 0.0f ? "clamped" : "silu";
}

const char* name_of(DType type) {
  return type == DType::kF32 ? "f32" : type == DType::kBf16 ? "bf16" : "f16";
}

std::vector<std::uint16_t> narrowed(const std::vector<float>& x, DType type) {
  std::vector<std::uint16_t> y(x.size());
  std::transform(x.begin(), x.end(), y.begin(), type == DType::kBf16 ? &nearest_bf16 : &nearest_f16);
  return y;
}

// Every fifth case also routes some slots nowhere, every seventh all tokens to one expert.
Batch batch_of(const SweepCase& c, std::size_t index) {
  Batch batch = make_batch(c.shape, c.tokens, c.k, 7);
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    if (index % 7 == 3) batch.ids[i] = static_cast<std::int64_t>(c.shape.experts - 1);
    if (index % 5 == 1 && i % 3 == 0) batch.ids[i] = i % 2 == 0 ? -1 : static_cast<std::int64_t>(c.shape.experts);
  }
  return batch;
}

}  // namespace

std::string SweepCase::name() const {
  std::string text;
  const auto add = [&](const char* letter, std::size_t n) { text += letter + std::to_string(n) + " "; };
  add("e", shape.experts), add("h", shape.hidden), add("i", shape.intermediate), add("t", tokens), add("k", k);
  text += std::string(rotated ? "rotated " : "plain ") + name_of(gate) + " ";
  text += std::string(name_of(x_type)) + " " + name_of(y_type) + (id_type == IdType::kInt32 ? " int32" : " int64");
  const bool int8 = gate_up.format == Format::kInt8 && down.format == Format::kInt8;
  return int8 ? text : text + " " + name_of(gate_up) + " " + name_of(down);
}

const std::vector<SweepCase>& sweep() {
  static const std::vector<SweepCase> cases = [] {
    std::vector<SweepCase> all;
    const auto add = [&all](const Shape& shape, bool rotated, const MatrixTraits& gate_up, const MatrixTraits& down) {
      for (const std::size_t tokens : kTokens) {
        Random random{all.size()};  // so that no two properties go together
        const std::size_t k = std::min(shape.experts, kSlots[random.below(5)]);
        const Gate gate = kGates[random.below(3)];
        const DType x_type = kTypes[random.below(3)], y_type = kTypes[random.below(3)];
        const IdType id_type = random.below(4) == 0 ? IdType::kInt32 : IdType::kInt64;
        all.push_back({shape, rotated, gate, tokens, k, x_type, y_type, id_type, gate_up, down});
      }
    };
    for (std::size_t s = 0; s < std::size(kShapes); ++s) add(kShapes[s], s % 4 != 3, {}, {});
    for (const auto& layer : kGroupedLayers) add(layer.shape, layer.rotated, layer.gate_up, layer.down);
    return all;
  }();
  return cases;
}

std::vector<std::uint8_t> run_case(const SweepCase& c, const std::shared_ptr<const PackedExperts>& packed,
                                   const TierTable& table, const Run& run) {
  const auto index = static_cast<std::size_t>(&c - sweep().data());
  const Batch batch = batch_of(c, index);
  const std::vector<std::uint16_t> narrow = narrowed(batch.x, c.x_type == DType::kF32 ? DType::kBf16 : c.x_type);
  const std::vector<std::int32_t> ids(batch.ids.begin(), batch.ids.end());
  std::vector<std::uint8_t> y(c.tokens * c.shape.hidden * (c.y_type == DType::kF32 ? 4 : 2), 0xaa);
  const void* x = c.x_type == DType::kF32 ? static_cast<const void*>(batch.x.data()) : narrow.data();
  const void* id = c.id_type == IdType::kInt32 ? static_cast<const void*>(ids.data()) : batch.ids.data();
  MoE moe(context(run.threads), packed, table, c.gate, c.k, run.max_tokens);
  moe.forward({c.tokens, c.k, x, c.x_type, {id, c.id_type, batch.weights.data(), DType::kF32}, y.data(), c.y_type});
  return y;
}

void for_each_case(
    const std::function<void(std::size_t index, const SweepCase&, std::shared_ptr<PackedExperts>)>& call) {
  std::shared_ptr<PackedExperts> packed;
  for (std::size_t i = 0; i < sweep().size(); ++i) {
    const SweepCase& c = sweep()[i];
    if (i % std::size(kTokens) == 0) packed = pack(make_layer(c.shape, 7), c.gate_up, c.down, c.rotated);
    call(i, c, packed);
  }
}

}  // namespace kt::check
