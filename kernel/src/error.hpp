// The exceptions that leave the C++ library. Nothing in it exits, aborts or prints.
#pragma once

#include <stdexcept>

namespace kt {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The object was made in another process and cannot be used after fork.
struct ForkError : Error {
  using Error::Error;
};

// A NaN or infinite weight; the text names projection, channel and position.
struct WeightsValueError : Error {
  using Error::Error;
};

}  // namespace kt
