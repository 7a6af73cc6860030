// SPDX-License-Identifier: Apache-2.0
// Every kernel of a layer at edge shapes: it ends without an error and writes its rows and nothing else. Values are compared
// elsewhere (tests/python/test_layer_ops_cuda.py); here compute-sanitizer looks on.
#include "cuda/cross_entropy.hpp"
#include "cuda/dropout.hpp"
#include "cuda/gated_activation.hpp"
#include "cuda/norm.hpp"
#include "cuda/norm_rope.hpp"
#include "cuda/rope.hpp"
#include "cuda/rows.hpp"
#include "device_matrix.hpp"

using namespace kernels;
using namespace qlorapp;

namespace {

const std::vector<int64_t> kWidths{1, 7, 8, 64, 520, 1032, 4104, 33000};
const std::vector<int64_t> kRowCounts{0, 1, 3};

template <class F>
void at_every_edge(const std::vector<int64_t>& widths, const F& run) {
  for (const Float type : types()) {
    for (const Layout& layout : layouts()) {
      for (const int64_t rows : kRowCounts) {
        for (const int64_t width : widths) {
          CAPTURE(static_cast<int>(type), layout.offset, layout.spare, rows, width);
          run(type, layout, rows, width);
        }
      }
    }
  }
}

cuda::Rows read(const Matrix& matrix) { return {matrix.data(), matrix.stride()}; }
cuda::WrittenRows written(const Matrix& matrix) { return {matrix.data(), matrix.stride()}; }

}  // namespace

TEST_CASE("norms write their rows and nothing else, at any width and alignment", "[cuda]") {
  if (no_gpu()) return;
  const auto rule = GENERATE(cuda::NormRule::kRoundTwice, cuda::NormRule::kOnePlus);
  at_every_edge(kWidths, [&](Float type, const Layout& layout, int64_t rows, int64_t width) {
    const Matrix x(type, rows, width, layout, true), residual(type, rows, width, layout, true),
        weight(type, 1, width, {0, 0}, true);
    const Matrix y(type, rows, width, layout, false), sum(type, rows, width, layout, false),
        rstd(Float::kFloat32, 1, rows, {0, 0}, false);
    check(cuda::rms_norm(type, read(x), weight.data(), written(y), rstd.as<float>(), rows, width, 1e-5F, rule, nullptr));
    check(cuda::add_rms_norm(type, read(x), read(residual), weight.data(), written(sum), written(y), rstd.as<float>(), rows, width,
                             1e-5F, rule, nullptr));
    REQUIRE(y.wrote_only_its_rows());
    REQUIRE(sum.wrote_only_its_rows());
    const Matrix dx(type, rows, width, layout, false);
    check(cuda::rms_norm_backward(type, read(x), read(sum), weight.data(), rstd.as<float>(), written(dx), {}, false, rows, width,
                                  rule, nullptr));
    check(cuda::rms_norm_backward(type, read(y), read(sum), weight.data(), rstd.as<float>(), written(dx), written(y), true, rows,
                                  width, rule, nullptr));
    REQUIRE(dx.wrote_only_its_rows());
    REQUIRE(y.wrote_only_its_rows());
  });
}

TEST_CASE("gated_activation and its backward write their rows and nothing else", "[cuda]") {
  if (no_gpu()) return;
  const auto act = GENERATE(cuda::Activation::kSilu, cuda::Activation::kGeluTanh);
  at_every_edge({1, 7, 8, 64, 2056, 14344}, [&](Float type, const Layout& layout, int64_t rows, int64_t width) {
    const Matrix gate_up(type, rows, 2 * width, layout, true), h(type, rows, width, layout, false),
        gradient(type, rows, 2 * width, layout, false);
    check(cuda::gated_activation(type, gate_up.data(), gate_up.stride(), h.data(), h.stride(), rows, width, act, nullptr));
    for (const bool keep_h : {false, true}) {
      check(cuda::gated_activation_backward(type, h.data(), h.stride(), gate_up.data(), gate_up.stride(), gradient.data(),
                                            gradient.stride(), keep_h, rows, width, act, nullptr));
    }
    REQUIRE(h.wrote_only_its_rows());
    REQUIRE(gradient.wrote_only_its_rows());
  });
}

