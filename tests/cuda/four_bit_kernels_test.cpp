// SPDX-License-Identifier: Apache-2.0
// Four-bit kernels at edge shapes, for compute-sanitizer. Values: tests/python/test_four_bit_rule.py.
#include "cuda/dequantize_4bit.hpp"
#include "cuda/dequantize_blocks.hpp"
#include "cuda/float8.hpp"
#include "cuda/gemm_4bit.hpp"
#include "cuda/lora_augment.hpp"
#include "cuda/quantize_4bit.hpp"
#include "device_matrix.hpp"

using namespace kernels;
using namespace qlorapp;

namespace {

/// (rows, columns) in four bits, with scales or with codes of scales.
struct Weight {
  Memory packed, absmax, nested_absmax, nested_offset;
  cuda::FourBitSegment segment;

  Weight(int64_t rows, int64_t columns, int64_t block, bool nested)
      : packed(codes((rows * columns + 1) / 2)),
        absmax(nested ? Memory(codes((rows * columns + block - 1) / block))
                      : Memory(numbers(Float::kFloat32, (rows * columns + block - 1) / block))),
        nested_absmax(numbers(Float::kFloat32, ((rows * columns + block - 1) / block + 255) / 256)),
        nested_offset(std::vector<float>{0.5F}) {
    segment.packed = packed.at<uint8_t>();
    segment.absmax = absmax.at<void>();
    segment.nested_absmax = nested ? nested_absmax.at<float>() : nullptr;
    segment.nested_offset = nested ? nested_offset.at<float>() : nullptr;
    segment.rows = rows;
  }
};

}  // namespace

