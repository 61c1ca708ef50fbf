// The one binding file. Addresses and sizes come checked from kt_kernel.wrappers; what is checked here is what would be
// memory-unsafe.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "cpu/bandwidth.hpp"
#include "cpu/context.hpp"
#include "cpu/features.hpp"
#include "cpu/topology.hpp"
#include "error.hpp"
#include "gguf/decode.hpp"
#include "linear/linear.hpp"
#include "moe/moe.hpp"
#include "pack/packed_experts.hpp"
#include "tiers/registry.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace kt {
namespace {

using Address = std::uintptr_t;
using Strides = std::tuple<std::ptrdiff_t, std::ptrdiff_t>;

DType parse_dtype(const std::string& name) {
  if (name == "float32") return DType::kF32;
  if (name == "bfloat16") return DType::kBf16;
  if (name == "float16") return DType::kF16;
  throw Error("unknown dtype " + name + "; dtypes: float32, bfloat16, float16");
}

IdType parse_id_type(const std::string& name) {
  if (name == "int32") return IdType::kInt32;
  if (name == "int64") return IdType::kInt64;
  throw Error("unknown id dtype " + name + "; dtypes: int32, int64");
}

Activation parse_activation(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  if (name == "relu2") return Activation::kReluSquared;
  throw Error("unknown activation " + name + "; activations: silu, gelu, gelu_tanh, relu, relu2");
}

WeightView view(Address address, const Strides& strides, const std::string& dtype, Address bias) {
  return {reinterpret_cast<const void*>(address), parse_dtype(dtype), std::get<0>(strides), std::get<1>(strides),
          reinterpret_cast<const float*>(bias)};
}

// Values, scales and minimums (0: none), and the elements from one channel to the next of values and of the others.
using QuantizedPlace = std::tuple<Address, Address, Address, std::ptrdiff_t, std::ptrdiff_t>;

WeightView quantized_view(const QuantizedPlace& place, Address bias) {
  const auto& [values, scales, minimums, channel_stride, scale_stride] = place;
  if (scales == 0) throw Error("quantised weights need their scales");
  WeightView view;
  view.data = reinterpret_cast<const void*>(values);
  view.channel_stride = channel_stride;
  view.bias = reinterpret_cast<const float*>(bias);
  view.scales = reinterpret_cast<const float*>(scales);
  view.minimums = reinterpret_cast<const float*>(minimums);
  view.scale_stride = scale_stride;
  return view;
}

Fp8View fp8_view(Address codes, const Strides& strides, Address scales, std::ptrdiff_t scale_stride,
                 const std::tuple<std::size_t, std::size_t>& block, Address bias) {
  if (codes != 0 && scales == 0) throw Error("FP8 weights need their scales");
  return {.codes = reinterpret_cast<const std::uint8_t*>(codes),
          .channel_stride = std::get<0>(strides),
          .input_stride = std::get<1>(strides),
          .scales = reinterpret_cast<const float*>(scales),
          .scale_stride = scale_stride,
          .block_channels = std::get<0>(block),
          .block_inputs = std::get<1>(block),
          .bias = reinterpret_cast<const float*>(bias)};
}

void check_gate(const LayerTraits& traits, bool gate) {
  if (traits.gated != gate) throw Error("a gate comes with a layer that has one, and only then");
}

void check_biases(const LayerTraits& traits, bool gate, bool up, bool down) {
  if (traits.biased && ((traits.gated && !gate) || !up || !down))
    throw Error("a biased layer needs the biases of all its projections");
}

// A forward in flight. It keeps its MoE alive, and an abandoned one is waited for: the kernel still writes to the
// caller's memory.
class PendingForward {
 public:
  PendingForward(std::shared_ptr<MoE> moe, std::shared_ptr<Pending> pending)
      : moe_(std::move(moe)), pending_(std::move(pending)) {}
  PendingForward(PendingForward&&) = default;
  ~PendingForward() {
    if (!pending_ || pending_->done()) return;
    const py::gil_scoped_release unlocked;
    try {
      pending_->wait();
    } catch (...) {  // nobody is left to hear it
    }
  }
  void wait() { pending_->wait(); }
  bool done() const { return pending_->done(); }

