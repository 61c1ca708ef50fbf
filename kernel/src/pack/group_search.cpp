#include "pack/group_search.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace kt {
namespace {

#include "tiers/scalar-inl.hpp"
#include "tiers/grouped-layout-inl.hpp"
#include "pack/scales-inl.hpp"

// A group a lane, 4 lanes since every CPU has vectors of 16 bytes: a lane's sums go in the order of its group's
// weights, on each CPU the same.
using Floats = float __attribute__((vector_size(16)));
using Ints = std::int32_t __attribute__((vector_size(16)));
static_assert(sizeof(Floats) == 4 * kGroupsAtOnce);

constexpr std::size_t kMostInputs = 128;

// Below this a group's weights are nothing beside any other's, and quotients of them would leave fp32.
constexpr float kSmallest = 1e-30f;

// What the largest weight is taken for, relative to the largest level: above 1 the grid is finer and the largest weight
// is cut. The best of these is refined. On normal, Student-t and trained weights, ten starts with three refinements
// each gain less than 0.1 points of relative error, from 7.5 %.
constexpr float kStarts[] = {1.0f, 0.85f, 1.1f};

// Least squares and rounding in turn. A third gains nothing.
constexpr int kRefinements = 2;

struct Scales {
  Floats scale, minimum;
};

// The nearest of a matrix's levels by a table: neighbours' midpoints are halves, so half steps decide.
class NearestLevel {
 public:
  explicit NearestLevel(Levels levels) {
    std::array<int, 16> values;
    for (unsigned code = 0; code < 16; ++code) values[code] = nibble_value(levels, code);
    std::sort(values.begin(), values.end());
    lowest_ = static_cast<float>(values.front());
    highest_ = static_cast<float>(values.back());
    for (std::size_t half = 0; half <= last(); ++half) {
      const float x = lowest_ + 0.5f * static_cast<float>(half) + 0.25f;
      int best = values[0];
      for (const int v : values) {
        if (std::fabs(x - static_cast<float>(v)) < std::fabs(x - static_cast<float>(best))) best = v;
      }
      table_[half] = static_cast<float>(best);
    }
  }

  float lowest() const { return lowest_; }
  float highest() const { return highest_; }
  // The level of the largest magnitude.
  float top() const { return -lowest_ > highest_ ? lowest_ : highest_; }

  // Turns a weight into half steps above the lowest level: x·per - offset.
  struct HalfSteps {
    Floats per, offset, most;
  };
  HalfSteps half_steps(Scales s) const {
    const Floats per = 2.0f * (s.scale != 0.0f ? 1.0f / s.scale : Floats{});
    return {per, s.minimum * per + 2.0f * lowest_, Floats{} + static_cast<float>(last())};
  }

  // A NaN is given the lowest level.
  Floats operator()(Floats x, HalfSteps to) const {
    x = x * to.per - to.offset;
    x = x > Floats{} ? x : Floats{};
    x = x < to.most ? x : to.most;
    Ints i = __builtin_convertvector(x, Ints);
    // By way of memory: taking the lanes out of a register one by one keeps the shuffle port busy twice as long.
    asm("" : "+m"(i));
    return Floats{table_[i[0]], table_[i[1]], table_[i[2]], table_[i[3]]};
  }

 private:
  std::size_t last() const { return static_cast<std::size_t>(2.0f * (highest_ - lowest_)); }

  float lowest_, highest_;
  std::array<float, 2 * 64 + 1> table_{};  // levels lie within 64 of each other
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

// Four groups, each multiplied by a power of two that brings its largest weight into [2, 4): squares stay in fp32.
class Search {
 public:
  Search(const MatrixTraits& traits, const float* x, std::size_t groups)
      : traits_(traits), nearest_(nearest_level(traits.levels)), n_(traits.group) {
    static constexpr float kZeros[kMostInputs] = {};
    const float* from[kGroupsAtOnce];
    for (std::size_t lane = 0; lane < kGroupsAtOnce; ++lane) from[lane] = lane < groups ? x + lane * n_ : kZeros;
    for (std::size_t i = 0; i < n_; ++i) {
      x_[i] = Floats{from[0][i], from[1][i], from[2][i], from[3][i]};
      low_ = x_[i] < low_ ? x_[i] : low_;
      high_ = x_[i] > high_ ? x_[i] : high_;
    }
    choose_units();
    for (std::size_t i = 0; i < n_; ++i) x_[i] *= unit_;
    low_ *= unit_, high_ *= unit_;
  }

  void run() {
    if (traits_.minimums) {
      centre_on(0.5f * (high_ + low_));
      const float steps = nearest_.highest() - nearest_.lowest();
      const float middle = 0.5f * (nearest_.highest() + nearest_.lowest());
      for (const float start : kStarts) {
        const Floats scale = (high_ - low_) / (steps * start);
        attempt({scale, -middle * scale});
      }
    } else {
      const Floats extreme = -low_ > high_ ? low_ : high_;
      for (const float start : kStarts) attempt({extreme / (nearest_.top() * start), Floats{}});
    }
    for (int i = 0; i < kRefinements; ++i) attempt(refined_);
  }

