// The MoE layer on the CPU: sort, encode, gate/up, encode, down, combine. Knows no ISA.
#pragma once

#include <cstddef>
#include <memory>

#include "cpu/context.hpp"
#include "moe/routing.hpp"
#include "pack/packed_experts.hpp"

namespace kt {

struct ForwardArgs {
  std::size_t tokens;
  std::size_t k;
  const void* x;  // (tokens, H) contiguous
  DType x_type;
  RouterOutput router;
  void* y;  // (tokens, H) contiguous
  DType y_type;
};

// Holds nothing that a forward changes: what one needs is the session's, which a forked child makes anew.
class MoE {
 public:
  // max_tokens sizes the scratch: longer inputs are processed in chunks, with equal bits.
  MoE(std::shared_ptr<Context> context, std::shared_ptr<const PackedExperts> packed, const TierTable& table,
      const Gate& gate, std::size_t top_k, std::size_t max_tokens);

  void forward(const ForwardArgs& args) const;
  std::shared_ptr<Pending> submit(const ForwardArgs& args) const;

  // Touches every packed page, then runs one token through every phase.
  void warm_up() const;

  std::size_t scratch_bytes() const;
  void fill_scratch(int byte) const;

 private:
  struct Chunk;

  void forward_chunk(Context::Session& session, const ForwardArgs& args, std::size_t begin, std::size_t end) const;
  Chunk carve(Context::Session& session, const ForwardArgs& args, std::size_t begin, std::size_t end) const;
  void encode(const Chunk& chunk, std::size_t begin, std::size_t end, std::size_t thread) const;
  void gate_up(const Chunk& chunk, std::size_t begin, std::size_t end) const;
  void encode_activated(const Chunk& chunk, std::size_t begin, std::size_t end, std::size_t thread) const;
  void down(const Chunk& chunk, std::size_t begin, std::size_t end) const;
  void combine(const Chunk& chunk, std::size_t begin, std::size_t end, std::size_t thread) const;

  std::shared_ptr<Context> context_;
  std::shared_ptr<const PackedExperts> packed_;
  const TierTable& table_;
  const FormatTable& gate_up_;
  const FormatTable& down_;
  Gate gate_;
  std::size_t top_k_;
  std::size_t max_tokens_;
};

}  // namespace kt
