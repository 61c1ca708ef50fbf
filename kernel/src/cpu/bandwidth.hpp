// How fast a context's threads read memory together: what bounds a decode step, which reads every active weight once.
#pragma once

#include <cstddef>

#include "cpu/context.hpp"

namespace kt {

// Bytes a second, the best of a few passes over `bytes` of memory on huge pages, which has to be several times what the
// caches hold. Every thread reads its own share, placed where it touched it first. std::bad_alloc when there is none;
// Error for less than a page a thread.
double read_bandwidth(Context& context, std::size_t bytes);

}  // namespace kt
