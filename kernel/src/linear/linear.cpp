#include "linear/linear.hpp"

#include <algorithm>
#include <string>

#include "error.hpp"
#include "tiers/formats.hpp"

namespace kt {
namespace {

// Rows encoded at a time: bounds scratch to tens of MB, while a weight read once serves a thousand rows.
constexpr std::size_t kChunkRows = 1024;

// Rows of one task: enough for AMX to be bound by arithmetic, and a matrix of few blocks still gives every thread some.
constexpr std::size_t kTaskRows = 256;

// Products a thread holds before it stores them: a quarter of a common 1 MiB L2, beside the rows and a block.
constexpr std::size_t kTaskFloats = 65536;

// Encoding fewer floats than this takes the caller less time than waking the other threads (about 5 µs).
constexpr std::size_t kSerialFloats = 16384;

}  // namespace

// One chunk of rows and its scratch: encoded rows and their scales; per thread a row of floats and the products of a
// task.
struct Linear::Chunk {
  const LinearArgs& args;
  std::size_t begin;  // rows [begin, end)
  std::size_t end;
  std::size_t row_bytes;
  std::size_t work_floats;
  std::size_t product_floats;
  std::byte* rows = nullptr;
  float* scales = nullptr;
  float* work = nullptr;
  float* products = nullptr;

  std::size_t count() const { return end - begin; }
  std::size_t task_rows() const { return std::min(count(), kTaskRows); }

  // Every array is a multiple of 64 bytes, the first one aligned to as many.
  std::size_t lay_out(std::byte* base, std::size_t threads) {
    const std::size_t row_part = round_up(count() * row_bytes, 64), scale_part = round_up(count() * 4, 64);
    const std::size_t work_part = threads * work_floats * sizeof(float);
    rows = base;
    scales = reinterpret_cast<float*>(base + row_part);
    work = reinterpret_cast<float*>(base + row_part + scale_part);
    products = reinterpret_cast<float*>(base + row_part + scale_part + work_part);
    return row_part + scale_part + work_part + threads * product_floats * sizeof(float);
  }
};

Linear::Linear(std::shared_ptr<Context> context, std::shared_ptr<const PackedMatrix> packed, const TierTable& table)
    : context_(std::move(context)),
      packed_(std::move(packed)),
      table_(table),
      functions_(functions_of(table, packed_->layout().format())) {
  if (functions_.down == nullptr) {
    throw Error("this tier has no " + std::string(format_name(packed_->layout().format())) + " kernels");
  }
}

void Linear::forward(const LinearArgs& args) const {
  if (args.rows == 0) return;
  Context::Session session(*context_);
  for (std::size_t begin = 0; begin < args.rows; begin += kChunkRows) {
    forward_chunk(session, args, begin, std::min(args.rows, begin + kChunkRows));
  }
}

void Linear::forward_chunk(Context::Session& session, const LinearArgs& args, std::size_t begin,
                           std::size_t end) const {
  const MatrixLayout& l = packed_->layout();
  Chunk chunk{.args = args,
              .begin = begin,
              .end = end,
              .row_bytes = functions_.row_bytes(l.traits, l.k_padded),
              .work_floats = l.k_padded,
              .product_floats = 0};
  const std::size_t blocks =
      std::min(l.blocks, std::max<std::size_t>(1, kTaskFloats / kBlockChannels / chunk.task_rows()));
  chunk.product_floats = chunk.task_rows() * blocks * kBlockChannels;
  chunk.lay_out(session.scratch(chunk.lay_out(nullptr, context_->threads())), context_->threads());
  const std::size_t groups = (chunk.count() + kTaskRows - 1) / kTaskRows;
  const Phase phases[] = {
      {chunk.count(), 1, [&](std::size_t b, std::size_t e, std::size_t t) { encode(chunk, b, e, t); }},
      {groups * l.blocks, 1, [&](std::size_t b, std::size_t e, std::size_t t) { multiply(chunk, b, e, t); }},
  };
  const bool encode_alone = chunk.count() * l.inputs <= kSerialFloats;
  if (encode_alone) encode(chunk, 0, chunk.count(), 0);
  session.run(std::span(phases).subspan(encode_alone ? 1 : 0));
}

void Linear::encode(const Chunk& c, std::size_t begin, std::size_t end, std::size_t thread) const {
  const MatrixLayout& l = packed_->layout();
  const std::size_t bytes = l.inputs * float_size(c.args.x_type);
  for (std::size_t r = begin; r < end; ++r) {
    functions_.encode_row(static_cast<const std::byte*>(c.args.x) + (c.begin + r) * bytes, c.args.x_type, l.inputs,
                          l.k_padded, l.traits, c.rows + r * c.row_bytes, &c.scales[r],
                          c.work + thread * c.work_floats);
  }
}

// Items are (group of rows, block) pairs, blocks fastest; [begin, end) may span groups.
void Linear::multiply(const Chunk& c, std::size_t begin, std::size_t end, std::size_t thread) const {
  const MatrixLayout& l = packed_->layout();
  float* products = c.products + thread * c.product_floats;
  while (begin < end) {
    const std::size_t row = begin / l.blocks * kTaskRows, block = begin % l.blocks;
    const std::size_t rows = std::min(kTaskRows, c.count() - row);
    const std::size_t most = std::max<std::size_t>(1, c.product_floats / kBlockChannels / rows);
    const std::size_t blocks = std::min({end - begin, l.blocks - block, most});
    functions_.down({.traits = &l.traits,
                     .rows = c.rows + row * c.row_bytes,
                     .row_stride = c.row_bytes,
                     .row_scales = c.scales + row,
                     .m = rows,
                     .blocks = packed_->data() + block * l.block_bytes,
                     .block_bytes = l.block_bytes,
                     .block_count = blocks,
                     .k_padded = l.k_padded,
                     .has_bias = packed_->biased(),
                     .out = products,
                     .out_stride = blocks * kBlockChannels});
    store(c, row, rows, block, blocks, products);
    begin += blocks;
  }
}

// Products to y's dtype: the tier's weighted sum of one row of weight 1, which changes no number.
void Linear::store(const Chunk& c, std::size_t row, std::size_t count, std::size_t block, std::size_t blocks,
                   const float* products) const {
  const std::size_t first = block * kBlockChannels, size = float_size(c.args.y_type);
  const std::size_t columns = std::min(blocks * kBlockChannels, packed_->channels() - first);
  const float one = 1.0f;
  for (std::size_t r = 0; r < count; ++r) {
    const float* source = products + r * blocks * kBlockChannels;
    table_.combine({.rows = &source,
                    .weights = &one,
                    .slots = 1,
                    .n = columns,
                    .y = static_cast<std::byte*>(c.args.y) + ((c.begin + row + r) * packed_->channels() + first) * size,
                    .dtype = c.args.y_type});
  }
}

}  // namespace kt
