#include "moe/moe.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "error.hpp"

namespace kt {
namespace {

// A chunk's rows at most: bounds scratch to some hundred MB at common sizes, while every expert of a large model still
// sees tens of rows, enough to be bound by arithmetic.
constexpr std::size_t kMostRows = 16384;

// Phases over fewer floats than this run on the caller alone: they take less time than waking the others (about 5 µs).
constexpr std::size_t kSerialFloats = 16384;

const char* at(const void* base, std::size_t bytes) {
  return static_cast<const char*>(base) + bytes;
}
char* at(void* base, std::size_t bytes) {
  return static_cast<char*>(base) + bytes;
}

// Cuts scratch memory into 64-byte aligned arrays; first pass with base null to learn the size.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <class T>
  T* take(std::size_t count) {
    std::byte* p = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(count * sizeof(T), 64);
    return reinterpret_cast<T*>(p);
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace

struct MoE::Chunk {
  const ForwardArgs& args;
  std::size_t begin;  // tokens [begin, end)
  std::size_t end;
  std::size_t k;

  std::size_t in_bytes;     // of an encoded input row
  std::size_t inner_bytes;  // of an encoded activated row
  std::size_t activated;    // floats between activated rows
  std::size_t out;          // floats between output rows
  std::byte* rows_in = nullptr;
  float* rows_out = nullptr;
  float* rows_activated = nullptr;
  std::byte* rows_inner = nullptr;
  float* scales_in = nullptr;
  float* scales_inner = nullptr;
  float* work = nullptr;  // per thread
  std::size_t work_floats;
  const float** slot_rows = nullptr;  // per thread: k pointers
  Routing::Memory sorted = {};
  Routing routing = {};

  void carve(Carver& carver, std::size_t rows, std::size_t experts, std::size_t threads) {
    sorted = {carver.take<Routing::Group>(experts), carver.take<std::int64_t>((end - begin) * k),
              carver.take<float>((end - begin) * k), carver.take<std::size_t>(experts)};
    // Input rows are dead when outputs are written: one place serves both.
    rows_in = carver.take<std::byte>(rows * std::max(in_bytes, out * sizeof(float)));
    rows_out = reinterpret_cast<float*>(rows_in);
    rows_activated = carver.take<float>(rows * activated);
    rows_inner = carver.take<std::byte>(rows * inner_bytes);
    scales_in = carver.take<float>(rows);
    scales_inner = carver.take<float>(rows);
    work = carver.take<float>(threads * work_floats);
    slot_rows = carver.take<const float*>(threads * k);
  }
};

MoE::MoE(std::shared_ptr<Context> context, std::shared_ptr<const PackedExperts> packed, const TierTable& table,
         const Gate& gate, std::size_t top_k, std::size_t max_tokens)
    : context_(std::move(context)),
      packed_(std::move(packed)),
      table_(table),
      gate_up_(functions_of(table, packed_->layout().gate_up.format())),
      down_(functions_of(table, packed_->layout().down.format())),
      gate_(gate),
      top_k_(top_k),
      max_tokens_(max_tokens) {
  for (const MatrixLayout* matrix : {&packed_->layout().gate_up, &packed_->layout().down}) {
    if (functions_of(table, matrix->format()).gate_up == nullptr)
      throw Error("this tier has no " + std::string(format_name(matrix->format())) + " kernels");
  }
  if (gate.gated != packed_->layout().traits.gated)
    throw Error("the gate formula and the packed layer disagree on whether there is a gate");
  if (top_k == 0 || max_tokens == 0) throw Error("top_k and max_tokens must be at least 1");
}

void MoE::forward(const ForwardArgs& args) const {
  if (args.tokens == 0) return;
  Context::Session session(*context_);
  const std::size_t step =
      std::max<std::size_t>(1, std::min(max_tokens_, kMostRows / std::max<std::size_t>(1, args.k)));
  for (std::size_t begin = 0; begin < args.tokens; begin += step) {
    forward_chunk(session, args, begin, std::min(args.tokens, begin + step));
  }
}

std::shared_ptr<Pending> MoE::submit(const ForwardArgs& args) const {
  return context_->submit([this, args] { forward(args); });
}

MoE::Chunk MoE::carve(Context::Session& session, const ForwardArgs& args, std::size_t begin, std::size_t end) const {
  const LayerLayout& l = packed_->layout();
  Chunk chunk{.args = args,
              .begin = begin,
              .end = end,
              .k = args.k,
              .in_bytes = gate_up_.row_bytes(l.gate_up.traits, l.gate_up.k_padded),
              .inner_bytes = down_.row_bytes(l.down.traits, l.down.k_padded),
              .activated = l.gate_up.blocks * l.activated_channels(),
              .out = l.down.blocks * kBlockChannels,
              .work_floats = std::max(l.gate_up.k_padded, l.down.k_padded)};
  Carver measure(nullptr);
  const std::size_t rows = Routing::count_rows(args.router, begin, end, args.k, l.experts);
  chunk.carve(measure, rows, l.experts, context_->threads());
  Carver carver(session.scratch(measure.used()));
  chunk.carve(carver, rows, l.experts, context_->threads());
  chunk.routing = Routing::sort(args.router, begin, end, args.k, l.experts, chunk.sorted);
  // Read twice: a caller that writes to them meanwhile must not make us write past the rows' memory.
  if (chunk.routing.rows != rows) throw Error("the expert ids were changed while the layer was computing");
  return chunk;
}

void MoE::forward_chunk(Context::Session& session, const ForwardArgs& args, std::size_t begin, std::size_t end) const {
  const LayerLayout& l = packed_->layout();
  const Chunk chunk = carve(session, args, begin, end);
  const std::size_t tokens = end - begin;
  const std::size_t active = chunk.routing.groups.size();

  std::vector<Phase> phases;
  phases.reserve(5);
  if (tokens * l.hidden <= kSerialFloats) {
    encode(chunk, 0, tokens, 0);
  } else {
    phases.push_back({tokens, 1, [&](std::size_t b, std::size_t e, std::size_t t) { encode(chunk, b, e, t); }});
  }
  if (active != 0) {
    phases.push_back(
        {active * l.gate_up.blocks, 1, [&](std::size_t b, std::size_t e, std::size_t) { gate_up(chunk, b, e); }});
    phases.push_back({chunk.routing.rows, 1,
                      [&](std::size_t b, std::size_t e, std::size_t t) { encode_activated(chunk, b, e, t); }});
    phases.push_back(
        {active * l.down.blocks, 1, [&](std::size_t b, std::size_t e, std::size_t) { down(chunk, b, e); }});
  }
  const bool combine_alone = tokens * l.hidden <= kSerialFloats;
  if (!combine_alone) {
    phases.push_back({tokens, 1, [&](std::size_t b, std::size_t e, std::size_t t) { combine(chunk, b, e, t); }});
  }
  session.run(phases);
  if (combine_alone) combine(chunk, 0, tokens, 0);
}

// Each token is encoded once and copied to the rows of all its slots, so that an expert's rows are contiguous.
void MoE::encode(const Chunk& c, std::size_t begin, std::size_t end, std::size_t thread) const {
  const LayerLayout& l = packed_->layout();
  for (std::size_t t = begin; t < end; ++t) {
    const std::int64_t* rows = c.routing.row_of_slot.data() + t * c.k;
    const void* x = at(c.args.x, (c.begin + t) * l.hidden * float_size(c.args.x_type));
    std::int64_t first = Routing::kNowhere;
    for (std::size_t s = 0; s < c.k; ++s) {
      if (rows[s] == Routing::kNowhere) continue;
      std::byte* row = c.rows_in + static_cast<std::size_t>(rows[s]) * c.in_bytes;
      if (first == Routing::kNowhere) {
        first = rows[s];
        gate_up_.encode_row(x, c.args.x_type, l.hidden, l.gate_up.k_padded, l.gate_up.traits, row, &c.scales_in[first],
                            c.work + thread * c.work_floats);
      } else {
        std::memcpy(row, c.rows_in + static_cast<std::size_t>(first) * c.in_bytes, c.in_bytes);
        c.scales_in[rows[s]] = c.scales_in[first];
      }
    }
  }
}

// Items are (group, block) pairs, blocks fastest; [begin, end) may span groups.
void MoE::gate_up(const Chunk& c, std::size_t begin, std::size_t end) const {
  const LayerLayout& l = packed_->layout();
  while (begin < end) {
    const Routing::Group& group = c.routing.groups[begin / l.gate_up.blocks];
    const std::size_t block = begin % l.gate_up.blocks;
    const std::size_t count = std::min(end - begin, l.gate_up.blocks - block);
    gate_up_.gate_up({.traits = &l.gate_up.traits,
                      .rows = c.rows_in + group.first * c.in_bytes,
                      .row_stride = c.in_bytes,
                      .row_scales = c.scales_in + group.first,
                      .m = group.count,
                      .blocks = packed_->data() + l.gate_up_offset(group.expert) + block * l.gate_up.block_bytes,
                      .block_bytes = l.gate_up.block_bytes,
                      .block_count = count,
                      .k_padded = l.gate_up.k_padded,
                      .has_bias = l.traits.biased,
                      .out = c.rows_activated + group.first * c.activated + block * l.activated_channels(),
                      .out_stride = c.activated},
                     gate_);
    begin += count;
  }
}

void MoE::encode_activated(const Chunk& c, std::size_t begin, std::size_t end, std::size_t thread) const {
  const LayerLayout& l = packed_->layout();
  for (std::size_t r = begin; r < end; ++r) {
    down_.encode_row(c.rows_activated + r * c.activated, DType::kF32, l.intermediate, l.down.k_padded, l.down.traits,
                     c.rows_inner + r * c.inner_bytes, &c.scales_inner[r], c.work + thread * c.work_floats);
  }
}

void MoE::down(const Chunk& c, std::size_t begin, std::size_t end) const {
  const LayerLayout& l = packed_->layout();
  while (begin < end) {
    const Routing::Group& group = c.routing.groups[begin / l.down.blocks];
    const std::size_t block = begin % l.down.blocks;
    const std::size_t count = std::min(end - begin, l.down.blocks - block);
    down_.down({.traits = &l.down.traits,
                .rows = c.rows_inner + group.first * c.inner_bytes,
                .row_stride = c.inner_bytes,
                .row_scales = c.scales_inner + group.first,
                .m = group.count,
                .blocks = packed_->data() + l.down_offset(group.expert) + block * l.down.block_bytes,
                .block_bytes = l.down.block_bytes,
                .block_count = count,
                .k_padded = l.down.k_padded,
                .has_bias = l.traits.biased,
                .out = c.rows_out + group.first * c.out + block * kBlockChannels,
                .out_stride = c.out});
    begin += count;
  }
}

void MoE::combine(const Chunk& c, std::size_t begin, std::size_t end, std::size_t thread) const {
  const LayerLayout& l = packed_->layout();
  const float** rows = c.slot_rows + thread * c.k;
  for (std::size_t t = begin; t < end; ++t) {
    const std::int64_t* row_of_slot = c.routing.row_of_slot.data() + t * c.k;
    for (std::size_t s = 0; s < c.k; ++s) {
      rows[s] =
          row_of_slot[s] == Routing::kNowhere ? nullptr : c.rows_out + static_cast<std::size_t>(row_of_slot[s]) * c.out;
    }
    table_.combine({.rows = rows,
                    .weights = c.routing.weights.data() + t * c.k,
                    .slots = c.k,
                    .n = l.hidden,
                    .y = at(c.args.y, (c.begin + t) * l.hidden * float_size(c.args.y_type)),
                    .dtype = c.args.y_type});
  }
}

void MoE::warm_up() const {
  const LayerLayout& l = packed_->layout();
  {
    Context::Session session(*context_);
    constexpr std::size_t kPage = 4096;
    std::atomic<unsigned> sum{0};  // read by nobody; keeps the reads from being removed
    const Phase touch{(l.bytes() + kPage - 1) / kPage, 256, [&](std::size_t b, std::size_t e, std::size_t) {
                        unsigned local = 0;
                        for (std::size_t page = b; page < e; ++page)
                          local += static_cast<unsigned>(packed_->data()[page * kPage]);
                        sum.fetch_add(local, std::memory_order_relaxed);
                      }};
    session.run({&touch, 1});
  }
  const std::vector<float> x(l.hidden, 0.0f), weights(top_k_, 0.0f);
  std::vector<float> y(l.hidden);
  std::vector<std::int64_t> ids(top_k_);
  for (std::size_t s = 0; s < top_k_; ++s) ids[s] = static_cast<std::int64_t>(s % l.experts);
  forward({1,
           top_k_,
           x.data(),
           DType::kF32,
           {ids.data(), IdType::kInt64, weights.data(), DType::kF32},
           y.data(),
           DType::kF32});
}

std::size_t MoE::scratch_bytes() const {
  Context::Session session(*context_);
  return session.scratch_bytes();
}

void MoE::fill_scratch(int byte) const {
  Context::Session session(*context_);
  const std::size_t bytes = session.scratch_bytes();
  std::memset(session.scratch(bytes), byte, bytes);
}

}  // namespace kt
