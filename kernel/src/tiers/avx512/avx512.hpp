#pragma once

#include "tiers/table.hpp"

namespace kt {
const TierTable* avx512_table();
}
