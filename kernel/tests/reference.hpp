// What the kernel must compute, written slowly and independently of it.
#pragma once

#include <cstdint>
#include <vector>

#include "layers.hpp"

namespace kt::check {

// The layer in float64.
std::vector<double> float64_moe(const Layer& layer, const Batch& batch);

// The layer in the BF16 format's terms: weights, inputs and activated values rounded to bf16, everything else float64.
std::vector<double> bf16_moe(const Layer& layer, const Batch& batch);

// The layer in the INT8 contract's terms, one scalar fp32 operation at a time in the contract's order: the bits that
// every tier must leave.
std::vector<float> int8_moe(const Layer& layer, const Batch& batch, bool rotate);

// One linear layer the same way: weights (N, inputs), biases (N) or none, x (rows, inputs).
std::vector<float> int8_linear(const std::vector<float>& weights, const std::vector<float>& biases,
                               const std::vector<float>& x, std::size_t inputs, bool rotate);

// Root mean square of the difference over that of `expected`; 0 when both are zero.
double relative_error(const std::vector<float>& got, const std::vector<double>& expected);

double activation_float64(const Gate& gate, double x);
// The activated value; without a gate `g` is not used.
double gate_float64(const Gate& gate, double g, double u);

// Largest power of two, at most 512, that divides a multiple of 64.
std::size_t hadamard_size(std::size_t k_padded);
// (-1)^(number of ones in i & j): the element of the unnormalised Hadamard matrix.
int hadamard(std::size_t i, std::size_t j);

// Numbers by definition: sign, exponent, mantissa.
double bf16_value(std::uint16_t bits);
double f16_value(std::uint16_t bits);
double e4m3_value(std::uint8_t code);
// Nearest, ties to even; infinities and NaN (quiet) too.
std::uint16_t nearest_bf16(float x);
std::uint16_t nearest_f16(float x);
// Numbers beyond 448, infinities too, become 448.
std::uint8_t nearest_e4m3(float x);

}  // namespace kt::check
