#pragma once

#include "tiers/table.hpp"

namespace kt {
const TierTable* avx_vnni_table();
}
