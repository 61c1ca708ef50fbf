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

}  // namespace

void Routing::sort(const RouterOutput& router, std::size_t begin, std::size_t end, std::size_t k, std::size_t experts) {
  const std::size_t slots = (end - begin) * k;
  row_of_slot.resize(slots);
  weights.resize(slots);
  count_.assign(experts, 0);
  for (std::size_t i = 0; i < slots; ++i) {
    const std::int64_t id = id_at(router, begin * k + i);
    const bool valid = id >= 0 && static_cast<std::uint64_t>(id) < experts;
    row_of_slot[i] = valid ? id : kNowhere;  // the expert for now, its row below
    weights[i] = weight_at(router, begin * k + i);
    if (valid) ++count_[static_cast<std::size_t>(id)];
  }
  groups.clear();
  rows = 0;
  for (std::size_t e = 0; e < experts; ++e) {
    const std::size_t count = count_[e];
    count_[e] = rows;
    if (count != 0) groups.push_back({e, rows, count});
    rows += count;
  }
  for (std::size_t i = 0; i < slots; ++i) {
    if (row_of_slot[i] != kNowhere)
      row_of_slot[i] = static_cast<std::int64_t>(count_[static_cast<std::size_t>(row_of_slot[i])]++);
  }
  // Threads take shrinking shares of the list: with the big groups last, the shares that even out the end are the small
  // ones.
  std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.count < b.count; });
}

}  // namespace kt
