// SPDX-License-Identifier: Apache-2.0
#include "quant/piece_quantizer.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <string>

#include "catch.hpp"
#include "core/check.hpp"

using namespace qlorapp;

namespace {

bool same(const QuantizedTensor& a, const QuantizedTensor& b) {
  const auto equal = [](const at::Tensor& x, const at::Tensor& y) {
    return x.defined() == y.defined() && (!x.defined() || (x.scalar_type() == y.scalar_type() && at::equal(x, y)));
  };
  return equal(a.packed, b.packed) && equal(a.absmax, b.absmax) && equal(a.nested_absmax, b.nested_absmax) &&
         equal(a.nested_offset, b.nested_offset) && a.shape == b.shape && a.dtype == b.dtype && a.block_size == b.block_size &&
         a.nested_block_size == b.nested_block_size && a.quant_type == b.quant_type;
}

QuantizedTensor in_pieces(const Quantizer& quantizer, const at::Tensor& weight, int64_t step, bool backwards) {
  PieceQuantizer pieces(quantizer, weight.sizes().vec(), weight.scalar_type());
  const at::Tensor flat = weight.flatten();
  std::vector<int64_t> starts;
  for (int64_t at = 0; at < flat.numel(); at += step) starts.push_back(at);
  if (backwards) std::reverse(starts.begin(), starts.end());
  for (const int64_t at : starts) {
    at::Tensor buffer = flat.narrow(0, at, std::min(step, flat.numel() - at)).clone();
    pieces.take(at, buffer);
    buffer.fill_(77);  // it is used again
  }
  return pieces.finish();
}

}  // namespace

TEST_CASE("pieces give the very codes and scales of the whole", "[quant][cpu]") {
  at::manual_seed(1);
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const bool double_quant : {true, false}) {
      for (const Compat compat : {Compat::kNone, Compat::kBnb}) {
        Quantizer::Options options;
        options.block_size = 128;
        options.double_quant = double_quant;
        options.compat = compat;
        options.quant_type = double_quant ? QuantType::kNf4 : QuantType::kFp4;
        const Quantizer quantizer(options);
        at::Tensor weight = at::randn({37, 1001}).mul_(0.02).to(dtype);  // ends inside a block and inside a byte
        weight[5].zero_();
        weight[36].zero_();
        const QuantizedTensor whole = quantizer.quantize(weight);
        for (const int64_t step : {128, 1280, 36'992, 1 << 20}) {
          REQUIRE(same(in_pieces(quantizer, weight, step, false), whole));
          REQUIRE(same(in_pieces(quantizer, weight, step, true), whole));
        }
      }
    }
  }
}

TEST_CASE("what is not finite is named by its place in the whole weight", "[quant][cpu]") {
  at::Tensor weight = at::randn({64, 64});
  weight[50][3] = std::numeric_limits<float>::infinity();
  const std::string where = message("at flat index {}.", 50 * 64 + 3);
  for (const int64_t step : {64, 1024, 4096}) {
    std::string message = "nothing";
    try {
      (void)in_pieces(Quantizer(), weight, step, false);
    } catch (const ValueError& error) { message = error.what(); }
    REQUIRE(message.find(where) != std::string::npos);
    REQUIRE(message.find("got inf") != std::string::npos);
  }
}

TEST_CASE("pieces that are no whole blocks of the weight are refused", "[quant][cpu]") {
  PieceQuantizer pieces(Quantizer(), {10, 64}, at::kFloat);
  REQUIRE_THROWS_AS(pieces.take(32, at::zeros({64})), ValueError);
  REQUIRE_THROWS_AS(pieces.take(0, at::zeros({65})), ValueError);
  REQUIRE_THROWS_AS(pieces.take(576, at::zeros({128})), ValueError);
  REQUIRE_THROWS_AS(pieces.finish(), ValueError);
}
