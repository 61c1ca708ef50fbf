// The packed weights of one layer's experts.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "cpu/aligned_buffer.hpp"
#include "cpu/context.hpp"
#include "cpu/mapped_file.hpp"
#include "pack/layout.hpp"

namespace kt {

// A float matrix in memory: element (channel, input) at data + channel·channel_stride + input·input_stride, in
// elements, so that transposed and interleaved sources need no copy.
struct WeightView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::ptrdiff_t channel_stride = 0;
  std::ptrdiff_t input_stride = 1;
  const float* bias = nullptr;  // one a channel, for biased layers
  // Weights that come quantised: `data` holds the int8 values, whatever dtype says, of a grouped matrix with these
  // scales (and minimums), fp32, one a group, `scale_stride` apart between channels.
  const float* scales = nullptr;
  const float* minimums = nullptr;
  std::ptrdiff_t scale_stride = 0;
};

struct ExpertSource {
  WeightView gate;  // (I, H); unused where the layer has no gate
  WeightView up;    // (I, H)
  WeightView down;  // (H, I)
};

// An FP8 e4m3 matrix in memory: weight (channel, input) = e4m3(codes[channel·channel_stride + input·input_stride]) ·
// scales[(first_channel + channel)/block_channels·scale_stride + input/block_inputs]. first_channel: of a part of a
// larger matrix whose blocks are counted from its beginning (up behind gate).
struct Fp8View {
  const std::uint8_t* codes = nullptr;
  std::ptrdiff_t channel_stride = 0;
  std::ptrdiff_t input_stride = 1;
  const float* scales = nullptr;
  std::ptrdiff_t scale_stride = 0;
  std::size_t block_channels = 1;
  std::size_t block_inputs = 1;
  std::size_t first_channel = 0;
  const float* bias = nullptr;
};

struct Fp8ExpertSource {
  Fp8View gate;
  Fp8View up;
  Fp8View down;
};

class PackedExperts {
 public:
  explicit PackedExperts(const LayerLayout& layout) : layout_(layout), buffer_(layout.bytes()), data_(buffer_.data()) {}
  // Works on what an equal layout wrote to a file, at `offset`, a multiple of 64: nothing is copied, and nothing can be
  // packed or loaded into it.
  PackedExperts(const LayerLayout& layout, const std::string& path, std::size_t offset);

  const LayerLayout& layout() const { return layout_; }
  const std::byte* data() const { return data_; }
  bool mapped() const { return file_.has_value(); }

  // Quantises one expert, or lays out what comes quantised, on the context's threads; `table` serves only speed: the
  // bytes are the same for every tier. Throws WeightsValueError for a NaN or infinite weight, and for quantised ones
  // that are not what the layout's traits say, and the expert must then not be used.
  void pack(Context& context, const TierTable& table, std::size_t expert, const ExpertSource& source);

  // Lays out one expert's codes and scales as they are, for a layer whose matrices are FP8. Throws WeightsValueError
  // for a NaN code or a scale that is not finite, and the expert must then not be used; Error for blocks that have no
  // packed form, before anything is written.
  void pack(Context& context, std::size_t expert, const Fp8ExpertSource& source);

  // Takes over one expert's packed bytes, as an equal layout wrote them: exactly `layout().expert_bytes`, else throws.
  void load(std::size_t expert, std::span<const std::byte> bytes);

  // Dequantised and un-rotated: (I, H), (I, H), (H, I), contiguous fp32. Without a gate `gate` is not written.
  void unpack(const TierTable& table, std::size_t expert, float* gate, float* up, float* down) const;

 private:
  void check_expert(std::size_t expert) const;
  // Where one expert's bytes are written. Throws for a mapped file.
  std::byte* writable(std::size_t expert);

  // Calls pack_panel(thread, matrix, block, panel, view, name, first channel, channels) for every panel of one expert,
  // on the session's threads.
  template <class Source, class PackPanel>
  void for_each_panel(Context::Session& session, std::size_t expert, const Source& source, const PackPanel& pack_panel);

  LayerLayout layout_;
  AlignedBuffer buffer_;            // empty when mapped
  std::optional<MappedFile> file_;  // where the bytes are when not in buffer_
  const std::byte* data_;
};

}  // namespace kt
