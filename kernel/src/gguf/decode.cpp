#include "gguf/decode.hpp"

#include <algorithm>

#include "error.hpp"

namespace kt {
namespace {

#include "tiers/scalar-inl.hpp"

// Weights a thread takes at least at a time: some 100 µs of work, far above what taking them costs.
constexpr std::size_t kGrainWeights = 64 * 1024;
constexpr std::size_t kMostWeights = 256;  // of any block type
constexpr std::size_t kMostGroups = 16;

template <class Work>
void each_block(Context& context, const BlockType& type, std::size_t blocks, const Work& work) {
  if (type.weights > kMostWeights || type.weights / type.group > kMostGroups) throw Error("block type too large");
  Context::Session session(context);
  const Phase phase{blocks, kGrainWeights / type.weights, [&](std::size_t begin, std::size_t end, std::size_t) {
                      for (std::size_t block = begin; block < end; ++block) work(block);
                    }};
  session.run({&phase, 1});
}

void store(float weight, float* out) {
  *out = weight;
}

void store(float weight, std::uint16_t* out) {
  *out = float_to_bf16(weight);
}

template <class Out>
void dequantize(Context& context, const BlockType& type, const std::uint8_t* source, std::size_t blocks, Out* out) {
  each_block(context, type, blocks, [&](std::size_t block) {
    std::int8_t values[kMostWeights];
    float scales[kMostGroups], minimums[kMostGroups];
    type.unpack(source + block * type.bytes, {values, scales, minimums});
    Out* weights = out + block * type.weights;
    for (std::size_t g = 0; g < type.weights / type.group; ++g) {
      const std::size_t first = g * type.group;
      const float scale = scales[g];
      if (type.has_minimum) {
        const float minimum = minimums[g];
        for (std::size_t i = first; i < first + type.group; ++i)
          store(scale * static_cast<float>(values[i]) + minimum, weights + i);
      } else {
        for (std::size_t i = first; i < first + type.group; ++i)
          store(scale * static_cast<float>(values[i]), weights + i);
      }
    }
  });
}

}  // namespace

void unpack_blocks(Context& context, const BlockType& type, const std::uint8_t* source, std::size_t blocks,
                   const BlockParts& out) {
  if (type.has_minimum && out.minimums == nullptr) throw Error(std::string(type.name) + " has minimums");
  const std::size_t groups = type.weights / type.group;
  each_block(context, type, blocks, [&](std::size_t block) {
    type.unpack(source + block * type.bytes, {out.values + block * type.weights, out.scales + block * groups,
                                              out.minimums == nullptr ? nullptr : out.minimums + block * groups});
  });
}

void dequantize_blocks(Context& context, const BlockType& type, const std::uint8_t* source, std::size_t blocks,
                       float* out) {
  dequantize(context, type, source, blocks, out);
}

void dequantize_blocks(Context& context, const BlockType& type, const std::uint8_t* source, std::size_t blocks,
                       std::uint16_t* out) {
  dequantize(context, type, source, blocks, out);
}

}  // namespace kt
