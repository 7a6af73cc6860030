// SPDX-License-Identifier: Apache-2.0
// Kernels of passes with one token a row: at the edges of rows, heads, keys and tiles.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "cuda/decode_attention.hpp"
#include "cuda/gemm_4bit.hpp"
#include "cuda/gemm_4bit_group.hpp"
#include "cuda/sampling.hpp"
#include "device_matrix.hpp"

using namespace kernels;
using namespace qlorapp;

namespace {

/// Attention in double precision, of two rows.
struct Attended {
  int64_t heads, kv_heads, dim, window;
  double scale;

  struct Result {
    std::vector<double> out, size;  ///< Σ p·v, and Σ p·|v|.
  };
  /// @param slot_of  (row, key) of a key of a row.
  template <class Slot>
  [[nodiscard]] Result operator()(const Matrix& q, const Matrix& k, const Matrix& v, const std::vector<int64_t>& lengths,
                                  const Slot& slot_of) const {
    const std::vector<double> queries = q.values(), keys = k.values(), values = v.values();
    const auto elements = static_cast<size_t>(2 * heads * dim);
    Result result{std::vector<double>(elements, 0.0), std::vector<double>(elements, 0.0)};
    for (int64_t row = 0; row < 2; ++row) {
      const int64_t length = lengths[static_cast<size_t>(row)], from = window > 0 ? std::max<int64_t>(0, length - window) : 0;
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t kv_head = head / (heads / kv_heads);
        const auto of_key = [&](const Matrix& from_matrix, const std::vector<double>& all, int64_t key) {
          return all.data() + slot_of(row, key) * from_matrix.stride() + kv_head * dim;
        };
        const double* const own_q = queries.data() + row * q.stride() + head * dim;
        std::vector<double> weights;
        for (int64_t key = from; key < length; ++key)
          weights.push_back(std::exp(scale * std::inner_product(own_q, own_q + dim, of_key(k, keys, key), 0.0)));
        const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
        const int64_t place = (row * heads + head) * dim;
        for (int64_t key = from; key < length; ++key) {
          for (int64_t i = 0; i < dim; ++i) {
            const double part = weights[static_cast<size_t>(key - from)] / total * of_key(v, values, key)[i];
            result.out[static_cast<size_t>(place + i)] += part, result.size[static_cast<size_t>(place + i)] += std::abs(part);
          }
        }
      }
    }
    return result;
  }
};

/// Of all elements together. Probabilities and the result are rounded once each.
double error_of(const std::vector<double>& found, const Attended::Result& exact) {
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < found.size(); ++i) error += std::pow(found[i] - exact.out[i], 2), size += std::pow(exact.size[i], 2);
  return std::sqrt(error / size);
}

}  // namespace

TEST_CASE("keys of a row are divided into parts that there are kernels for", "[cuda]") {
  for (const int64_t dim : {8, 64, 128, 256}) {
    for (const int64_t rows : {1, 9, 32, 128, 5000}) {
      for (const auto& [heads, kv_heads] : std::vector<std::array<int64_t, 2>>{{1, 1}, {32, 8}, {40, 1}}) {
        for (const int64_t longest : {0, 1, 15, 300, 2048, 1'000'000}) {
          CAPTURE(dim, rows, heads, kv_heads, longest);
          cuda::DecodeAttention work{};
          work.rows = rows, work.heads = heads, work.kv_heads = kv_heads, work.head_dim = dim;
          cuda::divide_keys(work, longest, 132);
          CHECK(work.splits >= 1);
          CHECK(work.splits <= std::clamp<int64_t>((longest + 15) / 16, 1, 256));
          CHECK((work.warps == 1 || work.warps == 2 || (work.warps == 4 && dim <= 128)));
          if (rows == 5000) CHECK(work.splits == 1);  // the GPU is full
          if (rows == 1 && longest >= 2048 && dim >= 64) CHECK(work.splits > 1);
        }
      }
    }
  }
}

