#include "cpu/bandwidth.hpp"

#include <cmath>
#include <cstddef>

#include "check.hpp"
#include "error.hpp"

TEST("bandwidth: any number of threads and bytes gives a positive rate") {
  for (const std::size_t threads : {1, 3}) {
    kt::Context context(threads);
    for (const std::size_t bytes : {std::size_t{3 * 4096}, std::size_t{5'000'001}}) {
      const double rate = kt::read_bandwidth(context, bytes);
      CHECK(std::isfinite(rate) && rate > 0);
    }
  }
}

TEST("bandwidth: less than a page a thread is refused") {
  kt::Context context(2);
  CHECK_THROWS(kt::read_bandwidth(context, 8191), kt::Error, "less than a page for each of 2 threads");
}
