// A linear layer on the CPU: encode rows, multiply by column blocks, store. Knows no ISA.
#pragma once

#include <cstddef>
#include <memory>

#include "cpu/context.hpp"
#include "linear/packed_matrix.hpp"

namespace kt {

struct LinearArgs {
  std::size_t rows;  // may be 0
  const void* x;     // (rows, K) contiguous
  DType x_type;
  void* y;  // (rows, N) contiguous
  DType y_type;
};

class Linear {
 public:
  Linear(std::shared_ptr<Context> context, std::shared_ptr<const PackedMatrix> packed, const TierTable& table);

  // y = x·Wᵀ + bias. A row's bits do not depend on the other rows nor on the number of threads.
  void forward(const LinearArgs& args) const;

 private:
  struct Chunk;

  void forward_chunk(Context::Session& session, const LinearArgs& args, std::size_t begin, std::size_t end) const;
  void encode(const Chunk& chunk, std::size_t begin, std::size_t end, std::size_t thread) const;
  void multiply(const Chunk& chunk, std::size_t begin, std::size_t end, std::size_t thread) const;
  void store(const Chunk& chunk, std::size_t row, std::size_t count, std::size_t block, std::size_t blocks,
             const float* products) const;

  std::shared_ptr<Context> context_;
  std::shared_ptr<const PackedMatrix> packed_;
  const TierTable& table_;
  const FormatTable& functions_;
};

}  // namespace kt
