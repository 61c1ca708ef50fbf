#include "linear/packed_matrix.hpp"

#include "error.hpp"
#include "pack/pack.hpp"

namespace kt {

PackedMatrix::PackedMatrix(const MatrixTraits& traits, bool rotated, bool biased, std::size_t channels,
                           std::size_t inputs)
    : layout_(make_matrix(traits, {.rotated = rotated, .biased = biased}, "inputs", inputs, channels, kBlockChannels)),
      channels_(channels),
      biased_(biased),
      buffer_(layout_.bytes()) {}

void PackedMatrix::pack(Context& context, const TierTable& table, const WeightView& source, const char* name) {
  if (biased_ && source.bias == nullptr) throw Error("a biased matrix needs its biases");
  if (source.scales != nullptr) throw Error("a matrix of its own is packed from floats");
  Context::Session session(context);
  // Per thread: a row of floats, and a row in the packed type (never wider than the floats).
  const std::size_t row_floats = layout_.k_padded;
  std::byte* scratch = session.scratch(context.threads() * 2 * row_floats * sizeof(float));
  const Phase phase{layout_.blocks, 1, [&](std::size_t begin, std::size_t end, std::size_t thread) {
                      float* floats = reinterpret_cast<float*>(scratch) + thread * 2 * row_floats;
                      const PanelPacker packer(biased_, table, floats, floats + row_floats);
                      for (std::size_t b = begin; b < end; ++b) {
                        packer.pack_both(layout_, buffer_.data() + b * layout_.block_bytes, source, name, b, channels_);
                      }
                    }};
  session.run({&phase, 1});
}

void PackedMatrix::unpack(const TierTable& table, float* weights) const {
  for (std::size_t c = 0; c < channels_; ++c) {
    const std::byte* block = data() + c / kBlockChannels * layout_.block_bytes;
    unpack_channel(table, layout_, block, c % kBlockChannels, weights + c * layout_.inputs);
  }
}

}  // namespace kt