TEST_CASE("attention of one query a row reads the row's keys, and nothing else", "[cuda]") {
  if (no_gpu()) return;
  const int arch = cuda::code_architecture();
  for (const Float type : {Float::kFloat16, Float::kBFloat16}) {
    for (const auto& [heads, kv_heads, dim] :
         std::vector<std::array<int64_t, 3>>{{1, 1, 8}, {3, 1, 64}, {8, 2, 96}, {20, 1, 128}, {4, 4, 256}}) {
      if (!cuda::has_decode_attention(type, dim, arch)) continue;
      for (const int64_t longest : {1, 15, 16, 17, 65, 300}) {
        for (const int64_t window : {int64_t{0}, int64_t{1}, int64_t{20}}) {
          CAPTURE(static_cast<int>(type), heads, kv_heads, dim, longest, window);
          const std::vector<int64_t> starts{longest, 0}, lengths{longest, std::max<int64_t>(1, longest / 2)};
          const Memory first(starts), count(lengths), shared_first(std::vector<int64_t>{0, 0});
          const Memory shared_count(std::vector<int64_t>{longest / 32 * 16, 0});
          // The last row's keys end with their memory.
          const Matrix q(type, 2, heads * dim, {0, 8}, true), k(type, 2 * longest, kv_heads * dim, {0, 0}, true),
              v(type, 2 * longest, kv_heads * dim, {8, 0}, true), out(type, 2, heads * dim, {0, 0}, false);
          cuda::DecodeAttention work{.type = type,
                                     .q = q.data(),
                                     .k = k.data(),
                                     .v = v.data(),
                                     .out = out.data(),
                                     .partial = nullptr,
                                     .starts = first.at<int64_t>(),
                                     .lengths = count.at<int64_t>(),
                                     .q_row_stride = q.stride(),
                                     .q_head_stride = dim,
                                     .slot_stride = k.stride(),
                                     .kv_head_stride = dim,
                                     .rows = 2,
                                     .heads = heads,
                                     .kv_heads = kv_heads,
                                     .head_dim = dim,
                                     .window = window,
                                     .scale = 0.125F};
          cuda::divide_keys(work, longest, multiprocessors());
          const Attended attended{heads, kv_heads, dim, window, 0.125};
          const auto apart = attended(q, k, v, lengths, [&](int64_t row, int64_t key) { return row == 0 ? longest + key : key; });
          const auto shared = attended(q, k, v, lengths, [&](int64_t row, int64_t key) {
            return row == 0 && key >= longest / 32 * 16 ? longest + key : key;
          });
          const double bound = type == Float::kFloat16 ? std::ldexp(1.0, -10) : std::ldexp(1.0, -8);
          for (const auto& [splits, warps] :
               std::vector<std::pair<int64_t, int>>{{work.splits, work.warps}, {1, 1}, {1, 2}, {3, 1}, {3, 2}}) {
            CAPTURE(splits, warps);
            work.splits = splits, work.warps = warps;
            const Memory partial(cuda::decode_partial_floats(work) * 4);
            work.partial = partial.at<float>();
            work.shared_starts = work.shared_lengths = nullptr;
            check(cuda::decode_attention(work, nullptr));
            CHECK(error_of(out.values(), apart) <= bound);
            work.shared_starts = shared_first.at<int64_t>(), work.shared_lengths = shared_count.at<int64_t>();
            check(cuda::decode_attention(work, nullptr));
            CHECK(error_of(out.values(), shared) <= bound);
          }
          work.warps = 3;
          CHECK(cuda::decode_attention(work, nullptr) == cudaErrorInvalidValue);
        }
      }
    }
  }
}

TEST_CASE("products of a group have kernels where a CTA has the shared memory that they take", "[cuda]") {
  constexpr int64_t kOfHopper = 232448, kOfSm120 = 101376;
  CHECK(cuda::has_gemm_4bit_group(8, 4096, 64, 256, Float::kBFloat16, 100, kOfHopper, 1024));
  CHECK(!cuda::has_gemm_4bit_group(8, 4096, 64, 256, Float::kBFloat16, 120, kOfSm120, 1024));
  CHECK(!cuda::has_gemm_4bit_group(8, 4096, 64, 256, Float::kBFloat16, 89, kOfHopper, 1024));
  CHECK(!cuda::has_gemm_4bit_group(8, 4096, 64, 256, Float::kBFloat16, 100, kOfHopper, 2048));
  CHECK(cuda::has_gemm_4bit_group(9, 4096, 64, 256, Float::kBFloat16, 100, kOfHopper, 2048));
}

