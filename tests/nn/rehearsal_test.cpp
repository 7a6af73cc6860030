// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/rehearsal.hpp"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "catch.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/core/check.hpp"
#include "qlorapp/nn/memory_account.hpp"

using namespace qlorapp;

namespace {

/// What torch's CPU allocator tells its profiler, rounded up as a GPU's allocator rounds.
class CpuMemory final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* memory, int64_t bytes, size_t, size_t, c10::Device device) override {
    if (!device.is_cpu()) return;
    constexpr int64_t kRounding = MemoryAccount::kRounding;
    if (bytes > 0) {
      const int64_t rounded = (bytes + kRounding - 1) / kRounding * kRounding;
      sizes_[memory] = rounded;
      now_ += rounded;
      peak = std::max(peak, now_);
    } else if (const auto found = sizes_.find(memory); found != sizes_.end()) {
      now_ -= found->second;
      sizes_.erase(found);
    }
  }
  [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }

  int64_t peak = 0;

 private:
  std::map<void*, int64_t> sizes_;
  int64_t now_ = 0;
};

/// A block whose widest tensors are those of its MLP.
constexpr DecoderBlock::Shape kWide{
    .hidden = 64, .intermediate = 704, .heads = 2, .kv_heads = 2, .head_dim = 32, .rms_norm_eps = 1e-5};

DecoderBlock on_meta(const DecoderBlock& block) { return tiny::on(at::kMeta, block); }

struct Peaks {
  int64_t forward, backward;
};

/// The most that forward, and then backward, have at a time, beside x and dy.
template <class Begin, class Peak>
Peaks peaks_of(const DecoderBlock& block, const StepContext& context, const at::Tensor& x, Keep keep, Begin&& begin, Peak&& peak) {
  const at::NoGradGuard no_grad;
  const DecoderBlock::Gradients gradients = tiny::zero_gradients(block);
  Peaks result{};
  begin();
  Saved saved;
  at::Tensor y = block.forward(x, context, &saved, keep);
  result.forward = peak();
  const Wide dx = block.backward({std::move(y), x.size(1)}, context, std::move(saved), gradients, /*need_dx=*/true);
  result.backward = peak();
  return result;
}

format::ModelConfig config_of(int64_t hidden, int64_t intermediate, int64_t layers, int64_t heads, int64_t head_dim, bool tied) {
  return format::parse_model_config(
      concat(
          R"({"model_type":"llama","architectures":["LlamaForCausalLM"],"hidden_act":"silu","hidden_size":)", hidden,
          R"(,"intermediate_size":)", intermediate, R"(,"num_hidden_layers":)", layers, R"(,"num_attention_heads":)", heads,
          R"(,"num_key_value_heads":8,"head_dim":)", head_dim,
          R"(,"vocab_size":128256,"max_position_embeddings":131072,"rms_norm_eps":1e-5,"rope_theta":500000.0,"tie_word_embeddings":)",
          tied ? "true" : "false", "}"),
      "config");
}

LoraConfig all_linear(int64_t rank) {
  LoraConfig lora;
  lora.r = rank;
  lora.lora_alpha = 32;
  lora.target_modules = NamesOrPattern("all-linear");
  return lora;
}

const MemorySettings kSmallest{512, 1024, WeightWorkspace::kStack, true};

}  // namespace