TEST_CASE("rope turns heads in place and gathers three gradients, and touches nothing beside them", "[cuda]") {
  if (no_gpu()) return;
  constexpr int64_t kPositions = 5, kHeads = 3;
  at_every_edge({1, 3, 4, 32, 64, 100}, [](Float type, const Layout& layout, int64_t tokens, int64_t half) {
    const int64_t d = 2 * half;
    const Matrix tables(Float::kFloat32, 2 * kPositions, half, {0, 0}, true);
    const Memory position(std::vector<int64_t>{4, 0, 2});
    const Matrix x(type, tokens, kHeads * d, layout, true), y(type, tokens, kHeads * d, layout, false),
        packed(type, tokens, 5 * d, layout, false);
    for (const bool inverse : {false, true}) {
      for (const int64_t turned : {half, half / 2, int64_t{0}}) {
        const cuda::Rotation rotation{
            tables.as<float>(), tables.as<float>() + kPositions * turned, position.at<int64_t>(), turned, inverse, inverse};
        check(cuda::rope(type, {x.data(), x.stride(), d, kHeads}, y.data(), y.stride(), d, rotation, tokens, d, nullptr));
        const Matrix k(type, tokens, d, layout, true);
        check(cuda::rope_packed(type, {x.data(), x.stride(), d, kHeads}, {k.data(), k.stride(), d, 1}, {k.data(), k.stride(), d, 1},
                                packed.data(), packed.stride(), rotation, tokens, d, nullptr));
      }
    }
    REQUIRE(y.wrote_only_its_rows());
    REQUIRE(packed.wrote_only_its_rows());
  });
}

TEST_CASE("heads are normed and turned, and their gradients gathered, and nothing beside them is touched", "[cuda]") {
  if (no_gpu()) return;
  constexpr int64_t kPositions = 5, kHeads = 3, kQueries = 2;
  const auto rule = GENERATE(cuda::NormRule::kRoundTwice, cuda::NormRule::kOnePlus);
  at_every_edge({1, 3, 32, 64, 100, 128, 256}, [&](Float type, const Layout& layout, int64_t tokens, int64_t half) {
    const int64_t d = 2 * half;
    const Matrix tables(Float::kFloat32, 2 * kPositions, half, {0, 0}, true), weight(type, 2, d, {0, 0}, true);
    const Memory position(std::vector<int64_t>{4, 0, 2});
    const Matrix x(type, tokens, kHeads * d, layout, true), k(type, tokens, d, layout, true),
        y(type, tokens, kHeads * d, {layout.offset, 0}, false), packed(type, tokens, 4 * d, layout, false);
    const cuda::Rotation rotation{
        tables.as<float>(), tables.as<float>() + kPositions * half, position.at<int64_t>(), half, false, false};
    const cuda::HeadNorm norm{weight.data(), weight.data(), kQueries, 1e-5F, rule};
    const cuda::Heads heads{x.data(), x.stride(), d, kHeads}, q{x.data(), x.stride(), d, kQueries}, one{k.data(), k.stride(), d, 1};
    check(cuda::rms_norm_rope(type, heads, y.data(), norm, rotation, tokens, half, nullptr));
    check(cuda::rms_norm_rope_backward(type, q, one, one, heads, packed.data(), packed.stride(), norm, rotation, tokens, half,
                                       nullptr));
    REQUIRE(y.wrote_only_its_rows());
    REQUIRE(packed.wrote_only_its_rows());
  });
}

TEST_CASE("rows are gathered and scattered, and indices outside leave the memory around alone", "[cuda]") {
  if (no_gpu()) return;
  at_every_edge({1, 7, 8, 130, 4096}, [](Float type, const Layout& layout, int64_t rows, int64_t width) {
    constexpr int64_t kSourceRows = 4;
    const Matrix source(type, kSourceRows, width, layout, true), out(type, rows, width, layout, false),
        target(type, kSourceRows, width, layout, false);
    const Memory index(std::vector<int64_t>{3, -1, kSourceRows});
    check(cuda::gather_rows(type, source.data(), source.stride(), kSourceRows, index.at<int64_t>(), out.data(), out.stride(), rows,
                            width, nullptr));
    check(cuda::scatter_rows(type, source.data(), source.stride(), index.at<int64_t>(), target.data(), target.stride(), kSourceRows,
                             rows, width, nullptr));
    REQUIRE(out.wrote_only_its_rows());
    REQUIRE(target.wrote_only_its_rows());
  });
}

