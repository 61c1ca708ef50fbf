// Where tiles are refused until the process has asked for them: what the kernel sees before, that asking is enough, and
// that threads and children made before and after it compute the same bits. The tests run in their order.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <vector>

#include "check.hpp"
#include "cpu/features.hpp"
#include "error.hpp"
#include "layers.hpp"
#include "tiers/registry.hpp"

namespace {

using kt::check::Batch;
using kt::check::Kernel;
using kt::check::Layer;

bool succeeds(const std::function<bool()>& work) {
  try {
    return work();
  } catch (...) {
    return false;
  }
}

// Wait status of a child that does `work`: 0 when it returned true.
int in_child(const std::function<bool()>& work) {
  const pid_t child = fork();
  if (child == 0) _exit(succeeds(work) ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

bool use_a_tile() {
  alignas(64) unsigned char config[64] = {1};  // palette 1
  config[16] = 64;                             // bytes a row of tile 0
  config[48] = 16;                             // its rows
  __asm__ volatile("ldtilecfg %0\n\ttilezero %%tmm0\n\ttilerelease" : : "m"(config));
  return true;
}

const Layer& layer() {
  static const Layer made = kt::check::make_layer({3, 200, 130});
  return made;
}

Batch batch() {
  return kt::check::make_batch(layer().shape, 60, 2);
}

std::vector<float> outputs(const char* tier, kt::Format format, std::size_t threads) {
  return Kernel(layer(), format, kt::usable_table(tier), {threads, 64})(batch());
}

bool int8_is_generic(const char* tier, std::size_t threads) {
  return kt::check::same_bits(outputs(tier, kt::Format::kInt8, threads), outputs("generic", kt::Format::kInt8, 1));
}

}  // namespace

TEST("permission: a tile instruction before the request is an illegal one") {
  const int status = in_child(use_a_tile);
  CHECK(WIFSIGNALED(status));
  CHECK_EQ(WTERMSIG(status), SIGILL);
}

TEST("permission: a CPU with tiles whose XCR0 lacks them has no amx tier, says so, and runs the next one") {
  // In a child, since what cpu_features() finds is kept.
  CHECK_EQ(in_child([] {
             if (!kt::cpu_features().amx_tile || kt::cpu_features().os_amx) return false;
             try {
               kt::usable_table("amx");
             } catch (const kt::Error& error) {
               return std::string(error.what()).find("os_amx") != std::string::npos &&
                      int8_is_generic("avx512_bf16", 1);
             }
             return false;
           }),
           0);
}

TEST("permission: threads made before the request use tiles after it") {
  const kt::Phase phase = {30, 1, [](std::size_t, std::size_t, std::size_t) {}};
  kt::Context::Session(*kt::check::context(3)).run({&phase, 1});
  CHECK(kt::request_tile_permission());
  CHECK(kt::cpu_features().os_amx);
  CHECK(int8_is_generic("amx", 3));
}

TEST("permission: threads made after the request, and any number of them") {
  for (const std::size_t threads : {1, 2, 5}) CHECK(int8_is_generic("amx", threads));
  const std::vector<float> bf16 = outputs("amx", kt::Format::kBf16, 1);
  CHECK_SAME_BITS(outputs("amx", kt::Format::kBf16, 5), bf16, layer().shape.hidden);
}

TEST("permission: a second request changes nothing") {
  CHECK(kt::request_tile_permission());
  CHECK(int8_is_generic("amx", 2));
}

TEST("permission: children have it too, and the parent keeps it") {
  CHECK_EQ(in_child([] { return int8_is_generic("amx", 2); }), 0);
  CHECK(int8_is_generic("amx", 2));
}

TEST("permission: an exception between two forwards leaves tiles usable") {
  Kernel kernel(layer(), kt::Format::kInt8, kt::usable_table("amx"), {2, 64});
  const std::vector<float> before = kernel(batch());
  std::vector<float> y;
  const Batch wrong = batch();
  kt::ForwardArgs args = kt::check::arguments(wrong, y);
  try {
    const kt::Phase failing = {4, 1, [](std::size_t, std::size_t, std::size_t) { throw kt::Error("in a work item"); }};
    kt::Context::Session(*kt::check::context(2)).run({&failing, 1});
  } catch (const kt::Error&) {
  }
  kernel.moe().forward(args);
  CHECK_SAME_BITS(y, before, layer().shape.hidden);
}

int main(int argc, char** argv) {
  return kt::check::run(argc, argv);
}
