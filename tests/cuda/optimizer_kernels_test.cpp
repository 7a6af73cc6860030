// SPDX-License-Identifier: Apache-2.0
// The optimizer's kernels and those of eight-bit blocks at edge shapes, for compute-sanitizer. Values:
// tests/python/test_adamw_cuda.py.
#include "cuda/adamw.hpp"
#include "cuda/blockwise.hpp"
#include "cuda/gradient_norm.hpp"
#include "device_matrix.hpp"

using namespace kernels;
using namespace qlorapp;

namespace {

const std::vector<int64_t> kLengths{1, 3, 255, 256, 257, 1000, 70001};

Matrix line(int64_t n, int64_t offset, bool filled) { return {Float::kFloat32, 1, n, {offset, 0}, filled}; }

std::vector<uint8_t> kernel_codes(int64_t n) {
  std::vector<uint8_t> all(static_cast<size_t>(n));
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint8_t>(i * 37);
  return all;
}

}  // namespace

TEST_CASE("the norm of gradients and both AdamW kernels cover any length at any alignment, and a skipped step changes nothing",
          "[cuda]") {
  if (no_gpu()) return;
  cuda::DynamicMapTables tables;
  cuda::fill(tables);
  const Memory on_device(std::vector<cuda::DynamicMapTables>{tables});
  for (const int64_t n : kLengths) {
    for (const int64_t offset : {0, 1}) {
      CAPTURE(n, offset);
      const Matrix gradient = line(n, offset, true), parameter = line(n, offset, true), numbers_found = line(3, 0, false);
      const Memory workspace(cuda::kGradientNormWorkspace), inverse(std::vector<float>{0.25F});
      float* const found = numbers_found.as<float>();
      check(cuda::gradient_norm(gradient.as<float>(), n, inverse.at<float>(), 1.0F, workspace.at<void>(), found, found + 1,
                                found + 2, nullptr));
      const std::vector<float> zeros(static_cast<size_t>(n + offset));
      const Memory exp_avg(zeros), exp_avg_sq(zeros);
      const std::vector<float> scales(static_cast<size_t>((n + 255) / 256), 0.5F);
      const Memory state1(kernel_codes(n + offset)), state2(kernel_codes(n + offset)), absmax1(scales), absmax2(scales);
      for (const float skip : {0.0F, 1.0F}) {
        const Memory skips(std::vector<float>{skip});
        const std::vector<unsigned char> before = exp_avg.bytes();
        const cuda::AdamWStep step{0.9F, 0.1F, 0.999F, 0.001F, 0.5F, 1e-8F, -1e-3F, 0.99F, found + 2, skips.at<float>()};
        check(cuda::adamw(parameter.as<float>(), gradient.as<float>(), exp_avg.at<float>(4 * offset),
                          exp_avg_sq.at<float>(4 * offset), n, step, nullptr));
        check(cuda::adamw_8bit(parameter.as<float>(), gradient.as<float>(), state1.at<uint8_t>(offset), state2.at<uint8_t>(offset),
                               absmax1.at<float>(), absmax2.at<float>(), n, step, on_device.at<cuda::DynamicMapTables>(), nullptr));
        REQUIRE((exp_avg.bytes() == before) == (skip != 0));
      }
    }
  }
}

TEST_CASE("eight-bit blocks of any size cover any length", "[cuda]") {
  if (no_gpu()) return;
  for (const int64_t n : kLengths) {
    for (const int64_t block : {int64_t{1}, int64_t{7}, int64_t{256}, int64_t{4096}}) {
      for (const int64_t offset : {0, 1}) {
        CAPTURE(n, block, offset);
        const Matrix x = line(n, offset, true);
        const Memory made(n), absmax((n + block - 1) / block * 4), first_bad(std::vector<unsigned long long>{~0ULL});
        for (const bool is_signed : {true, false}) {
          for (const auto rounding : {cuda::DynamicCode::kNearest, cuda::DynamicCode::kBnbCuda}) {
            check(cuda::quantize_blockwise({x.as<float>(), n, block, is_signed, rounding, made.at<uint8_t>(), absmax.at<float>(),
                                            first_bad.at<unsigned long long>()},
                                           nullptr));
          }
          for (const Float type : types()) {
            const Matrix out(type, 1, n, {offset, 0}, false);
            check(cuda::dequantize_blockwise({made.at<uint8_t>(), absmax.at<float>(), n, block, is_signed, type, out.data()},
                                             nullptr));
            REQUIRE(out.wrote_only_its_rows());
          }
        }
      }
    }
  }
}
