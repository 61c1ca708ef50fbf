#pragma once

#include "tiers/table.hpp"

namespace kt {
const TierTable* amx_table();
}
