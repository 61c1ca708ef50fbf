#include "pack/packed_experts.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "error.hpp"
#include "pack/pack.hpp"

namespace kt {
namespace {

void check_source(const MatrixLayout& matrix, const WeightView& source, const char* name) {
  if (source.scales == nullptr) return;
  if (!is_grouped(matrix.format()) || matrix.traits.rotation != 0) {
    throw Error(std::string(name) + " comes quantised; the layout is " + std::string(format_name(matrix.format())) +
                (matrix.traits.rotation != 0 ? ", rotated" : "") + ", which would quantise it again");
  }
  if (matrix.traits.minimums != (source.minimums != nullptr)) {
    throw Error(std::string(name) + " and the layout disagree on whether there are minimums");
  }
}

}  // namespace

void PackedExperts::check_expert(std::size_t expert) const {
  if (expert >= layout_.experts)
    throw Error("expert " + std::to_string(expert) + " of " + std::to_string(layout_.experts));
}

PackedExperts::PackedExperts(const LayerLayout& layout, const std::string& path, std::size_t offset)
    : layout_(layout), file_(std::in_place, path, offset, layout.bytes()), data_(file_->data()) {
  if (offset % kRowBytes != 0) {
    throw Error(path + ": packed bytes begin at a multiple of " + std::to_string(kRowBytes) + ", not at " +
                std::to_string(offset));
  }
}

std::byte* PackedExperts::writable(std::size_t expert) {
  check_expert(expert);
  if (mapped()) throw Error("a mapped file of packed experts is not written to");
  return buffer_.data() + layout_.gate_up_offset(expert);
}

void PackedExperts::pack(Context& context, const TierTable& table, std::size_t expert, const ExpertSource& source) {
  const LayerLayout& l = layout_;
  if (l.traits.gated) check_source(l.gate_up, source.gate, "gate");
  check_source(l.gate_up, source.up, "up");
  check_source(l.down, source.down, "down");
  std::byte* gate_up = writable(expert);
  std::byte* down = gate_up + l.gate_up.bytes();
  Context::Session session(context);
  // Per thread: a row of floats, and a row in the packed type (never wider than the floats).
  const std::size_t row_floats = std::max(l.gate_up.k_padded, l.down.k_padded);
  std::byte* scratch = session.scratch(context.threads() * 2 * row_floats * sizeof(float));
  const Phase phase{l.gate_up.blocks + l.down.blocks, 1, [&](std::size_t begin, std::size_t end, std::size_t thread) {
                      float* floats = reinterpret_cast<float*>(scratch) + thread * 2 * row_floats;
                      const PanelPacker packer(l.traits.biased, table, floats, floats + row_floats);
                      for (std::size_t b = begin; b < end; ++b) {
                        if (b >= l.gate_up.blocks) {
                          const std::size_t d = b - l.gate_up.blocks;
                          packer.pack_both(l.down, down + d * l.down.block_bytes, source.down, "down", d, l.hidden);
                          continue;
                        }
                        std::byte* block = gate_up + b * l.gate_up.block_bytes;
                        if (l.traits.gated) {
                          packer.pack(l.gate_up, block, 0, source.gate, "gate", b * kPanelChannels, l.intermediate);
                          packer.pack(l.gate_up, block, 1, source.up, "up", b * kPanelChannels, l.intermediate);
                        } else {
                          packer.pack_both(l.gate_up, block, source.up, "up", b, l.intermediate);
                        }
                      }
                    }};
  session.run({&phase, 1});
}

void PackedExperts::load(std::size_t expert, std::span<const std::byte> bytes) {
  std::byte* to = writable(expert);
  if (bytes.size() != layout_.expert_bytes) {
    throw Error("expert " + std::to_string(expert) + " takes " + std::to_string(layout_.expert_bytes) +
                " packed bytes, not " + std::to_string(bytes.size()));
  }
  std::memcpy(to, bytes.data(), bytes.size());
}

void PackedExperts::unpack(const TierTable& table, std::size_t expert, float* gate, float* up, float* down) const {
  check_expert(expert);
  const LayerLayout& l = layout_;
  const std::byte* gate_up = data() + l.gate_up_offset(expert);
  for (std::size_t c = 0; c < l.intermediate; ++c) {
    if (l.traits.gated) {
      const std::byte* block = gate_up + c / kPanelChannels * l.gate_up.block_bytes;
      unpack_channel(table, l.gate_up, block, c % kPanelChannels, gate + c * l.hidden);
      unpack_channel(table, l.gate_up, block, kPanelChannels + c % kPanelChannels, up + c * l.hidden);
    } else {
      const std::byte* block = gate_up + c / kBlockChannels * l.gate_up.block_bytes;
      unpack_channel(table, l.gate_up, block, c % kBlockChannels, up + c * l.hidden);
    }
  }
  for (std::size_t c = 0; c < l.hidden; ++c) {
    const std::byte* block = data() + l.down_offset(expert) + c / kBlockChannels * l.down.block_bytes;
    unpack_channel(table, l.down, block, c % kBlockChannels, down + c * l.intermediate);
  }
}

}  // namespace kt
