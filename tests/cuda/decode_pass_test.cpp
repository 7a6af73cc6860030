// SPDX-License-Identifier: Apache-2.0
// The pass of few rows in one launch, and of more phase by phase: two blocks at the edges of rows, strips, keys and adapters.
#include <algorithm>
#include <cmath>

#include "catch.hpp"
#include "cuda/decode_pass.hpp"
#include "cuda/gemm_4bit.hpp"
#include "cuda/wide_pass.hpp"
#include "device_matrix.hpp"

using namespace kernels;
using namespace qlorapp;
using cuda::PassKind;
using cuda::PassPhase;

namespace {

constexpr Float kType = Float::kBFloat16;

/// The phases and buffers of a pass; each buffer ends with its last element.
struct Program {
  int m, width = 256, inner = 512, heads, kv_heads, dim, rank;
  bool nested, norms;
  int64_t longest;
  std::vector<Memory> kept = {};
  std::vector<PassPhase> phases = {};
  int formed = 0, most_ranks = 0;

  void* keep(Memory memory) { return kept.emplace_back(std::move(memory)).at<void>(); }
  void* filled(int64_t n) { return keep(Memory(numbers(kType, n))); }
  void* result(int64_t n) { return keep(Memory(n * 2)); }

  void weight(PassPhase& phase, int n) {
    cuda::PassWeight& own = phase.weights[phase.count++];
    const int64_t blocks = static_cast<int64_t>(n) * phase.k / 64;
    own.packed = static_cast<const uint8_t*>(keep(Memory(codes(static_cast<int64_t>(n) * phase.k / 2))));
    own.absmax = keep(nested ? Memory(codes(blocks)) : Memory(numbers(Float::kFloat32, blocks)));
    if (nested) {
      own.nested_absmax = static_cast<const float*>(keep(Memory(numbers(Float::kFloat32, (blocks + 255) / 256))));
      own.nested_offset = static_cast<const float*>(keep(Memory(std::vector<float>{0.5F})));
    }
    own.n = n;
    own.rank = rank;
    own.u_column = phase.ranks;
    own.scaling = 0.01F;
    if (rank > 0) own.b = filled(static_cast<int64_t>(n) * rank);
    phase.ranks += rank;
    phase.width += n;
  }
  void product(PassPhase& phase) {
    phase.kind = PassKind::kProduct;
    phase.eps = 1e-5F;
    phase.wide_ranks = rank % 8 == 0;
    if (rank > 0) phase.a = filled(static_cast<int64_t>(phase.ranks) * phase.k);
    if (m % 2 == 0 && !phase.gated) phase.bias = filled(phase.width);
    if (phase.gated) phase.width /= 2;
    REQUIRE(cuda::divide_product(phase, m, multiprocessors()));
    phase.formed = formed += phase.jobs;
    most_ranks = std::max(most_ranks, phase.ranks);
    phases.push_back(phase);
  }
};

std::vector<unsigned char> run(Program& program) {
  const int m = program.m, width = program.width, qkv_width = (program.heads + 2 * program.kv_heads) * program.dim;
  const int attended = program.heads * program.dim;
  void* const stream = program.filled(static_cast<int64_t>(m) * width);
  void *const x = program.result(m * width), *const qkv = program.result(m * qkv_width), *const out = program.result(m * attended);
  void *const branch = program.result(m * width), *const h = program.result(m * program.inner);
  const auto squares = [&] { return static_cast<float*>(program.keep(Memory(width / 16 * PassPhase::kSquaresEach * 4))); };
  float *const own = squares(), *const of_branch = squares();
  const auto leave = [&](PassPhase& phase) { phase.next_x = x, phase.next_norm = program.filled(width), phase.next_squares = own; };
  PassPhase begin;
  begin.k = begin.width = width, begin.stream = stream;
  leave(begin);
  program.phases.push_back(begin);
  const auto add = [&](const void* from, int k) {  // o or down, with a norm behind it or none
    PassPhase phase;
    phase.x = from, phase.k = k;
    program.weight(phase, width);
    if (!program.norms) {
      phase.stream = stream, phase.factor = 0.5F;
      leave(phase);
      return program.product(phase);
    }
    phase.y = branch, phase.next_squares = of_branch;
    program.product(phase);
    PassPhase sum;
    sum.k = sum.width = width, sum.stream = stream, sum.x = branch, sum.squares = of_branch, sum.norm = program.filled(width);
    leave(sum);
    program.phases.push_back(sum);
  };
  for (int block = 0; block < 2; ++block) {
    PassPhase of_qkv;
    of_qkv.x = x, of_qkv.squares = own, of_qkv.y = qkv, of_qkv.k = width;
    for (const int count : {program.heads, program.kv_heads, program.kv_heads}) program.weight(of_qkv, count * program.dim);
    program.product(of_qkv);
    PassPhase attention;
    attention.kind = PassKind::kAttention, attention.x = qkv, attention.y = out;
    const int64_t slots = m * program.longest * program.kv_heads * program.dim;
    attention.keys = program.filled(slots), attention.values = program.filled(slots);
    attention.half = program.dim / 2 - block;  // a part of a head stays
    attention.cos = static_cast<const float*>(program.keep(Memory(numbers(Float::kFloat32, program.longest * attention.half))));
    attention.sin = static_cast<const float*>(program.keep(Memory(numbers(Float::kFloat32, program.longest * attention.half))));
    if (program.norms) attention.q_norm = program.filled(program.dim), attention.k_norm = program.filled(program.dim);
    attention.window = block == 0 ? 0 : 20;
    attention.interleaved = program.norms, attention.turns_before_norm = block == 1;
    attention.scale = 0.1F;
    attention.splits = cuda::attention_splits(m, program.heads, program.kv_heads, multiprocessors());
    program.phases.push_back(attention);
    add(out, attended);
    PassPhase gate_up;
    gate_up.x = x, gate_up.squares = own, gate_up.y = h, gate_up.k = width, gate_up.gated = true;
    for (int i = 0; i < 2; ++i) program.weight(gate_up, program.inner);
    program.product(gate_up);
    add(h, program.inner);
  }
  int next = static_cast<int>(program.phases.size());
  for (int i = next - 1; i >= 0; --i) {
    program.phases[static_cast<size_t>(i)].next_product = next;
    if (program.phases[static_cast<size_t>(i)].kind == PassKind::kProduct) next = i;
  }
  std::vector<int64_t> positions, slots, starts, lengths;
  for (int row = 0; row < m; ++row) {
    const int64_t length = row == 0 ? program.longest : std::max<int64_t>(1, program.longest / 2), first = row * program.longest;
    positions.push_back(length - 1), slots.push_back(first + length - 1), starts.push_back(first), lengths.push_back(length);
  }
  const Memory all(program.phases), of_positions(positions), of_slots(slots), of_starts(starts), of_lengths(lengths);
  cuda::DecodePass pass{.phases = all.at<PassPhase>(),
                        .count = static_cast<int>(program.phases.size()),
                        .m = m,
                        .heads = program.heads,
                        .kv_heads = program.kv_heads,
                        .head_dim = program.dim,
                        .positions = of_positions.at<int64_t>(),
                        .slots = of_slots.at<int64_t>(),
                        .starts = of_starts.at<int64_t>(),
                        .lengths = of_lengths.at<int64_t>(),
                        .norm_rule = program.norms ? cuda::NormRule::kOnePlus : cuda::NormRule::kRoundTwice,
                        .nested = program.nested};
  const Memory u(static_cast<int64_t>(m) * program.most_ranks * 2);
  pass.u = u.at<void>();
  if (m > 8) {
    cuda::WidePass wide{.pass = pass, .phases = program.phases, .longest = program.longest};
    REQUIRE(cuda::has_wide_pass(wide));
    const Memory partial(cuda::wide_pass_floats(wide, multiprocessors()) * 4), laid(cuda::wide_pass_bytes(wide));
    wide.partial = partial.at<float>(), wide.laid = laid.at<unsigned char>();
    check(cuda::wide_pass(wide, multiprocessors(), nullptr));
  } else {
    const Memory partial(cuda::pass_partial_floats(pass, multiprocessors()) * 4);
    const Memory counters(std::vector<uint32_t>(static_cast<size_t>(cuda::pass_counters(pass)), 0));
    pass.partial = partial.at<float>(), pass.counters = counters.at<unsigned>();
    check(cuda::decode_pass(pass, multiprocessors(), nullptr));
    const std::vector<unsigned char> left = counters.bytes();
    REQUIRE(std::ranges::all_of(left, [](unsigned char byte) { return byte == 0; }));
  }
  std::vector<unsigned char> found(static_cast<size_t>(m) * static_cast<size_t>(width) * 2);
  check_launch(cudaMemcpy(found.data(), stream, found.size(), cudaMemcpyDeviceToHost));
  return found;
}

}  // namespace