TEST_CASE("products of a group read weights and adapters and write y, and nothing else", "[cuda]") {
  if (no_gpu()) return;
  const int arch = cuda::code_architecture();
  const Memory counters(std::vector<uint32_t>{0, 0});
  for (const Float type : {Float::kFloat16, Float::kBFloat16}) {
    for (const int64_t m : {1, 2, 8, 9, 16, 17, 33, 65, 128}) {
      for (const auto& [k, heights] : std::vector<std::pair<int64_t, std::vector<int64_t>>>{
               {256, {1}}, {256, {16, 17}}, {1024, {200, 8, 300}}, {4352, {257}}, {512, {5000, 3}}}) {
        if (!cuda::has_gemm_4bit_group(m, k, 64, 256, type, arch, shared_bytes(), reserved_bytes())) continue;
        for (const int64_t rank : {0, 3, 16}) {
          for (const bool nested : {false, true}) {
            CAPTURE(static_cast<int>(type), m, k, heights.front(), rank, nested);
            std::vector<Memory> kept;
            cuda::GemmFourBitGroup work;
            int64_t width = 0;
            const auto keep = [&](Memory memory) { return kept.emplace_back(std::move(memory)).at<void>(); };
            for (const int64_t n : heights) {
              cuda::GroupWeight& weight = work.weights[work.count++];
              const int64_t blocks = n * k / 64;
              weight.packed = static_cast<const uint8_t*>(keep(Memory(codes(n * k / 2))));
              weight.absmax = keep(nested ? Memory(codes(blocks)) : Memory(numbers(Float::kFloat32, blocks)));
              if (nested) {
                weight.nested_absmax = static_cast<const float*>(keep(Memory(numbers(Float::kFloat32, (blocks + 255) / 256))));
                weight.nested_offset = static_cast<const float*>(keep(Memory(std::vector<float>{0.5F})));
              }
              weight.n = n;
              weight.rank = rank;
              weight.u_column = work.ranks;
              if (rank > 0) weight.b = keep(Memory(numbers(type, n * rank)));
              work.ranks += rank;
              width += n;
            }
            const Matrix x(type, m, k, {0, 64}, true), y(type, m, width, {0, 5}, false), a(type, work.ranks, k, {0, 0}, true);
            const Memory u(numbers(type, m * work.ranks)), bias(numbers(type, width));
            work.x = x.data(), work.x_stride = x.stride();
            work.y = y.data(), work.y_stride = y.stride();
            work.type = type, work.m = m, work.k = k;
            if (work.ranks > 0) work.a = a.data(), work.u = u.at<void>(), work.counters = counters.at<unsigned>();
            if (m % 2 == 0) work.bias = bias.at<void>();
            for (const int of : {1, 3, multiprocessors()}) {  // of few, each takes many strips and stages
              const Memory partial(cuda::gemm_4bit_group_floats(work, of) * 4);
              work.partial = partial.at<float>();
              check(cuda::gemm_4bit_group(work, of, nullptr));
              REQUIRE(y.wrote_only_its_rows());
            }
          }
        }
      }
    }
  }
  REQUIRE(counters.bytes() == std::vector<unsigned char>(8, 0));
}

TEST_CASE("the choice of a token reads a row's scores, at any width, and of many equal ones", "[cuda]") {
  if (no_gpu()) return;
  for (const int64_t rows : {0, 1, 3}) {
    for (const int64_t words : {1, 7, 1023, 1024, 1025, 2049, 8193, 70001}) {  // of eight values: up to nine thousand are equal
      const Memory draws(std::vector<double>{0.0, 0.5, 1 - 0x1p-53});
      for (const auto& [top_k, top_p, min_p] : std::vector<std::tuple<int64_t, double, double>>{
               {0, 0.0, 0.0}, {0, 0.4, 0.0}, {0, 0.999, 0.0}, {20, 1.0, 0.0}, {3000, 0.7, 0.1}}) {
        CAPTURE(rows, words, top_k, top_p, min_p);
        const Matrix scores(Float::kFloat32, rows, words, {1, 0}, true), tokens(Float::kFloat32, 1, 2 * rows, {0, 0}, false);
        check(cuda::keep_likely_tokens(scores.as<float>(), rows, words, top_k, top_p, min_p, nullptr));
        check(cuda::draw_tokens(scores.as<float>(), rows, words, draws.at<double>(), tokens.as<int64_t>(), nullptr));
        std::vector<float> found(static_cast<size_t>(rows * words));
        std::vector<int64_t> drawn(static_cast<size_t>(rows));
        check(cudaMemcpy(found.data(), scores.data(), found.size() * 4, cudaMemcpyDeviceToHost));
        check(cudaMemcpy(drawn.data(), tokens.data(), drawn.size() * 8, cudaMemcpyDeviceToHost));
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t token = drawn[static_cast<size_t>(row)];
          REQUIRE((token >= 0 && token < words));
          REQUIRE(std::isfinite(found[static_cast<size_t>(row * words + token)]));
        }
      }
    }
  }
}