TEST_CASE("a rehearsal allocates what the run allocates, but for the little that CPU kernels take for themselves", "[nn][cpu]") {
  const Keep keep = GENERATE(Keep::kEverything, Keep::kAttentionOnly, Keep::kInputOnly);
  const auto workspace = GENERATE(WeightWorkspace::kLayer, WeightWorkspace::kStack);
  const int64_t tile = GENERATE(0, 64);
  const DecoderBlock block = tiny::make_block(at::kFloat, {true, true, true, true, true, true, true}, 4, 0, kWide).ours;
  StepContext context = tiny::make_context({0, 192}, kWide);
  context.stacked = true;
  context.memory = {.mlp_tile_rows = tile, .weight_workspace = workspace};

  const auto recorder = std::make_shared<CpuMemory>();
  std::optional<c10::DebugInfoGuard> guard;
  const Peaks real = peaks_of(
      block, context, at::randn({192, 64}), keep, [&] { guard.emplace(c10::DebugInfoKind::PROFILER_STATE, recorder); },
      [&] { return recorder->peak; });
  guard.reset();

  const DecoderBlock shapes = on_meta(block);
  std::optional<MemoryAccount> account;
  const Peaks rehearsed = peaks_of(
      shapes, tiny::on(at::kMeta, context), at::empty({192, 64}, at::TensorOptions().device(at::kMeta)), keep,
      [&] { account.emplace(); }, [&] { return account->peak().count; });
  CAPTURE(real.forward, rehearsed.forward, real.backward, rehearsed.backward);
  // s·B before it is rounded into its workspace, and the attention kernel's tiles; the smallest tensor of a block is 2 % of
  // these peaks.
  const auto close = [](int64_t run, int64_t rehearsal) { return run >= rehearsal && run - rehearsal <= rehearsal / 100; };
  REQUIRE(close(real.forward, rehearsed.forward));
  REQUIRE(close(real.backward, rehearsed.backward));
}

TEST_CASE("an account counts while tensors live, by phase, and only those of its thread's innermost account", "[nn][cpu]") {
  const auto meta = at::TensorOptions().device(at::kMeta).dtype(at::kByte);
  const MemoryAccount account;
  at::Tensor a = at::empty({1000}, meta);
  REQUIRE(account.now() == Bytes{1024});
  MemoryAccount::phase("first");
  {
    const at::Tensor b = at::empty({512}, meta), view = b.narrow(0, 1, 5);
    REQUIRE(account.now() == Bytes{1536});
    const MemoryAccount inner;
    const at::Tensor c = at::empty({1 << 20}, meta);
    REQUIRE(inner.peak() == Bytes{1 << 20});
  }
  MemoryAccount::phase("second");
  REQUIRE(account.now() == Bytes{1024});
  REQUIRE(account.peak() == Bytes{1536});
  REQUIRE(account.peaks().at("first") == Bytes{1536});
  REQUIRE(account.peaks().at("second") == Bytes{1024});
  a.reset();
  REQUIRE(account.now() == Bytes{0});
}

TEST_CASE("the base and the adapters of a rehearsal are their arithmetic", "[nn][cpu]") {
  RehearsalOptions options;
  options.segments = keep_in_each_block(32, Keep::kInputOnly);
  const Rehearsal found = rehearse(config_of(4096, 14336, 32, 32, 128, false), all_linear(16), options);
  const int64_t linears = 32 * int64_t{218103808}, blocks = linears / 64;
  const int64_t offsets = 7 * 32 * 512;  // each a request of its own
  const int64_t base = linears / 2 + blocks + blocks / 256 * 4 + offsets + 2 * 128256 * int64_t{4096} * 2 + 65 * 4096 * 2;
  // The rotary inverse frequencies are 64 floats.
  REQUIRE(found.weights == Bytes{base + 512});
  REQUIRE(found.adapters == Bytes{2 * 4 * int64_t{41943040}});
  REQUIRE(found.pinned == Bytes{});
  REQUIRE(found.peak() > found.weights + found.adapters);
}

