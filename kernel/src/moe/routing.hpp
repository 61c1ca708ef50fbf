// (token, slot) pairs counting-sorted by expert.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

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

struct Routing {
  static constexpr std::int64_t kNowhere = -1;

  struct Group {  // rows [first, first + count) belong to one expert
    std::size_t expert;
    std::size_t first;
    std::size_t count;
  };

  std::vector<Group> groups;              // experts with at least one row, fewest rows first
  std::vector<std::int64_t> row_of_slot;  // tokens x k: the sorted row, or kNowhere for an id outside 0…E-1
  std::vector<float> weights;             // tokens x k
  std::size_t rows = 0;

  // Sorts the slots of tokens [begin, end).
  void sort(const RouterOutput& router, std::size_t begin, std::size_t end, std::size_t k, std::size_t experts);

 private:
  std::vector<std::size_t> count_;  // per expert, then its next free row
};

}  // namespace kt
