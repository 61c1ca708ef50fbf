// Which experts a token reaches: sentinels, repeats, crowds, nobody.
#include "each_tier.hpp"
#include "error.hpp"
#include "layers.hpp"
#include "reference.hpp"

using kt::DType;
using kt::Format;
using kt::IdType;
using kt::check::Batch;
using kt::check::Kernel;
using kt::check::Layer;
using kt::check::make_batch;
using kt::check::make_layer;
using kt::check::Shape;

namespace {

constexpr Shape kShape{7, 96, 48};

std::vector<float> zeros(std::size_t n) {
  return std::vector<float>(n, 0.0f);
}

}  // namespace

TEST_EACH_FORMAT("routing: ids outside the experts contribute nothing") {
  const Layer layer = make_layer(kShape);
  Kernel kernel(layer, c.format, *c.table);
  Batch batch = make_batch(kShape, 12, 4);
  const std::int64_t nowhere[] = {-1, 7, 1000000, INT64_MIN, INT64_MAX, std::int64_t{1} << 32};
  Batch expected = batch;
  for (std::size_t i = 0; i < batch.ids.size(); i += 2) {
    batch.ids[i] = nowhere[i / 2 % 6];
    expected.weights[i] = 0.0f;  // finite expert outputs, so that nothing is left of them
  }
  CHECK_SAME_BITS(kernel(batch), kernel(expected), kShape.hidden);
}

TEST_EACH_FORMAT("routing: a token that is routed nowhere is zero, and so is a batch of them") {
  Kernel kernel(make_layer(kShape), c.format, *c.table, {3, 16});
  Batch batch = make_batch(kShape, 20, 2);
  batch.ids[10] = batch.ids[11] = -1;
  const std::vector<float> y = kernel(batch);
  CHECK(std::vector<float>(y.begin() + 5 * 96, y.begin() + 6 * 96) == zeros(96));
  CHECK(std::vector<float>(y.begin() + 6 * 96, y.begin() + 7 * 96) != zeros(96));
  for (std::int64_t& id : batch.ids) id = -1;
  CHECK(kernel(batch) == zeros(20 * 96));
  Batch crowd = make_batch(kShape, 400, 2);  // enough for every phase to be shared out
  for (std::int64_t& id : crowd.ids) id = 7;
  CHECK(kernel(crowd) == zeros(400 * 96));
}

TEST_EACH_FORMAT("routing: repeats of an expert add up") {
  Kernel kernel(make_layer(kShape), c.format, *c.table);
  Batch batch = make_batch(kShape, 9, 3);
  for (std::int64_t& id : batch.ids) id = 4;
  for (float& weight : batch.weights) weight = 0.25f;
  Batch once = make_batch(kShape, 9, 1);
  once.x = batch.x;
  for (std::int64_t& id : once.ids) id = 4;
  for (float& weight : once.weights) weight = 0.25f;
  const std::vector<float> single = kernel(once);
  std::vector<float> expected(single.size());
  for (std::size_t i = 0; i < single.size(); ++i) expected[i] = single[i] + single[i] + single[i];
  CHECK_SAME_BITS(kernel(batch), expected, kShape.hidden);
}

TEST_EACH_FORMAT("routing: slots are added in their order") {
  Kernel kernel(make_layer(kShape), c.format, *c.table);
  const Batch batch = make_batch(kShape, 11, 4);
  std::vector<float> expected = zeros(11 * 96);
  for (std::size_t s = 0; s < 4; ++s) {
    Batch slot = make_batch(kShape, 11, 1);
    slot.x = batch.x;
    for (std::size_t t = 0; t < 11; ++t) slot.ids[t] = batch.ids[4 * t + s], slot.weights[t] = 1.0f;
    const std::vector<float> y = kernel(slot);
    for (std::size_t i = 0; i < y.size(); ++i) expected[i] = expected[i] + y[i] * batch.weights[i / 96 * 4 + s];
  }
  CHECK_SAME_BITS(kernel(batch), expected, kShape.hidden);
}

TEST_EACH_FORMAT("routing: all tokens on one expert, and most experts empty") {
  const Shape shape{61, 64, 32};
  const Layer layer = make_layer(shape);
  Kernel kernel(layer, c.format, *c.table, {3, 200});
  for (const std::int64_t favourite : {0, 30, 60}) {
    Batch batch = make_batch(shape, 150, 2);
    for (std::int64_t& id : batch.ids) id = favourite;
    CHECK(kt::check::relative_error(kernel(batch),
                                    kt::check::float64_moe(kt::check::as_packed(layer, c.format), batch)) < 0.02);
    batch.ids[77] = (favourite + 1) % 61;  // one row beside a crowd
    CHECK(kt::check::relative_error(kernel(batch),
                                    kt::check::float64_moe(kt::check::as_packed(layer, c.format), batch)) < 0.02);
  }
}

TEST_EACH_FORMAT("routing: 32-bit ids say the same as 64-bit ones, negative too") {
  Kernel kernel(make_layer(kShape), c.format, *c.table);
  Batch batch = make_batch(kShape, 13, 3);
  batch.ids[4] = -1, batch.ids[5] = INT32_MIN, batch.ids[6] = INT32_MAX;
  const std::vector<std::int32_t> ids(batch.ids.begin(), batch.ids.end());
  std::vector<float> y(13 * 96, 99.0f);
  kernel.moe().forward({13,
                        3,
                        batch.x.data(),
                        DType::kF32,
                        {ids.data(), IdType::kInt32, batch.weights.data(), DType::kF32},
                        y.data(),
                        DType::kF32});
  CHECK_SAME_BITS(y, kernel(batch), kShape.hidden);
}

TEST_EACH_FORMAT("routing: no tokens, no slots") {
  Kernel kernel(make_layer(kShape), c.format, *c.table);
  CHECK(kernel(make_batch(kShape, 0, 2)).empty());
  CHECK(kernel(make_batch(kShape, 6, 0)) == zeros(6 * 96));
}

TEST_EACH_FORMAT("routing: one token to every number of experts") {
  const Layer layer = make_layer(kShape);
  Kernel kernel(layer, c.format, *c.table, {2, 64});
  for (std::size_t k = 1; k <= 12; ++k) {  // more slots than the top_k given, and than experts
    const Batch batch = make_batch(kShape, 1, k);
    CHECK(kt::check::relative_error(kernel(batch),
                                    kt::check::float64_moe(kt::check::as_packed(layer, c.format), batch)) < 0.03);
  }
}

TEST("routing: a layer without top_k or tokens is refused, and so is a format without functions") {
  const auto packed = kt::check::pack(make_layer({1, 8, 8}), Format::kInt8);
  const auto make = [&](const kt::TierTable& table, std::size_t top_k, std::size_t max_tokens) {
    kt::MoE(kt::check::context(1), packed, table, {}, top_k, max_tokens);
  };
  CHECK_THROWS(make(kt::check::generic(), 0, 1), kt::Error, "at least 1");
  CHECK_THROWS(make(kt::check::generic(), 1, 0), kt::Error, "at least 1");
  kt::TierTable empty = kt::check::generic();
  empty.int8 = {};
  CHECK_THROWS(make(empty, 1, 1), kt::Error, "INT8");
}