TEST_CASE("what is kept and every setting show in a rehearsal", "[nn][cpu]") {
  const format::ModelConfig config = config_of(4096, 14336, 32, 32, 128, false);
  const LoraConfig lora = all_linear(16);
  RehearsalOptions options;
  const auto peak = [&](const char* keep, const MemorySettings& settings) {
    options.segments = parse_segments(keep, 32);
    options.memory = settings;
    return rehearse(config, lora, options);
  };
  const Rehearsal everything = peak("everything", {}), input = peak("input_only", {}), host = peak("input_on_host", {});
  const int64_t x = 2048 * 4096 * 2;
  REQUIRE(input.peak() < everything.peak());
  const DecoderBlock::Shape shape{4096, 14336, 32, 8, 128};
  const std::array<int64_t, 7> ranks{16, 16, 16, 16, 16, 16, 16};
  const auto kept = [&](Keep keep) {
    return DecoderBlock::kept_bytes(shape, 2048, keep, at::kBFloat16, ranks, /*stacked=*/true).count;
  };
  REQUIRE(everything.loss - input.loss == Bytes{32 * (kept(Keep::kEverything) - kept(Keep::kInputOnly))});
  // All inputs but the last block's, which stays, and one that is on its way.
  REQUIRE(input.loss - host.loss == Bytes{31 * x});
  REQUIRE(host.pinned == Bytes{31 * x});
  // More at the end costs less than more at the beginning.
  REQUIRE(peak("input_only,everything:12", {}).peak() < peak("everything:12,input_only", {}).peak());
  const Rehearsal chunk = peak("input_on_host", {.loss_chunk_rows = 512});
  REQUIRE(host.loss - chunk.loss == Bytes{int64_t{2047 - 512} * (128256 + 4096) * 2});
  const Rehearsal embedding = peak("input_on_host", {.embedding_on_host = true});
  REQUIRE(host.peak() - embedding.peak() == Bytes{128256 * int64_t{4096} * 2});
  REQUIRE(embedding.pinned - host.pinned == Bytes{128256 * int64_t{4096} * 2});
  const Rehearsal stack = peak("input_on_host", {.weight_workspace = WeightWorkspace::kStack});
  const Rehearsal projection = peak("input_on_host", {.weight_workspace = WeightWorkspace::kProjection});
  REQUIRE(stack.backward < host.backward);
  REQUIRE(projection.backward < stack.backward);
  const Rehearsal tiles = peak("input_on_host", {.mlp_tile_rows = 512, .weight_workspace = WeightWorkspace::kStack});
  REQUIRE(tiles.backward < stack.backward);
}

TEST_CASE("the smallest settings leave room below the low-memory goals", "[nn][cpu]") {
  // Beside the rehearsal: eight-bit moments with a scale for 256 elements each, and 32 MiB that cuBLAS keeps on Hopper.
  const auto step_bytes = [](const format::ModelConfig& config, int64_t length, Rehearsal* detail = nullptr) {
    RehearsalOptions options;
    options.length = length;
    options.segments = parse_segments("input_on_host", config.num_hidden_layers);
    options.memory = kSmallest;
    const Rehearsal found = rehearse(config, all_linear(16), options);
    if (detail) *detail = found;
    const int64_t elements = found.adapters.count / 8;
    return found.peak().count + 2 * elements + 2 * 4 * elements / 256 + (int64_t{32} << 20);
  };
  REQUIRE(step_bytes(config_of(4096, 14336, 32, 32, 128, false), 2048) < 5'600'000'000);
  REQUIRE(step_bytes(config_of(2048, 8192, 16, 32, 64, true), 2048) < 1'400'000'000);
  REQUIRE(step_bytes(config_of(8192, 28672, 80, 64, 128, false), 2048) < 41'000'000'000);
  const format::ModelConfig eight = config_of(4096, 14336, 32, 32, 128, false);
  const double slope = static_cast<double>(step_bytes(eight, 16384) - step_bytes(eight, 2048)) / (16384 - 2048);
  CAPTURE(slope);
  REQUIRE(slope < 100e3);
}

TEST_CASE("rehearsals of batches that cannot be are refused", "[nn][cpu]") {
  const format::ModelConfig config = format::parse_model_config(tiny::kConfigJson, "tiny");
  for (const auto& [rows, length, targets] : std::vector<std::array<int64_t, 3>>{
           {0, 8, -1}, {1, 1, -1}, {-1, 8, -1}, {1, 8, 8}, {int64_t{1} << 40, int64_t{1} << 40, -1}}) {
    RehearsalOptions options;
    options.rows = rows;
    options.length = length;
    options.targets_of_row = targets;
    REQUIRE_THROWS_AS(rehearse(config, all_linear(4), options), ValueError);
  }
  RehearsalOptions options;
  options.segments = keep_in_each_block(3, Keep::kInputOnly);
  REQUIRE_THROWS_AS(rehearse(config, all_linear(4), options), ValueError);
}
