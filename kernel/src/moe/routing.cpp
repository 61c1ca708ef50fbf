#include "moe/routing.hpp"

#include <algorithm>

namespace kt {
namespace {

#include "tiers/scalar-inl.hpp"

std::int64_t id_at(const RouterOutput& router, std::size_t i) {
  return router.id_type == IdType::kInt32 ? static_cast<const std::int32_t*>(router.ids)[i]
                                          : static_cast<const std::int64_t*>(router.ids)[i];
}

float weight_at(const RouterOutput& router, std::size_t i) {
  switch (router.weight_type) {
    case DType::kF32:
      return static_cast<const float*>(router.weights)[i];
    case DType::kBf16:
      return bf16_to_float(static_cast<const std::uint16_t*>(router.weights)[i]);
    case DType::kF16:
      return f16_to_float(static_cast<const std::uint16_t*>(router.weights)[i]);
  }
  return 0.0f;
}

bool is_expert(std::int64_t id, std::size_t experts) {
  return id >= 0 && static_cast<std::uint64_t>(id) < experts;
}

}  // namespace

std::size_t Routing::count_rows(const RouterOutput& router, std::size_t begin, std::size_t end, std::size_t k,
                                std::size_t experts) {
  std::size_t rows = 0;
  for (std::size_t i = begin * k; i < end * k; ++i) rows += is_expert(id_at(router, i), experts);
  return rows;
}

Routing Routing::sort(const RouterOutput& router, std::size_t begin, std::size_t end, std::size_t k,
                      std::size_t experts, const Memory& memory) {
  const std::size_t slots = (end - begin) * k;
  std::fill_n(memory.next_row, experts, std::size_t{0});
  for (std::size_t i = 0; i < slots; ++i) {
    const std::int64_t id = id_at(router, begin * k + i);
    const bool valid = is_expert(id, experts);
    memory.row_of_slot[i] = valid ? id : kNowhere;  // the expert for now, its row below
    memory.weights[i] = weight_at(router, begin * k + i);
    if (valid) ++memory.next_row[id];
  }
  std::size_t rows = 0, active = 0;
  for (std::size_t e = 0; e < experts; ++e) {
    const std::size_t count = memory.next_row[e];
    memory.next_row[e] = rows;
    if (count != 0) memory.groups[active++] = {e, rows, count};
    rows += count;
  }
  for (std::size_t i = 0; i < slots; ++i) {
    std::int64_t& row = memory.row_of_slot[i];
    if (row != kNowhere) row = static_cast<std::int64_t>(memory.next_row[row]++);
  }
  // Threads take shrinking shares of the list: with the big groups last, the shares that even out the end are the small
  // ones. By expert among equals, as a stable sort would leave them, which would allocate.
  std::sort(memory.groups, memory.groups + active, [](const Group& a, const Group& b) {
    return a.count != b.count ? a.count < b.count : a.expert < b.expert;
  });
  return {{memory.groups, active}, {memory.row_of_slot, slots}, {memory.weights, slots}, rows};
}

}  // namespace kt