TEST_CASE("a pass of one token a row reads and writes what is its own, and has the same bits each time", "[cuda]") {
  if (no_gpu()) return;
  int device = 0, major = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  for (const int m : {1, 2, 3, 8, 9, 10, 32, 40, 96, 128}) {
    if (m > 8 && (major != 9 || cuda::code_architecture() < 90)) continue;
    for (const auto& [heads, kv_heads, dim] :
         std::vector<std::array<int, 3>>{{8, 2, 32}, {4, 1, 64}, {16, 1, 80}, {4, 2, 128}, {2, 2, 256}}) {
      if (m <= 8 && !cuda::has_decode_pass(kType, m, dim, cuda::code_architecture(), multiprocessors())) continue;
      for (const int rank : {0, 3, 16}) {
        for (const bool nested : {false, true}) {
          for (const int64_t longest : {1, 300}) {
            CAPTURE(m, heads, kv_heads, dim, rank, nested, longest);
            const auto program = [&] {
              return Program{.m = m,
                             .heads = heads,
                             .kv_heads = kv_heads,
                             .dim = dim,
                             .rank = rank,
                             .nested = nested,
                             .norms = rank == 3,
                             .longest = longest};
            };
            Program first = program(), second = program();
            const std::vector<unsigned char> found = run(first);
            REQUIRE(found == run(second));
            const std::vector<double> values = widened(kType, found);
            for (const double value : values) REQUIRE(std::isfinite(value));
            if (m != 10 && m != 40) continue;  // rows that kernels have no size of their own for: those of more
            Program more = program();
            more.m = m == 10 ? 16 : 64;
            const std::vector<double> of_more = widened(kType, run(more));
            double largest = 0, off = 0;
            for (size_t i = 0; i < values.size(); ++i)
              largest = std::max(largest, std::abs(values[i])), off = std::max(off, std::abs(values[i] - of_more[i]));
            REQUIRE(off <= 0.05 * largest);
          }
        }
      }
    }
  }
}