TEST_CASE("cross-entropy reads and writes the logits of its rows, for targets of all kinds", "[cuda]") {
  if (no_gpu()) return;
  const float cap = GENERATE(0.0F, 30.0F);
  at_every_edge({1, 7, 8, 1000, 32003}, [&](Float type, const Layout& layout, int64_t rows, int64_t vocabulary) {
    const Memory targets(std::vector<int64_t>{vocabulary - 1, -100, vocabulary}), scale(std::vector<float>{0.5F});
    const Matrix losses(Float::kFloat32, 1, rows, {0, 0}, false), total(Float::kFloat32, 1, 1, {0, 0}, false);
    for (const bool gradient : {false, true}) {
      const Matrix logits(type, rows, vocabulary, layout, true), statistics(Float::kFloat32, 2, rows, {0, 3}, false);
      check(cuda::row_statistics(type, logits.data(), logits.stride(), targets.at<int64_t>(), statistics.as<float>(),
                                 statistics.stride(), rows, vocabulary, 1.0F, cap, nullptr));
      REQUIRE(statistics.wrote_only_its_rows());
      check(cuda::cross_entropy(type, logits.data(), logits.stride(), targets.at<int64_t>(), losses.as<float>(), scale.at<float>(),
                                gradient, rows, vocabulary, 1.0F, cap, nullptr));
    }
    check(cuda::sum_losses(losses.as<float>(), rows, total.as<float>(), nullptr));
  });
  for (const int64_t rows : {int64_t{1}, int64_t{31}, int64_t{1025}, int64_t{5000}}) {
    std::vector<int64_t> targets(static_cast<size_t>(rows));
    for (size_t i = 0; i < targets.size(); ++i) targets[i] = i % 3 == 0 ? -100 : static_cast<int64_t>(i);
    const int64_t found = rows - (rows + 2) / 3;
    const Memory device(targets);
    for (const int64_t count : {std::max<int64_t>(found - 1, 1), std::max<int64_t>(found, 1), found + 2}) {
      const Memory index(count * 8), compact(count * 8);
      check(cuda::compact_targets(device.at<int64_t>(), rows, count, index.at<int64_t>(), compact.at<int64_t>(), nullptr));
    }
    const Matrix losses(Float::kFloat32, 1, rows, {0, 0}, true), total(Float::kFloat32, 1, 1, {0, 0}, false);
    check(cuda::sum_losses(losses.as<float>(), rows, total.as<float>(), nullptr));
  }
}

