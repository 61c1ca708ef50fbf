#pragma once

#include "tiers/table.hpp"

namespace kt {
const TierTable* generic_table();
}
