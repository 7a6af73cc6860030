// SPDX-License-Identifier: Apache-2.0
// The plan of loading beside what torch's allocator hands out while a checkpoint is really loaded on a CPU.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"
#include "io/tensor_file.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/io/load_model.hpp"
#include "qlorapp/memory/measured_memory.hpp"
#include "qlorapp/memory/planner.hpp"
#include "small_checkpoint.hpp"

using namespace qlorapp;

namespace {

PlanSettings settings_of(const std::string& folder, const LoadOptions& options) {
  PlanSettings settings;
  settings.model = format::load_model_config(folder);
  settings.lora.target_modules = NamesOrPattern("all-linear");
  settings.compute_dtype = options.compute_dtype;
  settings.load_in_4bit = options.load_in_4bit;
  settings.quantization = options.quantization;
  settings.skip_modules = options.skip_modules;
  settings.length = 8;
  settings.device.threads = at::get_num_threads();
  return settings;
}

struct Threads {
  int before = at::get_num_threads();
  explicit Threads(int count) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before); }
};

void compare(const std::string& folder, const LoadOptions& options) {
  int64_t measured = 0, left = 0;
  {
    const MeasuredMemory memory;
    const CausalLM model = load_model(folder, options);
    measured = memory.peak();
    left = memory.live();
  }
  const MemoryPlan plan = plan_memory(settings_of(folder, options));
  const PhasePlan& load = plan.of(ops::MemoryPhase::kLoad);
  INFO("planned " << load.allocated.count << ", measured " << measured << ", left " << left);
  CHECK(measured > left);  // the buffers are seen, whoever allocates them
  // Other threads may come too late to find any work, and then take no buffer.
  const Bytes idle{static_cast<int64_t>(at::get_num_threads() - 1) << 20};
  CHECK(static_cast<double>((load.allocated - idle).count) <= 1.001 * static_cast<double>(measured));
  CHECK(static_cast<double>(load.allocated.count) >= 0.97 * static_cast<double>(measured));
}

}  // namespace

TEST_CASE("the plan of loading is what loading takes, quantized as it comes, dense, or quantized before") {
  const int threads = GENERATE(1, 2);
  const Threads limited(threads);
  const bool tied = GENERATE(false, true);
  const auto [name, dtype] = GENERATE(std::pair{"float32", at::kFloat}, std::pair{"bfloat16", at::kBFloat16});
  INFO(threads << " threads, " << name << (tied ? ", tied" : ""));
  const TemporaryFolder folder;
  write_small_checkpoint(folder, name, dtype, tied);
  LoadOptions options;
  compare(folder.path(), options);
  options.compute_dtype = at::kBFloat16;
  compare(folder.path(), options);
  options.quantization.double_quant = false;
  options.skip_modules = {"down_proj", "model.layers.1.self_attn.q_proj"};
  compare(folder.path(), options);
  options.load_in_4bit = false;
  compare(folder.path(), options);

  for (const bool double_quant : {true, false}) {
    const TemporaryFolder quantized;
    Quantizer::Options four_bit;
    four_bit.double_quant = double_quant;
    quantize_checkpoint(folder.path(), quantized / "model", four_bit, at::kFloat);
    INFO("quantized before" << (double_quant ? ", twice" : ""));
    compare(quantized / "model", {});
  }
}

TEST_CASE("a streamed load needs a buffer a thread beside the model, and no whole weight") {
  const Threads limited(1);
  const TemporaryFolder folder;
  write_small_checkpoint(folder, "float32", at::kFloat, true);
  LoadOptions options;
  const MemoryPlan plan = plan_memory(settings_of(folder.path(), options));
  const MemoryParts& parts = plan.of(ops::MemoryPhase::kLoad).parts;
  CHECK(parts[static_cast<size_t>(ops::MemoryUse::kLoading)] == Bytes{1 << 20});
  CHECK(plan.of(ops::MemoryPhase::kForward).parts[static_cast<size_t>(ops::MemoryUse::kLoading)] == Bytes{});
  CHECK(parts[static_cast<size_t>(ops::MemoryUse::kDense)] == Bytes{4 * (4000 * 512 + 7 * 512)});
}

