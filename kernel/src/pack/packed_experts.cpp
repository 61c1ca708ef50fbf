#include "pack/packed_experts.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "error.hpp"
#include "pack/fp8.hpp"
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

template <class Source, class PackPanel>
void PackedExperts::for_each_panel(Context::Session& session, std::size_t expert, const Source& source,
                                   const PackPanel& pack_panel) {
  const LayerLayout& l = layout_;
  std::byte* gate_up = writable(expert);
  std::byte* down = gate_up + l.gate_up.bytes();
  const Phase phase{l.gate_up.blocks + l.down.blocks, 1, [&](std::size_t begin, std::size_t end, std::size_t thread) {
                      const auto both = [&](const MatrixLayout& matrix, std::byte* blocks, const auto& view,
                                            const char* name, std::size_t index, std::size_t channels) {
                        for (std::size_t panel = 0; panel < 2; ++panel) {
                          pack_panel(thread, matrix, blocks + index * matrix.block_bytes, panel, view, name,
                                     index * kBlockChannels + panel * kPanelChannels, channels);
                        }
                      };
                      for (std::size_t b = begin; b < end; ++b) {
                        if (b >= l.gate_up.blocks) {
                          both(l.down, down, source.down, "down", b - l.gate_up.blocks, l.hidden);
                        } else if (l.traits.gated) {
                          std::byte* block = gate_up + b * l.gate_up.block_bytes;
                          const std::size_t first = b * kPanelChannels;
                          pack_panel(thread, l.gate_up, block, 0, source.gate, "gate", first, l.intermediate);
                          pack_panel(thread, l.gate_up, block, 1, source.up, "up", first, l.intermediate);
                        } else {
                          both(l.gate_up, gate_up, source.up, "up", b, l.intermediate);
                        }
                      }
                    }};
  session.run({&phase, 1});
}

void PackedExperts::pack(Context& context, const TierTable& table, std::size_t expert, const ExpertSource& source) {
  check_expert(expert);
  if (layout_.traits.gated) check_source(layout_.gate_up, source.gate, "gate");
  check_source(layout_.gate_up, source.up, "up");
  check_source(layout_.down, source.down, "down");
  Context::Session session(context);
  // Per thread: a row of floats, and a row in the packed type (never wider than the floats).
  const std::size_t row_floats = std::max(layout_.gate_up.k_padded, layout_.down.k_padded);
  std::byte* scratch = session.scratch(context.threads() * 2 * row_floats * sizeof(float));
  for_each_panel(session, expert, source,
                 [&](std::size_t thread, const MatrixLayout& matrix, std::byte* block, std::size_t panel,
                     const WeightView& view, const char* name, std::size_t first, std::size_t channels) {
                   float* floats = reinterpret_cast<float*>(scratch) + thread * 2 * row_floats;
                   PanelPacker(layout_.traits.biased, table, floats, floats + row_floats)
                       .pack(matrix, block, panel, view, name, first, channels);
                 });
}

void PackedExperts::pack(Context& context, std::size_t expert, const Fp8ExpertSource& source) {
  check_expert(expert);
  const LayerLayout& l = layout_;
  if (l.gate_up.format() != Format::kFp8 || l.down.format() != Format::kFp8)
    throw Error("FP8 codes are laid out in a layer whose matrices are FP8");
  if (l.traits.gated) check_fp8_blocks(source.gate, "gate", l.intermediate, l.hidden);
  check_fp8_blocks(source.up, "up", l.intermediate, l.hidden);
  check_fp8_blocks(source.down, "down", l.hidden, l.intermediate);
  Context::Session session(context);
  for_each_panel(session, expert, source,
                 [&](std::size_t, const MatrixLayout& matrix, std::byte* block, std::size_t panel, const Fp8View& view,
                     const char* name, std::size_t first, std::size_t channels) {
                   Fp8Panel(matrix, block, panel).copy(view, name, first, channels);
                   if (l.traits.biased) pack_biases(matrix, block, panel, view.bias, name, first, channels);
                 });
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