  // Group `lane`'s values at values + lane·n.
  void take(std::int8_t* values, GroupScale* chosen, std::size_t groups) const {
    const NearestLevel::HalfSteps half_steps = nearest_.half_steps(best_);
    for (std::size_t i = 0; i < n_; ++i) {
      const Floats level = nearest_(x_[i], half_steps);
      for (std::size_t lane = 0; lane < groups; ++lane) values[lane * n_ + i] = static_cast<std::int8_t>(level[lane]);
    }
    const Floats scale = best_.scale * inverse_unit_;
    const Floats minimum = traits_.minimums ? narrowed((best_.minimum + origin_) * inverse_unit_) : Floats{};
    for (std::size_t lane = 0; lane < groups; ++lane) chosen[lane] = {scale[lane], minimum[lane]};
  }

 private:
  struct Sums {
    Floats error, v, vv, xv;
  };

  void choose_units() {
    for (std::size_t lane = 0; lane < kGroupsAtOnce; ++lane) {
      const float most = std::max(-low_[lane], high_[lane]);
      if (most < kSmallest) continue;
      const std::uint32_t exponent = float_to_bits(most) >> 23;
      unit_[lane] = bits_to_float((255u - exponent) << 23);
      inverse_unit_[lane] = bits_to_float((exponent - 1u) << 23);
    }
  }

  // Least squares of weights that are far from 0, beside how they differ, would drown in their roundings.
  void centre_on(Floats origin) {
    origin_ = origin;
    for (std::size_t i = 0; i < n_; ++i) x_[i] -= origin;
  }

  // Rounded as the matrix will keep them.
  Scales narrowed(Scales s) const {
    return {narrowed(s.scale * inverse_unit_) * unit_,
            traits_.minimums ? narrowed((s.minimum + origin_) * inverse_unit_) * unit_ - origin_ : Floats{}};
  }

  Floats narrowed(Floats x) const {
    return Floats{narrow_scale(x[0], traits_.scales), narrow_scale(x[1], traits_.scales),
                  narrow_scale(x[2], traits_.scales), narrow_scale(x[3], traits_.scales)};
  }

  Sums rounded(Scales s) const {
    const NearestLevel::HalfSteps half_steps = nearest_.half_steps(s);
    Floats error = {}, sum_v = {}, sum_vv = {}, sum_xv = {};
    for (std::size_t i = 0; i < n_; ++i) {
      const Floats v = nearest_(x_[i], half_steps);
      const Floats d = x_[i] - (v * s.scale + s.minimum);
      error += d * d;
      sum_v += v;
      sum_vv += v * v;
      sum_xv += x_[i] * v;
    }
    return {error, sum_v, sum_vv, sum_xv};
  }

  // Where it is not better, or not a number, what was there stays.
  void attempt(Scales s) {
    s = narrowed(s);
    const Sums sums = rounded(s);
    const Scales refined = fitted(sums, s);
    const Ints better = sums.error < error_;
    error_ = better ? sums.error : error_;
    best_ = chosen(better, s, best_);
    refined_ = chosen(better, refined, refined_);
  }

  static Scales chosen(Ints first, Scales a, Scales b) {
    return {first ? a.scale : b.scale, first ? a.minimum : b.minimum};
  }

  // Least squares of the weights against the levels.
  Scales fitted(const Sums& sums, Scales otherwise) const {
    if (!traits_.minimums) {
      return {sums.vv > 0.0f ? sums.xv / sums.vv : otherwise.scale, Floats{}};
    }
    Floats x = {};
    for (std::size_t i = 0; i < n_; ++i) x += x_[i];
    const Floats n = Floats{} + static_cast<float>(n_), variance = n * sums.vv - sums.v * sums.v;
    const Floats scale = (n * sums.xv - x * sums.v) / variance;
    return chosen(variance > 0.0f, {scale, (x - scale * sums.v) / n}, otherwise);
  }

  const MatrixTraits& traits_;
  const NearestLevel& nearest_;
  std::size_t n_;
  Floats low_ = Floats{} + HUGE_VALF, high_ = Floats{} - HUGE_VALF;
  Floats unit_{}, inverse_unit_{}, origin_{};
  Floats error_ = Floats{} + HUGE_VALF;
  Scales best_{}, refined_{};
  Floats x_[kMostInputs];
};

GroupScale choose_bytes(const MatrixTraits& traits, const float* x, std::int8_t* values) {
  std::fill_n(values, traits.group, static_cast<std::int8_t>(0));
  float most = 0.0f;
  for (std::size_t i = 0; i < traits.group; ++i) most = std::max(most, std::fabs(x[i]));
  const float scale = most < kSmallest ? 0.0f : narrow_scale(most / 127.0f, traits.scales);
  if (scale == 0.0f) return {};
  for (std::size_t i = 0; i < traits.group; ++i) {
    values[i] = static_cast<std::int8_t>(std::clamp(std::nearbyint(x[i] / scale), -127.0f, 127.0f));
  }
  return {scale, 0.0f};
}

}  // namespace

void choose_groups(const MatrixTraits& traits, const float* x, std::size_t groups, std::int8_t* values,
                   GroupScale* chosen) {
  if (traits.format == Format::kInt4) {
    Search search(traits, x, groups);
    search.run();
    search.take(values, chosen, groups);
  } else {
    for (std::size_t g = 0; g < groups; ++g) {
      chosen[g] = choose_bytes(traits, x + g * traits.group, values + g * traits.group);
    }
  }
}

}  // namespace kt
