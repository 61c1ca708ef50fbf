// Numbers that models should not produce and do: they stay where they are.
#include <cmath>
#include <limits>

#include "each_tier.hpp"
#include "layers.hpp"
#include "reference.hpp"

using kt::check::Batch;
using kt::check::Kernel;
using kt::check::Layer;
using kt::check::make_batch;
using kt::check::make_layer;
using kt::check::Shape;

namespace {

constexpr Shape kShape{3, 160, 80};
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Token `t` of `y` holds no finite number, all others have the bits of `clean`.
void check_only(const std::vector<float>& y, const std::vector<float>& clean, std::size_t t, std::size_t hidden) {
  for (std::size_t i = 0; i < y.size(); ++i) {
    if (i / hidden == t) {
      CHECK(!std::isfinite(y[i]));
    } else {
      CHECK_EQ(y[i], clean[i]);
    }
  }
}

}  // namespace

TEST_EACH_FORMAT("values: a NaN or an infinity in one row stays in that row") {
  Kernel kernel(make_layer(kShape), c.format, *c.table);
  for (const std::size_t tokens : {1, 5, 33, 64}) {
    const Batch batch = make_batch(kShape, tokens, 2);
    const std::vector<float> clean = kernel(batch);
    for (const float bad : {kNan, kInf, -kInf}) {
      for (const std::size_t place : {0, 37, 159}) {
        Batch dirty = batch;
        const std::size_t t = tokens / 2;
        dirty.x[t * kShape.hidden + place] = bad;
        const std::vector<float> y = kernel(dirty);
        check_only(y, clean, t, kShape.hidden);
        // Either way: an infinity times weights of both signs, or the scale of quantised rows, is no number.
        if (std::isnan(bad) || (c.format != kt::Format::kBf16 && c.format != kt::Format::kFp8))
          CHECK(kt::check::all_nan(&y[t * kShape.hidden], kShape.hidden));
      }
    }
  }
}

TEST_EACH_FORMAT("values: a whole row of NaN, and all other rows too") {
  Kernel kernel(make_layer(kShape), c.format, *c.table, {2, 64});
  Batch batch = make_batch(kShape, 20, 2);
  for (float& x : batch.x) x = kNan;
  const std::vector<float> y = kernel(batch);
  CHECK(kt::check::all_nan(y.data(), y.size()));
  CHECK(kt::check::all_finite(kernel(make_batch(kShape, 20, 2)).data(), y.size()));  // nothing of it is left behind
}

TEST_EACH_FORMAT("values: a NaN row that is routed nowhere is zero") {
  Kernel kernel(make_layer(kShape), c.format, *c.table);
  Batch batch = make_batch(kShape, 3, 2);
  for (std::size_t i = 0; i < kShape.hidden; ++i) batch.x[kShape.hidden + i] = kNan;
  batch.ids[2] = batch.ids[3] = -1;
  const std::vector<float> y = kernel(batch);
  for (std::size_t i = 0; i < kShape.hidden; ++i) CHECK_EQ(y[kShape.hidden + i], 0.0f);
}

TEST_EACH_FORMAT("values: a NaN routing weight touches only its token") {
  Kernel kernel(make_layer(kShape), c.format, *c.table);
  const Batch batch = make_batch(kShape, 17, 3);
  const std::vector<float> clean = kernel(batch);
  for (const float bad : {kNan, kInf}) {
    Batch dirty = batch;
    dirty.weights[3 * 8 + 1] = bad;
    check_only(kernel(dirty), clean, 8, kShape.hidden);
    dirty.ids[3 * 8 + 1] = -1;  // the weight of a slot that goes nowhere is not used
    CHECK(kt::check::all_finite(kernel(dirty).data(), clean.size()));
  }
}

TEST_EACH_FORMAT("values: weights are used as given: zero, negative, not normalised") {
  const Layer layer = make_layer(kShape);
  Kernel kernel(layer, c.format, *c.table);
  Batch batch = make_batch(kShape, 16, 2);
  for (std::size_t i = 0; i < batch.weights.size(); ++i)
    batch.weights[i] *= i % 3 == 0 ? -2.5f : i % 3 == 1 ? 0.0f : 40.0f;
  CHECK(kt::check::relative_error(kernel(batch), kt::check::float64_moe(kt::check::as_packed(layer, c.format), batch)) <
        0.02);
  for (float& weight : batch.weights) weight = 0.0f;
  for (const float y : kernel(batch)) CHECK_EQ(y, 0.0f);
}

TEST_EACH_FORMAT("values: zero rows are zero") {
  Kernel kernel(make_layer(kShape), c.format, *c.table);
  Batch batch = make_batch(kShape, 9, 2);
  for (std::size_t i = 0; i < kShape.hidden; ++i) batch.x[4 * kShape.hidden + i] = i % 2 == 0 ? 0.0f : -0.0f;
  const std::vector<float> y = kernel(batch);
  for (std::size_t i = 0; i < kShape.hidden; ++i) CHECK_EQ(y[4 * kShape.hidden + i], 0.0f);
}

TEST_EACH_FORMAT("values: subnormal, tiny and huge rows come out finite and in proportion") {
  const Layer layer = make_layer(kShape);
  Kernel kernel(layer, c.format, *c.table);
  const Batch batch = make_batch(kShape, 8, 2);
  for (const float scale : {1e-42f, 1e-38f, 1e-30f, 1e-10f, 1e3f, 1e8f}) {
    Batch scaled = batch;
    for (float& x : scaled.x) x *= scale;
    const std::vector<float> y = kernel(scaled);
    CHECK(kt::check::all_finite(y.data(), y.size()));
    // silu is quadratic near zero: rows below 1e-10 leave less than fp32 can hold.
    if (scale >= 1e-10f)
      CHECK(kt::check::relative_error(y, kt::check::float64_moe(kt::check::as_packed(layer, c.format), scaled)) <
            0.025);
  }
}

TEST_EACH_FORMAT("values: overflow becomes infinite or NaN in its own token only") {
  Kernel kernel(make_layer(kShape), c.format, *c.table);
  const Batch batch = make_batch(kShape, 6, 2);
  const std::vector<float> clean = kernel(batch);
  Batch dirty = batch;
  for (std::size_t i = 0; i < kShape.hidden; ++i) dirty.x[2 * kShape.hidden + i] *= 1e37f;
  const std::vector<float> y = kernel(dirty);
  for (std::size_t i = 0; i < y.size(); ++i) {
    if (i / kShape.hidden != 2) CHECK_EQ(y[i], clean[i]);
  }
  CHECK(!std::isfinite(y[2 * kShape.hidden]));
}