TEST_CASE("on a GPU an embedding for the host never is on the device") {
  PlanSettings settings;
  settings.model = format::parse_model_config(small_config("bfloat16", false), "small");
  settings.lora.target_modules = NamesOrPattern("all-linear");
  settings.compute_dtype = at::kBFloat16;
  settings.length = 8;
  settings.device = {at::kCUDA, 90, 1, 132};
  const auto load = [&] { return plan_memory(settings).of(ops::MemoryPhase::kLoad).tensors; };
  const Bytes on_device = load();
  settings.memory.embedding_on_host = true;
  CHECK(on_device - load() == Bytes{2 * 4000 * 512});
  CHECK(plan_memory(settings).pinned_host == Bytes{2 * 4000 * 512});
  settings.model.tie_word_embeddings = true;  // it is the head, too
  CHECK(plan_memory(settings).pinned_host == Bytes{});
}

TEST_CASE("an embedding for the host goes there straight from the file, and nothing else does", "[cuda]") {
  if (!has_gpu()) {
    WARN("no GPU here: nothing to keep it off");
    return;
  }
  const TemporaryFolder folder;
  write_small_checkpoint(folder, "bfloat16", at::kBFloat16, false);
  const format::TensorFiles files(folder.path());
  LoadOptions options;
  options.device = parse_device("cuda");
  options.embedding_on_host = true;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {  // as it is, and converted
    options.compute_dtype = dtype;
    const CausalLM model = load_model(folder.path(), options);
    CHECK(model.decoder().embed_tokens().is_cpu());
    CHECK(model.decoder().embed_tokens().is_pinned());
    CHECK(at::equal(model.decoder().embed_tokens(), read_tensor(files.at("model.embed_tokens.weight")).to(dtype)));
    CHECK(model.decoder().lm_head().is_cuda());
    CHECK(model.device().is_cuda());
  }
}

TEST_CASE("a base for the host goes there as it comes, with the bits of one that goes to the GPU", "[cuda]") {
  if (!has_gpu()) {
    WARN("no GPU here: nothing to keep it off");
    return;
  }
  const TemporaryFolder folder;
  write_small_checkpoint(folder, "bfloat16", at::kBFloat16, false);
  quantize_checkpoint(folder.path(), folder / "quantized", {}, at::kBFloat16);
  LoadOptions options;
  options.device = parse_device("cuda");
  options.compute_dtype = at::kBFloat16;
  options.skip_modules = {"model.layers.1.self_attn.q_proj"};
  for (const std::string& from : {folder.path(), folder / "quantized"}) {
    options.base_on_host = false;
    const CausalLM resident = load_model(from, options);
    options.base_on_host = true;
    const CausalLM host = load_model(from, options);
    CHECK(host.settings().memory().base_on_host);
    CHECK(host.device().is_cuda());
    for (size_t i = 0; i < host.blocks().size(); ++i) {
      for (size_t p = 0; p < host.blocks()[i].weights().projections.size(); ++p) {
        const FrozenWeight& ours = host.blocks()[i].weights().projections[p];
        const FrozenWeight there = resident.blocks()[i].weights().projections[p].to(at::kCPU);
        CHECK(ours.quantized.defined() == there.quantized.defined());
        if (ours.quantized.defined()) {
          CHECK(ours.quantized.packed.is_pinned());
          CHECK(at::equal(ours.quantized.packed, there.quantized.packed));
          CHECK(at::equal(ours.quantized.absmax, there.quantized.absmax));
          CHECK(at::equal(ours.quantized.nested_absmax, there.quantized.nested_absmax));
          CHECK(at::equal(ours.quantized.nested_offset, there.quantized.nested_offset));
        } else {
          CHECK(at::equal(ours.dense, there.dense));
        }
      }
    }
  }
}