namespace {

struct CrossEntropy {
  std::vector<double> losses, only_losses, gradients;  ///< only_losses: of a call without gradient
  bool replay_is_same = false;                         ///< captured in a graph and replayed
};

/// Of four rows of the same logits, apart as `layout` says: the last target, none, one in the middle, one that there is not.
CrossEntropy cross_entropy_of(Float type, int64_t vocabulary, const Layout& layout) {
  constexpr int64_t kRows = 4;
  const Memory dense(numbers(type, kRows * vocabulary)), result(dense.bytes()), scale(std::vector<float>{0.5F});
  const Memory targets(std::vector<int64_t>{vocabulary - 1, -100, vocabulary / 2, vocabulary});
  const Matrix logits(type, kRows, vocabulary, layout, false), losses(Float::kFloat32, 1, kRows, {0, 0}, false);
  const auto size = static_cast<size_t>(size_of(type)), width = static_cast<size_t>(vocabulary) * size;
  const auto pitch = static_cast<size_t>(logits.stride()) * size;
  const auto found = [&] {
    std::vector<float> host(kRows);
    check(cudaMemcpy(host.data(), losses.data(), kRows * sizeof(float), cudaMemcpyDeviceToHost));
    return std::vector<double>(host.begin(), host.end());
  };
  const auto run = [&](bool gradient, cudaStream_t stream) {
    check_launch(cudaMemcpy2DAsync(logits.data(), pitch, dense.at(), width, width, kRows, cudaMemcpyDeviceToDevice, stream));
    check_launch(cuda::cross_entropy(type, logits.data(), logits.stride(), targets.at<int64_t>(), losses.as<float>(),
                                     gradient ? scale.at<float>() : nullptr, gradient, kRows, vocabulary, 1.0F, 0.0F, stream));
    check_launch(cudaMemcpy2DAsync(result.at(), width, logits.data(), pitch, width, kRows, cudaMemcpyDeviceToDevice, stream));
  };
  CrossEntropy of;
  run(false, nullptr);
  of.only_losses = found();
  REQUIRE(result.bytes() == dense.bytes());
  run(true, nullptr);
  of.losses = found();
  const std::vector<unsigned char> launched = result.bytes();
  of.gradients = widened(type, launched);
  REQUIRE(logits.wrote_only_its_rows());

  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t launch = nullptr;
  check(cudaStreamCreate(&stream));
  check_launch(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  run(true, stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&launch, graph, 0));
  check(cudaMemsetAsync(result.at(), 0, static_cast<size_t>(kRows) * width, stream));
  check(cudaGraphLaunch(launch, stream));
  check(cudaStreamSynchronize(stream));
  of.replay_is_same = result.bytes() == launched;
  check(cudaGraphExecDestroy(launch));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
  return of;
}

}  // namespace

TEST_CASE("rows that several blocks hold have the losses and gradients of rows that one reads", "[cuda]") {
  if (no_gpu()) return;
  // In 16 bits 1, 1, 2, 3, 4 (every register taken), 4 and odd elements, 6, 7 and 8 blocks, and a row too long for registers; in
  // 32 bits 1, 2, 3, 5, 8, and from then on too long.
  for (const int64_t vocabulary : {4099, 32003, 40000, 66003, 131072, 131077, 180000, 220000, 262141, 262208}) {
    for (const Float type : types()) {
      CAPTURE(static_cast<int>(type), vocabulary);
      const int64_t pack = 16 / size_of(type);
      const CrossEntropy held = cross_entropy_of(type, vocabulary, {0, (pack - vocabulary % pack) % pack});
      const CrossEntropy read = cross_entropy_of(type, vocabulary, {1, vocabulary % 2 == 0 ? 3 : 2});
      REQUIRE(held.replay_is_same);
      REQUIRE(read.replay_is_same);
      REQUIRE(std::isnan(held.losses[3]));
      for (size_t i = 0; i < 3; ++i) {
        REQUIRE(held.only_losses[i] == held.losses[i]);
        REQUIRE(std::abs(held.losses[i] - read.losses[i]) <= 4e-6 * std::abs(read.losses[i]));
      }
      const double relative = type == Float::kFloat32 ? 1e-5 : type == Float::kBFloat16 ? 8e-3 : 1e-3;
      const double least = type == Float::kFloat16 ? 6e-8 : 1e-38;  // what fp16 tells apart of numbers that small
      double worst = 0;
      for (size_t i = 0; i < read.gradients.size(); ++i)
        worst = std::max(worst, std::abs(held.gradients[i] - read.gradients[i]) / (relative * std::abs(read.gradients[i]) + least));
      REQUIRE(worst <= 1);
    }
  }
}

TEST_CASE("dropout covers any number of elements at any alignment", "[cuda]") {
  if (no_gpu()) return;
  at_every_edge({1, 3, 8, 1023, 4099}, [](Float type, const Layout& layout, int64_t, int64_t n) {
    const Matrix x(type, 1, n, {layout.offset, 0}, true), y(type, 1, n, {layout.offset, 0}, false);
    check(cuda::seeded_dropout(type, x.data(), y.data(), n, {7, 1, 2, 0}, 1U << 30, 1.5F, nullptr));
    REQUIRE(y.wrote_only_its_rows());
  });
}
