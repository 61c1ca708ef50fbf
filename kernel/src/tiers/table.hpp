// The contract between the MoE algorithm and an ISA tier: plain data and function pointers.
//
// A tier's translation unit includes this header and the "-inl.hpp" texts, nothing else of ours and no STL: one inline
// function compiled with AVX-512 and merged by the linker would kill every older CPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kt {

enum class Format : int { kInt8, kBf16, kInt4, kInt8Grouped, kFp8 };
enum class DType : int { kF32, kBf16, kF16 };

// The whole numbers that the weights of a grouped matrix are multiples of: -8…7, 0…15, twice the values of FP4 e2m1,
// -128…127, or 16 that lie as normally distributed weights do (tiers/grouped-layout-inl.hpp).
enum class Levels : int { kInt4, kUint4, kE2m1, kInt8, kNormal4 };

// How one weight matrix is kept. A layer's two may differ: GGUF files mix.
struct MatrixTraits {
  Format format = Format::kInt8;
  std::size_t rotation = 0;  // INT8: Hadamard block of its inputs, 0 for none; the layout sets it
  // Grouped formats: weight = scale·value (+ minimum), one scale per channel and `group` inputs.
  std::size_t group = 0;
  Levels levels = Levels::kInt4;
  bool minimums = false;
  DType scales = DType::kF32;  // of scales and minimums: the narrowest that holds every one exactly
};

enum class Activation : int { kSilu, kGelu, kGeluTanh, kRelu, kReluSquared };

// What becomes of an expert's first products: activation(g)·(u + up_offset), or activation(x) where there is no gate.
struct Gate {
  Activation activation = Activation::kSilu;
  bool gated = true;
  float alpha = 1.0f;        // kSilu: x·sigmoid(alpha·x)
  float limit = 0.0f;        // above 0: g at most the limit, u within ±limit
  bool limit_after = false;  // the limit holds for activation(g) instead of g
  float up_offset = 0.0f;
};

// Geometry of the packed layout; docs/architecture.md draws it.
inline constexpr std::size_t kPanelChannels =
    16;  // fp32/int32 lanes of one AVX-512 register, columns of one AMX accumulator
inline constexpr std::size_t kBlockChannels = 32;  // two panels: the N side of AMX's 2x2 blocking
inline constexpr std::size_t kInputPadding = 64;   // K of one AMX int8 tile; two bf16 tiles
inline constexpr std::size_t kRowBytes = 64;       // 16 channels x 4 bytes of K: a cache line, a tile row
inline constexpr std::size_t kTileBytes = 1024;    // 16 panel rows
inline constexpr std::size_t kBiasBytes = 128;     // 32 fp32 biases, where a layer has them; then
inline constexpr std::size_t kTrailerBytes = 256;  // INT8: 32 fp32 scales, then 32 int32 channel sums

// FP8: scales behind the tiles, 32 fp32 of the channels, then two fp32 (left panel, right panel) for every so many
// inputs. 128 is the block of DeepSeek-V3's checkpoints.
inline constexpr std::size_t kFp8Inputs = 128;
inline constexpr std::size_t kFp8ChannelScaleBytes = 128;

// Rows of one expert times some of its column blocks.
struct GemmCall {
  const MatrixTraits* traits = nullptr;
  const void* rows;  // m encoded activation rows (FormatTable::encode_row), row_stride bytes apart
  std::size_t row_stride;
  const float* row_scales;  // INT8: one scale per row
  std::size_t m;
  const void* blocks;  // first column block
  std::size_t block_bytes;
  std::size_t block_count;
  std::size_t k_padded;
  bool has_bias;
  float* out;              // first output column of the first block
  std::size_t out_stride;  // floats between output rows
};

// The arithmetic of one format on one tier. A tier that lacks the format leaves every pointer null.
struct FormatTable {
  // Bytes of one encoded activation row of k_padded inputs (a multiple of 64).
  std::size_t (*row_bytes)(const MatrixTraits& traits, std::size_t k_padded);
  // Encodes one row of k inputs, zero-padded to k_padded, for a matrix of `traits`. *scale: INT8 row scale. `work`
  // holds k_padded floats, 64-byte aligned.
  void (*encode_row)(const void* x, DType dtype, std::size_t k, std::size_t k_padded, const MatrixTraits& traits,
                     void* row, float* scale, float* work);
  // 16 activated columns per block, gate(left panel, right panel); 32 where there is no gate.
  void (*gate_up)(const GemmCall& call, const Gate& gate);
  // 32 columns per block.
  void (*down)(const GemmCall& call);
};

// Weighted sum of one token's expert outputs, in slot order, fp32: y = sum_s weights[s] * rows[s].
struct CombineCall {
  const float* const* rows;  // null: the slot was routed nowhere
  const float* weights;
  std::size_t slots;
  std::size_t n;
  void* y;
  DType dtype;
};

struct TierTable {
  FormatTable int8 = {};
  FormatTable bf16 = {};
  FormatTable int4 = {};
  FormatTable int8_grouped = {};
  FormatTable fp8 = {};
  void (*combine)(const CombineCall& call);
  // In place: y = H x per block of `rotation` inputs, H the unnormalised Hadamard matrix.
  void (*rotate)(float* x, std::size_t n, std::size_t rotation);
  // Symmetric: q = round(x * 127/max|x|), n a multiple of 64. Returns max|x|/127; NaN when x holds a NaN or an infinity
  // (q = 0).
  float (*quantize)(const float* x, std::size_t n, std::int8_t* q);
};

}  // namespace kt
