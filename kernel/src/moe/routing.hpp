// (token, slot) pairs counting-sorted by expert.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tiers/table.hpp"

namespace kt {

enum class IdType : int { kInt32, kInt64 };

// The router's output for `tokens` tokens, k slots each, contiguous.
struct RouterOutput {
  const void* ids;
  IdType id_type;
  const void* weights;
  DType weight_type;
};

// Rows and experts of a chunk, in memory that belongs to the caller: a forward owns nothing that outlives it.
struct Routing {
  static constexpr std::int64_t kNowhere = -1;

  struct Group {  // rows [first, first + count) belong to one expert
    std::size_t expert;
    std::size_t first;
    std::size_t count;
  };

  // Arrays to sort into; their contents are unspecified before.
  struct Memory {
    Group* groups = nullptr;              // experts
    std::int64_t* row_of_slot = nullptr;  // tokens x k
    float* weights = nullptr;             // tokens x k
    std::size_t* next_row = nullptr;      // experts
  };

  std::span<const Group> groups;              // experts with at least one row, fewest rows first
  std::span<const std::int64_t> row_of_slot;  // tokens x k: the sorted row, or kNowhere for an id outside 0…E-1
  std::span<const float> weights;             // tokens x k
  std::size_t rows = 0;

  // How many rows the slots of tokens [begin, end) make: those whose id is an expert's.
  static std::size_t count_rows(const RouterOutput& router, std::size_t begin, std::size_t end, std::size_t k,
                                std::size_t experts);

  // Sorts the slots of tokens [begin, end). Allocates nothing.
  static Routing sort(const RouterOutput& router, std::size_t begin, std::size_t end, std::size_t k,
                      std::size_t experts, const Memory& memory);
};

}  // namespace kt
