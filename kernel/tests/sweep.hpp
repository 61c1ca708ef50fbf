// One list of INT8 and grouped layers and inputs whose outputs must have the same bits everywhere: tails in tokens,
// channels and inputs, every gate, dtype and id type, empty and crowded experts.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "layers.hpp"

namespace kt::check {

struct SweepCase {
  Shape shape;
  bool rotated;
  Gate gate;
  std::size_t tokens;
  std::size_t k;
  DType x_type;
  DType y_type;
  IdType id_type;
  MatrixTraits gate_up = {};
  MatrixTraits down = {};

  std::string name() const;
};

const std::vector<SweepCase>& sweep();

// The output's bytes.
std::vector<std::uint8_t> run_case(const SweepCase& c, const std::shared_ptr<const PackedExperts>& packed,
                                   const TierTable& table, const Run& run);

// Calls for every case, with the packed weights that neighbouring cases share.
void for_each_case(
    const std::function<void(std::size_t index, const SweepCase&, std::shared_ptr<PackedExperts>)>& call);

}  // namespace kt::check