 private:
  std::shared_ptr<MoE> moe_;
  std::shared_ptr<Pending> pending_;
};

ForwardArgs forward_args(std::size_t tokens, std::size_t k, Address x, const std::string& x_dtype, Address ids,
                         const std::string& ids_dtype, Address weights, const std::string& weights_dtype, Address out,
                         const std::string& out_dtype) {
  return {tokens,
          k,
          reinterpret_cast<const void*>(x),
          parse_dtype(x_dtype),
          {reinterpret_cast<const void*>(ids), parse_id_type(ids_dtype), reinterpret_cast<const void*>(weights),
           parse_dtype(weights_dtype)},
          reinterpret_cast<void*>(out),
          parse_dtype(out_dtype)};
}

void run_failing_job(Context& context, const std::string& message) {
  Context::Session session(context);
  // One item a thread, and each waits until all are taken, so that the last thread to start really takes part.
  std::atomic<std::size_t> taken{0};
  const std::size_t threads = context.threads();
  const Phase phase{threads, 1, [&](std::size_t begin, std::size_t end, std::size_t thread) {
                      taken.fetch_add(end - begin);
                      while (taken.load() < threads) std::this_thread::yield();
                      if (thread + 1 == threads) throw Error(message);
                    }};
  session.run({&phase, 1});
}

void bind_cpu(py::module_& m) {
  m.def("cpu_features", [] {
    py::dict features;
    for (const NamedFeature& feature : kCpuFeatures) features[feature.name] = cpu_features().*feature.member;
    return features;
  });
  m.def("cpu_name", &cpu_name);
  m.def("parse_cgroup_cpu_max", [](const std::string& text) { return parse_cpu_max(text); }, "text"_a);
  m.def(
      "parse_cgroup_v1_quota",
      [](const std::string& quota, const std::string& period) { return parse_cfs_quota(quota, period); }, "quota"_a,
      "period"_a);

  py::class_<Topology>(m, "Topology")
      .def_readonly("logical_cpus", &Topology::logical_cpus)
      .def_readonly("physical_cores", &Topology::physical_cores)
      .def_readonly("affinity", &Topology::affinity)
      .def_readonly("physical_in_affinity", &Topology::physical_in_affinity)
      .def_readonly("cgroup_quota", &Topology::cgroup_quota)
      .def_readonly("numa_nodes", &Topology::numa_nodes)
      .def_readonly("default_threads", &Topology::default_threads);
  m.def(
      "topology",
      [](const std::string& sysfs, const std::string& cgroup, const std::string& proc) {
        return read_topology({sysfs, cgroup, proc});
      },
      "sysfs"_a = "/sys", "cgroup"_a = "/sys/fs/cgroup", "proc"_a = "/proc");
}

struct TierInfo {
  std::string name;
  bool compiled;
  std::vector<std::string> missing_cpu;
  std::vector<std::string> missing_os;
  std::vector<std::string> formats;
};

void bind_tiers(py::module_& m) {
  py::class_<TierInfo>(m, "TierInfo")
      .def_readonly("name", &TierInfo::name)
      .def_readonly("compiled", &TierInfo::compiled)
      .def_readonly("missing_cpu", &TierInfo::missing_cpu)
      .def_readonly("missing_os", &TierInfo::missing_os)
      .def_readonly("formats", &TierInfo::formats);
  m.def("tiers", [] {
    std::vector<TierInfo> infos;
    for (const Tier& tier : all_tiers()) {
      infos.push_back({std::string(tier.name), tier.table != nullptr, missing(cpu_features(), tier.needs_cpu),
                       missing(cpu_features(), tier.needs_os),
                       tier.table == nullptr ? std::vector<std::string>{} : formats_of(*tier.table)});
    }
    return infos;
  });
}

void bind_context(py::module_& m) {
  py::class_<Context, std::shared_ptr<Context>>(m, "Context")
      .def(py::init<std::size_t>(), "threads"_a)
      .def_property_readonly("threads", &Context::threads)
      .def("read_bandwidth", &read_bandwidth, "bytes"_a, py::call_guard<py::gil_scoped_release>())
      .def("run_failing_job", &run_failing_job, "message"_a, py::call_guard<py::gil_scoped_release>());
}

std::string scales_name(DType dtype) {
  return dtype == DType::kF32 ? "float32" : dtype == DType::kBf16 ? "bfloat16" : "float16";
}

void bind_matrix_traits(py::module_& m) {
  py::class_<MatrixTraits>(m, "MatrixTraits")
      .def(py::init([](const std::string& format, std::size_t group, const std::string& levels, bool minimums,
                       const std::string& scales) {
             return MatrixTraits{.format = parse_format(format),
                                 .group = group,
                                 .levels = parse_levels(levels),
                                 .minimums = minimums,
                                 .scales = parse_dtype(scales)};
           }),
           "format"_a, "group"_a = 0, "levels"_a = "int4", "minimums"_a = false, "scales"_a = "float32")
      .def_property_readonly("format", [](const MatrixTraits& t) { return std::string(format_name(t.format)); })
      .def_readonly("group", &MatrixTraits::group)
      .def_property_readonly("levels", [](const MatrixTraits& t) { return std::string(levels_name(t.levels)); })
      .def_readonly("minimums", &MatrixTraits::minimums)
      .def_property_readonly("scales", [](const MatrixTraits& t) { return scales_name(t.scales); });
  m.def("default_traits", [](const std::string& format) { return default_traits(parse_format(format)); }, "format"_a);
}

void bind_packed_experts(py::module_& m) {
  py::class_<Fp8View>(m, "Fp8View")
      .def(py::init(&fp8_view), "codes"_a = 0, "strides"_a = Strides{0, 0}, "scales"_a = 0, "scale_stride"_a = 0,
           "block"_a = std::tuple<std::size_t, std::size_t>{1, 1}, "bias"_a = 0);
  py::class_<PackedExperts, std::shared_ptr<PackedExperts>>(m, "PackedExperts", py::buffer_protocol())
      .def(py::init([](std::size_t experts, std::size_t hidden, std::size_t intermediate, const MatrixTraits& gate_up,
                       const MatrixTraits& down, bool rotate, bool gated, bool biased) {
             return std::make_shared<PackedExperts>(LayerLayout(
                 gate_up, down, {.rotated = rotate, .gated = gated, .biased = biased}, experts, hidden, intermediate));
           }),
           "experts"_a, "hidden"_a, "intermediate"_a, "gate_up"_a, "down"_a, "rotate"_a, "gated"_a = true,
           "biased"_a = false)
      .def_static(
          "map",
          [](const std::string& path, std::size_t offset, std::size_t experts, std::size_t hidden,
             std::size_t intermediate, const MatrixTraits& gate_up, const MatrixTraits& down, bool rotate, bool gated,
             bool biased) {
            return std::make_shared<PackedExperts>(
                LayerLayout(gate_up, down, {.rotated = rotate, .gated = gated, .biased = biased}, experts, hidden,
                            intermediate),
                path, offset);
          },
          "path"_a, "offset"_a, "experts"_a, "hidden"_a, "intermediate"_a, "gate_up"_a, "down"_a, "rotate"_a,
          "gated"_a = true, "biased"_a = false)
      .def_property_readonly("mapped", &PackedExperts::mapped)
      .def_property_readonly("experts", [](const PackedExperts& p) { return p.layout().experts; })
      .def_property_readonly("hidden", [](const PackedExperts& p) { return p.layout().hidden; })
      .def_property_readonly("intermediate", [](const PackedExperts& p) { return p.layout().intermediate; })
      .def_property_readonly("gate_up", [](const PackedExperts& p) { return p.layout().gate_up.traits; })
      .def_property_readonly("down", [](const PackedExperts& p) { return p.layout().down.traits; })
      .def_property_readonly("rotated", [](const PackedExperts& p) { return p.layout().traits.rotated; })
      .def_property_readonly("gated", [](const PackedExperts& p) { return p.layout().traits.gated; })
      .def_property_readonly("biased", [](const PackedExperts& p) { return p.layout().traits.biased; })
      .def_property_readonly("nbytes", [](const PackedExperts& p) { return p.layout().bytes(); })
      .def_property_readonly("bytes_per_expert", [](const PackedExperts& p) { return p.layout().expert_bytes; })
      .def(
          "pack_expert",
          [](PackedExperts& packed, Context& context, const std::string& tier, std::size_t expert, Address gate,
             const Strides& gate_strides, Address up, const Strides& up_strides, Address down,
             const Strides& down_strides, const std::string& dtype, Address gate_bias, Address up_bias,
             Address down_bias) {
            check_biases(packed.layout().traits, gate_bias != 0, up_bias != 0, down_bias != 0);
            packed.pack(context, usable_table(tier), expert,
                        {view(gate, gate_strides, dtype, gate_bias), view(up, up_strides, dtype, up_bias),
                         view(down, down_strides, dtype, down_bias)});
          },
          "context"_a, "tier"_a, "expert"_a, "gate"_a, "gate_strides"_a, "up"_a, "up_strides"_a, "down"_a,
          "down_strides"_a, "dtype"_a, "gate_bias"_a = 0, "up_bias"_a = 0, "down_bias"_a = 0,
          py::call_guard<py::gil_scoped_release>())
      .def(
          "pack_quantized_expert",
          [](PackedExperts& packed, Context& context, std::size_t expert, const std::optional<QuantizedPlace>& gate,
             const QuantizedPlace& up, const QuantizedPlace& down, Address gate_bias, Address up_bias,
             Address down_bias) {
            const LayerTraits& traits = packed.layout().traits;
            check_gate(traits, gate.has_value());
            check_biases(traits, gate_bias != 0, up_bias != 0, down_bias != 0);
            packed.pack(context, usable_table("generic"), expert,
                        {gate ? quantized_view(*gate, gate_bias) : WeightView{}, quantized_view(up, up_bias),
                         quantized_view(down, down_bias)});
          },
          "context"_a, "expert"_a, "gate"_a, "up"_a, "down"_a, "gate_bias"_a = 0, "up_bias"_a = 0, "down_bias"_a = 0,
          py::call_guard<py::gil_scoped_release>())
      .def(
          "pack_fp8_expert",
          [](PackedExperts& packed, Context& context, std::size_t expert, const Fp8View& gate, const Fp8View& up,
             const Fp8View& down) {
            check_gate(packed.layout().traits, gate.codes != nullptr);
            check_biases(packed.layout().traits, gate.bias != nullptr, up.bias != nullptr, down.bias != nullptr);
            packed.pack(context, expert, {gate, up, down});
          },
          "context"_a, "expert"_a, "gate"_a, "up"_a, "down"_a, py::call_guard<py::gil_scoped_release>())
      .def(
          "load_expert",
          [](PackedExperts& packed, std::size_t expert, const py::buffer& data) {
            const py::buffer_info info = data.request();
            if (info.ndim != 1 || (info.size > 1 && info.strides[0] != info.itemsize)) {
              throw Error("packed bytes come in one contiguous, one-dimensional buffer");
            }
            const std::span<const std::byte> bytes(static_cast<const std::byte*>(info.ptr),
                                                   static_cast<std::size_t>(info.size * info.itemsize));
            const py::gil_scoped_release unlocked;
            packed.load(expert, bytes);
          },
          "expert"_a, "data"_a)
      .def(
          "unpack_expert",
          [](const PackedExperts& packed, std::size_t expert, Address gate, Address up, Address down) {
            packed.unpack(usable_table("generic"), expert, reinterpret_cast<float*>(gate), reinterpret_cast<float*>(up),
                          reinterpret_cast<float*>(down));
          },
          "expert"_a, "gate"_a, "up"_a, "down"_a, py::call_guard<py::gil_scoped_release>())
      .def("bytes",
           [](py::object self) {
             const auto& packed = self.cast<const PackedExperts&>();
             return py::memoryview(self).attr("cast")("B").attr("__getitem__")(
                 py::slice(0, static_cast<py::ssize_t>(packed.layout().bytes()), 1));
           })
      .def_buffer([](PackedExperts& packed) {
        return py::buffer_info(reinterpret_cast<const std::uint8_t*>(packed.data()),
                               static_cast<py::ssize_t>(packed.layout().bytes()), true);
      });
}

void bind_moe(py::module_& m) {
  py::class_<PendingForward>(m, "Pending")
      .def("wait", &PendingForward::wait, py::call_guard<py::gil_scoped_release>())
      .def("done", &PendingForward::done);

  py::class_<Gate>(m, "Gate").def(
      py::init(
          [](const std::string& activation, bool gated, float alpha, float limit, bool limit_after, float up_offset) {
            return Gate{parse_activation(activation), gated, alpha, limit, limit_after, up_offset};
          }),
      "activation"_a = "silu", "gated"_a = true, "alpha"_a = 1.0f, "limit"_a = 0.0f, "limit_after"_a = false,
      "up_offset"_a = 0.0f);

  py::class_<MoE, std::shared_ptr<MoE>>(m, "MoE")
      .def(py::init([](std::shared_ptr<Context> context, std::shared_ptr<PackedExperts> packed, const std::string& tier,
                       const Gate& gate, std::size_t top_k, std::size_t max_tokens) {
             return std::make_shared<MoE>(std::move(context), std::move(packed), usable_table(tier), gate, top_k,
                                          max_tokens);
           }),
           "context"_a, "packed"_a, "tier"_a, "gate"_a, "top_k"_a, "max_tokens"_a)
      .def(
          "forward",
          [](MoE& moe, std::size_t tokens, std::size_t k, Address x, const std::string& x_dtype, Address ids,
             const std::string& ids_dtype, Address weights, const std::string& weights_dtype, Address out,
             const std::string& out_dtype) {
            moe.forward(forward_args(tokens, k, x, x_dtype, ids, ids_dtype, weights, weights_dtype, out, out_dtype));
          },
          "tokens"_a, "k"_a, "x"_a, "x_dtype"_a, "ids"_a, "ids_dtype"_a, "weights"_a, "weights_dtype"_a, "out"_a,
          "out_dtype"_a, py::call_guard<py::gil_scoped_release>())
      .def(
          "submit",
          [](const std::shared_ptr<MoE>& moe, std::size_t tokens, std::size_t k, Address x, const std::string& x_dtype,
             Address ids, const std::string& ids_dtype, Address weights, const std::string& weights_dtype, Address out,
             const std::string& out_dtype) {
            return PendingForward(moe, moe->submit(forward_args(tokens, k, x, x_dtype, ids, ids_dtype, weights,
                                                                weights_dtype, out, out_dtype)));
          },
          "tokens"_a, "k"_a, "x"_a, "x_dtype"_a, "ids"_a, "ids_dtype"_a, "weights"_a, "weights_dtype"_a, "out"_a,
          "out_dtype"_a)
      .def("warm_up", &MoE::warm_up, py::call_guard<py::gil_scoped_release>())
      .def("scratch_bytes", &MoE::scratch_bytes, py::call_guard<py::gil_scoped_release>())
      .def("fill_scratch", &MoE::fill_scratch, "byte"_a, py::call_guard<py::gil_scoped_release>());
}

// Checked: a number of bytes that holds whole blocks.
std::size_t whole_blocks(const BlockType& type, std::size_t bytes) {
  if (bytes % type.bytes != 0)
    throw Error(std::to_string(bytes) + " bytes are no whole blocks of " + std::string(type.name));
  return bytes / type.bytes;
}

void bind_gguf(py::module_& m) {
  py::class_<BlockType>(m, "BlockType")
      .def_property_readonly("name", [](const BlockType& t) { return std::string(t.name); })
      .def_readonly("weights", &BlockType::weights)
      .def_readonly("bytes", &BlockType::bytes)
      .def_readonly("group", &BlockType::group)
      .def_property_readonly("levels", [](const BlockType& t) { return std::string(t.levels); })
      .def_readonly("has_minimum", &BlockType::has_minimum);
  m.def("block_types", [] { return std::vector<BlockType>(block_types().begin(), block_types().end()); });
  m.def(
      "unpack_blocks",
      [](Context& context, const std::string& type_name, Address source, std::size_t bytes, Address values,
         Address scales, Address minimums) {
        const BlockType& type = block_type(type_name);
        unpack_blocks(context, type, reinterpret_cast<const std::uint8_t*>(source), whole_blocks(type, bytes),
                      {reinterpret_cast<std::int8_t*>(values), reinterpret_cast<float*>(scales),
                       reinterpret_cast<float*>(minimums)});
      },
      "context"_a, "type"_a, "source"_a, "bytes"_a, "values"_a, "scales"_a, "minimums"_a,
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "dequantize_blocks",
      [](Context& context, const std::string& type_name, Address source, std::size_t bytes, Address out,
         const std::string& dtype) {
        const BlockType& type = block_type(type_name);
        const auto* blocks = reinterpret_cast<const std::uint8_t*>(source);
        switch (parse_dtype(dtype)) {
          case DType::kF32:
            return dequantize_blocks(context, type, blocks, whole_blocks(type, bytes), reinterpret_cast<float*>(out));
          case DType::kBf16:
            return dequantize_blocks(context, type, blocks, whole_blocks(type, bytes),
                                     reinterpret_cast<std::uint16_t*>(out));
          case DType::kF16:
            throw Error("blocks are decoded to float32 or bfloat16, not float16");
        }
      },
      "context"_a, "type"_a, "source"_a, "bytes"_a, "out"_a, "dtype"_a, py::call_guard<py::gil_scoped_release>());
}

void bind_linear(py::module_& m) {
  py::class_<PackedMatrix, std::shared_ptr<PackedMatrix>>(m, "PackedMatrix")
      .def(py::init([](std::size_t channels, std::size_t inputs, const MatrixTraits& traits, bool rotate, bool biased) {
             return std::make_shared<PackedMatrix>(traits, rotate, biased, channels, inputs);
           }),
           "channels"_a, "inputs"_a, "traits"_a, "rotate"_a, "biased"_a = false)
      .def_property_readonly("channels", &PackedMatrix::channels)
      .def_property_readonly("inputs", [](const PackedMatrix& p) { return p.layout().inputs; })
      .def_property_readonly("traits", [](const PackedMatrix& p) { return p.layout().traits; })
      .def_property_readonly("rotated", [](const PackedMatrix& p) { return p.layout().traits.rotation != 0; })
      .def_property_readonly("biased", &PackedMatrix::biased)
      .def_property_readonly("nbytes", [](const PackedMatrix& p) { return p.layout().bytes(); })
      .def(
          "pack",
          [](PackedMatrix& packed, Context& context, const std::string& tier, Address weight, const Strides& strides,
             const std::string& dtype,
             Address bias) { packed.pack(context, usable_table(tier), view(weight, strides, dtype, bias), "linear"); },
          "context"_a, "tier"_a, "weight"_a, "strides"_a, "dtype"_a, "bias"_a = 0,
          py::call_guard<py::gil_scoped_release>())
      .def(
          "unpack",
          [](const PackedMatrix& packed, Address weights) {
            packed.unpack(usable_table("generic"), reinterpret_cast<float*>(weights));
          },
          "weights"_a, py::call_guard<py::gil_scoped_release>());

  py::class_<Linear, std::shared_ptr<Linear>>(m, "Linear")
      .def(
          py::init([](std::shared_ptr<Context> context, std::shared_ptr<PackedMatrix> packed, const std::string& tier) {
            return std::make_shared<Linear>(std::move(context), std::move(packed), usable_table(tier));
          }),
          "context"_a, "packed"_a, "tier"_a)
      .def(
          "forward",
          [](const Linear& linear, std::size_t rows, Address x, const std::string& x_dtype, Address out,
             const std::string& out_dtype) {
            linear.forward({rows, reinterpret_cast<const void*>(x), parse_dtype(x_dtype), reinterpret_cast<void*>(out),
                            parse_dtype(out_dtype)});
          },
          "rows"_a, "x"_a, "x_dtype"_a, "out"_a, "out_dtype"_a, py::call_guard<py::gil_scoped_release>());
}

void bind_errors(py::module_& m) {
  static py::exception<Error> error(m, "KernelError");
  static py::exception<ForkError> fork_error(m, "ForkError", error.ptr());
  static py::exception<WeightsValueError> weights_error(m, "WeightsValueError", error.ptr());
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const WeightsValueError& e) {
      py::set_error(weights_error, e.what());
    } catch (const ForkError& e) {
      py::set_error(fork_error, e.what());
    } catch (const Error& e) {
      py::set_error(error, e.what());
    }
  });
}

}  // namespace
}  // namespace kt

PYBIND11_MODULE(_ext, m) {
  m.doc() = "The C++ library of kt_kernel; see _ext.pyi.";
  m.attr("__version__") = KT_VERSION;
  m.attr("LAYOUT_VERSION") = kt::kLayoutVersion;
  kt::bind_errors(m);
  kt::bind_cpu(m);
  kt::bind_tiers(m);
  kt::bind_context(m);
  kt::bind_matrix_traits(m);
  kt::bind_packed_experts(m);
  kt::bind_moe(m);
  kt::bind_gguf(m);
  kt::bind_linear(m);
}
