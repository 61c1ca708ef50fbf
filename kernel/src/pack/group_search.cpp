#include "pack/group_search.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace kt {
namespace {

#include "tiers/scalar-inl.hpp"
#include "tiers/grouped-layout-inl.hpp"
#include "pack/scales-inl.hpp"

// Below this a group's weights are nothing beside any other's, and quotients of them would leave fp32.
constexpr float kSmallest = 1e-30f;

// What the largest weight is taken for, relative to the largest level. Above 1 the grid is finer and the largest weight
// is cut; each start is then refined by least squares. Measured on normal, Student-t and trained weights: more starts
// gain less than 0.05 points of relative error.
constexpr float kStarts[] = {1.0f, 0.85f, 1.1f};

// The nearest of a matrix's levels by a table: neighbours' midpoints are halves, so half steps decide.
class NearestLevel {
 public:
  explicit NearestLevel(Levels levels) {
    std::array<int, 16> values;
    for (unsigned code = 0; code < 16; ++code) values[code] = nibble_value(levels, code);
    std::sort(values.begin(), values.end());
    lowest_ = values.front();
    highest_ = values.back();
    for (int half = 0; half <= 2 * (highest_ - lowest_); ++half) {
      const float x = static_cast<float>(lowest_) + 0.5f * static_cast<float>(half) + 0.25f;
      int best = values[0];
      for (const int v : values) {
        if (std::fabs(x - static_cast<float>(v)) < std::fabs(x - static_cast<float>(best))) best = v;
      }
      table_[static_cast<std::size_t>(half)] = static_cast<std::int8_t>(best);
    }
  }

  int lowest() const { return lowest_; }
  int highest() const { return highest_; }
  // The level of the largest magnitude.
  float top() const { return static_cast<float>(-lowest_ > highest_ ? lowest_ : highest_); }

  std::int8_t operator()(float x) const {
    const float most = static_cast<float>(highest_), least = static_cast<float>(lowest_);
    x = x > most ? most : x < least ? least : x;
    return table_[static_cast<std::size_t>(2.0f * (x - least))];
  }

 private:
  int lowest_, highest_;
  std::array<std::int8_t, 2 * 64 + 1> table_{};  // levels lie within 64 of each other
};

const NearestLevel& nearest_level(Levels levels) {
  static const std::array<NearestLevel, 4> all = {NearestLevel(Levels::kInt4), NearestLevel(Levels::kUint4),
                                                  NearestLevel(Levels::kE2m1), NearestLevel(Levels::kNormal4)};
  switch (levels) {
    case Levels::kUint4:
      return all[1];
    case Levels::kE2m1:
      return all[2];
    case Levels::kNormal4:
      return all[3];
    default:
      return all[0];
  }
}

class Search {
 public:
  Search(const MatrixTraits& traits, const float* x)
      : traits_(traits), nearest_(nearest_level(traits.levels)), x_(x), n_(traits.group) {
    if (traits.minimums) best_.minimum = narrow_scale(x[0], traits.scales);  // for weights that are all alike
  }

  // Rounds to the nearest level, fits scale (and minimum) to the levels, rounds again, and keeps the best of all.
  void refine_from(GroupScale start) {
    std::int8_t values[kMostInputs];
    for (int pass = 0; pass < 2; ++pass) {
      start = {narrow_scale(start.scale, traits_.scales), narrow_scale(start.minimum, traits_.scales)};
      if (start.scale == 0.0f || !std::isfinite(start.scale)) return;
      const double error = round(start, values);
      if (error < error_) {
        error_ = error;
        best_ = start;
        std::copy_n(values, n_, values_);
      }
      if (pass == 0) start = fitted(values, start);
    }
  }

  double error() const { return error_; }
  GroupScale take(std::int8_t* values) const {
    std::copy_n(values_, n_, values);
    return best_;
  }

 private:
  static constexpr std::size_t kMostInputs = 128;

  double round(GroupScale g, std::int8_t* values) const {
    const float inverse = 1.0f / g.scale;
    float error = 0.0f;
    for (std::size_t i = 0; i < n_; ++i) {
      values[i] = nearest_((x_[i] - g.minimum) * inverse);
      const float d = x_[i] - (static_cast<float>(values[i]) * g.scale + g.minimum);
      error += d * d;
    }
    return std::isfinite(error) ? error : wide_error(g, values);
  }

  // The same for weights whose squares leave fp32, from about 1e19.
  double wide_error(GroupScale g, const std::int8_t* values) const {
    double error = 0.0;
    for (std::size_t i = 0; i < n_; ++i) {
      const double d = static_cast<double>(x_[i]) - (static_cast<double>(values[i]) * g.scale + g.minimum);
      error += d * d;
    }
    return error;
  }

  // Least squares of x against values.
  GroupScale fitted(const std::int8_t* values, GroupScale otherwise) const {
    double v = 0, vv = 0, x = 0, xv = 0;
    for (std::size_t i = 0; i < n_; ++i) {
      const double value = values[i], weight = x_[i];
      v += value;
      vv += value * value;
      x += weight;
      xv += weight * value;
    }
    if (!traits_.minimums) return vv > 0 ? GroupScale{static_cast<float>(xv / vv), 0.0f} : otherwise;
    const auto n = static_cast<double>(n_);
    const double variance = n * vv - v * v;
    if (!(variance > 0)) return otherwise;
    const double scale = (n * xv - x * v) / variance;
    return {static_cast<float>(scale), static_cast<float>((x - scale * v) / n)};
  }

  const MatrixTraits& traits_;
  const NearestLevel& nearest_;
  const float* x_;
  std::size_t n_;
  double error_ = HUGE_VAL;
  GroupScale best_;
  std::int8_t values_[kMostInputs] = {};
};

GroupScale choose_nibbles(const MatrixTraits& traits, const float* x, std::int8_t* values) {
  const auto [low, high] = std::minmax_element(x, x + traits.group);
  const NearestLevel& nearest = nearest_level(traits.levels);
  Search search(traits, x);
  for (const float start : kStarts) {
    if (traits.minimums) {
      const auto steps = static_cast<float>(nearest.highest() - nearest.lowest());
      const float scale = (*high - *low) / (steps * start);
      const float middle = 0.5f * (*high + *low);
      search.refine_from({scale, middle - 0.5f * static_cast<float>(nearest.highest() + nearest.lowest()) * scale});
    } else {
      const float extreme = -*low > *high ? *low : *high;
      search.refine_from({extreme / (nearest.top() * start), 0.0f});
    }
  }
  return search.take(values);
}

GroupScale choose_bytes(const MatrixTraits& traits, const float* x, std::int8_t* values) {
  float most = 0.0f;
  for (std::size_t i = 0; i < traits.group; ++i) most = std::max(most, std::fabs(x[i]));
  const float scale = narrow_scale(most / 127.0f, traits.scales);
  if (scale == 0.0f) return {};
  for (std::size_t i = 0; i < traits.group; ++i) {
    values[i] = static_cast<std::int8_t>(std::clamp(std::nearbyint(x[i] / scale), -127.0f, 127.0f));
  }
  return {scale, 0.0f};
}

}  // namespace

GroupScale choose_group(const MatrixTraits& traits, const float* x, std::int8_t* values) {
  std::fill_n(values, traits.group, static_cast<std::int8_t>(0));
  float most = 0.0f;
  for (std::size_t i = 0; i < traits.group; ++i) most = std::max(most, std::fabs(x[i]));
  if (most < kSmallest) return {};
  return traits.format == Format::kInt4 ? choose_nibbles(traits, x, values) : choose_bytes(traits, x, values);
}

}  // namespace kt