TEST_CASE("quantization to four bits covers any length at any alignment", "[cuda]") {
  if (no_gpu()) return;
  for (const Float type : types()) {
    for (const int64_t block : {int64_t{32}, int64_t{64}, int64_t{512}, int64_t{4096}}) {
      for (const int64_t n : {int64_t{1}, block - 1, block, block + 1, int64_t{4096}, int64_t{9001}}) {
        for (const int64_t offset : {0, 1}) {
          CAPTURE(static_cast<int>(type), block, n, offset);
          const Matrix weight(type, 1, n, {offset, 0}, true);
          const Memory packed((n + 1) / 2 + offset), absmax((n + block - 1) / block * 4),
              first_bad(std::vector<unsigned long long>{~0ULL});
          for (const auto rounding : {cuda::FourBitRounding::kExact, cuda::FourBitRounding::kBnbCuda}) {
            for (const auto quant_type : {QuantType::kNf4, QuantType::kFp4}) {
              check(cuda::quantize_4bit({weight.data(), n, type, block, quant_type, rounding, packed.at<uint8_t>(offset),
                                         absmax.at<float>(), first_bad.at<unsigned long long>()},
                                        nullptr));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("blocks of a GGUF file fill their rows and nothing else", "[cuda]") {
  if (no_gpu()) return;
  for (const Float type : types()) {
    for (size_t kind = 0; kind < kBlockLayouts.size(); ++kind) {
      const auto quant_type = static_cast<QuantType>(static_cast<size_t>(QuantType::kQ4_0) + kind);
      const int64_t elements = kBlockLayouts[kind].elements;
      for (const int64_t columns : {elements, 9 * elements}) {
        for (const int64_t offset : {0, 1}) {
          CAPTURE(static_cast<int>(type), kind, columns, offset);
          const int64_t row_bytes = packed_bytes(quant_type, columns);
          const Memory first(std::vector<uint8_t>(static_cast<size_t>(3 * row_bytes), 1)),
              second(std::vector<uint8_t>(static_cast<size_t>(2 * row_bytes), 2));
          cuda::DequantizeFourBit work;
          work.columns = columns;
          work.block_size = elements;
          work.quant_type = quant_type;
          work.type = type;
          work.segments[0] = {first.at<uint8_t>(), nullptr, nullptr, nullptr, 3, 0};
          work.segments[1] = {second.at<uint8_t>(), nullptr, nullptr, nullptr, 2, 3};
          work.segment_count = 2;
          const Matrix out(type, 5, columns, {offset, 0}, false);
          work.out = out.data();
          work.row_stride = out.stride();
          check(cuda::dequantize_blocks(work, nullptr));
          REQUIRE(out.wrote_only_its_rows());
        }
      }
    }
  }
}

TEST_CASE("a stack of weights and the adapters around it fill the workspace and nothing else", "[cuda]") {
  if (no_gpu()) return;
  struct Shape {
    std::vector<int64_t> rows, ranks;
    int64_t columns;
  };
  const std::vector<Shape> shapes{{{1}, {1}, 64}, {{5, 40, 1}, {16, 0, 17}, 352}, {{3, 5}, {1, 2}, 7}, {{65}, {8}, 2056}};
  for (const Float type : types()) {
    for (const Shape& shape : shapes) {
      for (const int64_t block : {int64_t{32}, int64_t{64}, int64_t{4096}}) {
        for (const bool nested : {false, true}) {
          for (const int64_t spare : {0, 64, 37}) {
            for (const int64_t offset : {0, 1}) {
              CAPTURE(static_cast<int>(type), shape.columns, block, nested, spare, offset);
              std::vector<Weight> weights;
              std::vector<Memory> factors;
              cuda::DequantizeFourBit work;
              work.columns = shape.columns;
              work.block_size = block;
              work.type = type;
              int64_t height = 0;
              int rank = 0;
              for (size_t i = 0; i < shape.rows.size(); ++i) {
                weights.emplace_back(shape.rows[i], shape.columns, block, nested);
                work.segments[i] = weights.back().segment;
                work.segments[i].first_row = height;
                factors.emplace_back(numbers(Float::kFloat32, shape.ranks[i] * shape.columns));
                factors.emplace_back(numbers(Float::kFloat32, shape.ranks[i] * shape.rows[i]));
                work.borders.projections[i] = {
                    factors[2 * i].at<float>(),       factors[2 * i + 1].at<float>(), 0.5F, static_cast<int>(shape.rows[i]),
                    static_cast<int>(shape.ranks[i]), static_cast<int>(height),       rank};
                height += shape.rows[i];
                rank += static_cast<int>(shape.ranks[i]);
              }
              work.segment_count = static_cast<int>(weights.size());
              work.borders.out = static_cast<int>(height);
              work.borders.in = static_cast<int>(shape.columns);
              work.borders.spare = static_cast<int>(spare);
              const Matrix plain(type, height, shape.columns, {offset, spare}, false);
              work.out = plain.data();
              work.row_stride = work.borders.row_stride = plain.stride();
              check(cuda::dequantize_4bit(work, nullptr));
              REQUIRE(plain.wrote_only_its_rows());
              if (spare == 0) continue;
              const Matrix together(type, height + spare, shape.columns + spare, {offset, 0}, false);
              work.out = together.data();
              work.borders.count = work.segment_count;
              check(cuda::dequantize_4bit(work, nullptr));
              REQUIRE(together.wrote_only_its_rows());
              check(cuda::lora_augment(work.out, type, work.borders, nullptr));
              REQUIRE(together.wrote_only_its_rows());
              const Matrix right(type, height, spare, {offset, 3}, false), below(type, spare, shape.columns, {offset, 5}, false);
              check(
                  cuda::lora_borders({right.data(), right.stride()}, {below.data(), below.stride()}, type, work.borders, nullptr));
              REQUIRE(right.wrote_only_its_rows());
              REQUIRE(below.wrote_only_its_rows());
            }
          }
        }
      }
    }
  }
}

TEST_CASE("weights in eight bits fill the stack or its transpose, at any number of tiles", "[cuda]") {
  if (no_gpu()) return;
  struct Shape {
    std::vector<int64_t> rows;
    int64_t columns;
  };
  const std::vector<Shape> shapes{{{64}, 64}, {{128}, 128}, {{64, 192}, 320}, {{320, 64, 64}, 192}};
  const Memory scale(std::vector<float>{0.01F});
  for (const Shape& shape : shapes) {
    for (const int64_t block : {int64_t{32}, int64_t{64}}) {
      for (const bool nested : {false, true}) {
        for (const bool transpose : {false, true}) {
          CAPTURE(shape.columns, block, nested, transpose);
          std::vector<Weight> weights;
          cuda::DequantizeToFloat8 work;
          work.columns = shape.columns;
          work.block_size = block;
          work.weight_scale = scale.at<float>();
          work.transpose = transpose;
          for (size_t i = 0; i < shape.rows.size(); ++i) {
            weights.emplace_back(shape.rows[i], shape.columns, block, nested);
            work.segments[i] = weights.back().segment;
            work.segments[i].first_row = work.rows;
            work.rows += shape.rows[i];
          }
          work.segment_count = static_cast<int>(weights.size());
          const Memory out(work.rows * shape.columns);
          work.out = out.at<void>();
          check(cuda::dequantize_to_float8(work, nullptr));
        }
      }
    }
  }
}

TEST_CASE("rows in eight bits are read and written once, at any width and alignment", "[cuda]") {
  if (no_gpu()) return;
  const Memory factor(std::vector<float>{0.5F});
  for (const Float type : types()) {
    for (const int64_t width : {16, 176, 2048, 4112, 14336, 32768}) {
      for (const Layout& layout : layouts()) {
        CAPTURE(static_cast<int>(type), width, layout.offset, layout.spare);
        const Matrix x(type, 3, width, layout, true);
        const Memory values(3 * width), scale(3 * 4);
        check(
            cuda::quantize_rows_to_float8({x.data(), type, 3, width, x.stride(), layout.offset == 0 ? factor.at<float>() : nullptr,
                                           values.at<void>(), scale.at<float>()},
                                          nullptr));
      }
    }
  }
}

TEST_CASE("products with few rows read the weights and write y, and nothing else", "[cuda]") {
  if (no_gpu()) return;
  const int arch = cuda::code_architecture();
  REQUIRE(arch >= 75);
  int64_t taken = 0;
  std::vector<std::pair<int64_t, int64_t>> shapes;
  for (const int64_t n : {1, 8, 64, 200, 1000}) {
    for (const int64_t k : {64, 256, 512, 1088, 4096}) shapes.emplace_back(n, k);
  }
  // Beyond the borders of launch_tokens(), so that every kernel is met.
  for (const int64_t n : {2200, 8256, 9664, 16100}) shapes.emplace_back(n, 64);
  shapes.emplace_back(4096, 8192);
  for (const Float type : {Float::kFloat16, Float::kBFloat16}) {
    for (const int64_t m : {1, 2, 5, 8, 16, 17, 33, 64}) {
      for (const auto& [n, k] : shapes) {
        for (const int64_t block : {32, 64, 4096}) {
          if (!cuda::prefers_gemm_4bit(m, n, k, block, type, arch)) continue;
          for (const bool nested : {false, true}) {
            CAPTURE(static_cast<int>(type), m, n, k, block, nested);
            const Weight weight(n, k, block, nested);
            const Matrix x(type, m, k, {0, 64}, true), y(type, m, n, {0, 5}, false);
            for (const bool accumulate : {false, true}) {
              check(cuda::gemm_4bit(
                  {x.data(), x.stride(), y.data(), y.stride(), type, m, n, k, weight.segment.packed, weight.segment.absmax,
                   weight.segment.nested_absmax, weight.segment.nested_offset, block, 256, QuantType::kNf4, accumulate},
                  nullptr));
            }
            REQUIRE(y.wrote_only_its_rows());
            ++taken;
          }
        }
      }
    }
  }
  REQUIRE(taken > 0);
}
