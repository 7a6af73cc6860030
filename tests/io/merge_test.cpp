// SPDX-License-Identifier: Apache-2.0
/// merge_adapter against W + s·B·A in double, and adapters that are saved and loaded again.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "adapters/adapter_set.hpp"
#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"
#include "io/small_folders.hpp"
#include "io/tensor_file.hpp"
#include "nn/eigen_tensors.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/io/load_model.hpp"
#include "qlorapp/io/merge.hpp"
#include "reference/lora.hpp"

using namespace qlorapp;
using tiny::base_folder, tiny::folder_model, tiny::folder_tensors, tiny::matrix;

namespace {

LoraConfig folder_lora(bool dora) {
  LoraConfig lora;
  lora.r = 4;
  lora.lora_alpha = 6;
  lora.use_rslora = true;  // scaling 6 / √4 = 3
  lora.use_dora = dora;
  lora.target_modules = {"k_proj", "down_proj"};
  return lora;
}

/// Adapters with every value away from its start, in a folder.
void write_folder_adapter(const std::string& folder, const LoraConfig& lora) {
  CausalLM model = folder_model(base_folder().path(), /*in_4bit=*/false);
  model.add_adapters(lora, 1);
  at::manual_seed(2);
  {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model.arena().parameters()) parameter.add_(at::rand(parameter.sizes()).mul_(0.05));
  }
  save_adapter(model, folder, "base");
}

/// The exact merged weight, in double.
reference::Matrix merged_reference(const at::Tensor& weight, const NamedTensors& adapter, const std::string& name) {
  const std::string module = "base_model.model." + name.substr(0, name.rfind('.'));
  std::map<std::string, at::Tensor> values(adapter.begin(), adapter.end());
  reference::LoraLayer layer{matrix(weight.to(at::kFloat)), {}, {}, 3.0, {}};
  if (!values.contains(module + ".lora_A.weight")) return layer.weight;
  layer.a = matrix(values[module + ".lora_A.weight"]);
  layer.b = matrix(values[module + ".lora_B.weight"]);
  const reference::Matrix sum = layer.weight + layer.scaling * layer.b * layer.a;
  const at::Tensor magnitude = values[module + ".lora_magnitude_vector"];
  if (!magnitude.defined()) return sum;
  return matrix(magnitude.view({1, -1})).cwiseQuotient(layer.norm()).row(0).asDiagonal() * sum;
}

/// Values that are further than half a step of a dtype with that epsilon from the exact ones, less what a sum in float32 may be off.
int64_t not_nearest(const at::Tensor& got, const reference::Matrix& exact, double epsilon) {
  const reference::Matrix values = matrix(got.to(at::kFloat));
  const double slack = 1e-6 * exact.cwiseAbs().maxCoeff();
  int64_t count = 0;
  for (int64_t i = 0; i < exact.size(); ++i) {
    int exponent = 0;  // |x| = m · 2^exponent with m in [1/2, 1)
    (void)std::frexp(exact.data()[i], &exponent);
    const bool near = std::fabs(values.data()[i] - exact.data()[i]) <= 0.5 * std::ldexp(epsilon, exponent - 1) + slack;
    count += near ? 0 : 1;
  }
  return count;
}

}  // namespace

TEST_CASE("a merged weight is W + s·B·A, rounded once, and the others are copied", "[io][cpu]") {
  const bool dora = GENERATE(false, true);
  INFO("DoRA: " << dora);
  const TemporaryFolder folder;
  write_folder_adapter(folder / "adapter", folder_lora(dora));
  const NamedTensors adapter = read_tensors(folder / "adapter/adapter_model.safetensors");
  REQUIRE(adapter.size() == (dora ? 18 : 12));
  merge_adapter(base_folder().path(), folder / "adapter", folder / "merged");
  MergeOptions wide;
  wide.dtype = at::kFloat;
  merge_adapter(base_folder().path(), folder / "adapter", folder / "wide", wide);
  const auto stored = folder_tensors(base_folder().path()), merged = folder_tensors(folder / "merged"),
             widened = folder_tensors(folder / "wide");
  REQUIRE(merged.size() == stored.size());
  for (const auto& [name, weight] : stored) {
    INFO(name);
    REQUIRE(merged.at(name).scalar_type() == at::kBFloat16);
    REQUIRE(widened.at(name).scalar_type() == at::kFloat);
    if (has(name, "k_proj") || has(name, "down_proj")) {
      const reference::Matrix exact = merged_reference(weight, adapter, name);
      CHECK((exact - matrix(weight.to(at::kFloat))).cwiseAbs().maxCoeff() > 1e-4);  // the adapter does something
      CHECK(not_nearest(merged.at(name), exact, 0x1p-7) == 0);
      CHECK(not_nearest(widened.at(name), exact, 0x1p-23) == 0);
    } else {
      CHECK(at::equal(merged.at(name), weight));
      CHECK(at::equal(widened.at(name), weight.to(at::kFloat)));
    }
  }
}

TEST_CASE("what training saw is merged into alike from the original folder and from its codes", "[io][cpu]") {
  const TemporaryFolder folder;
  write_folder_adapter(folder / "adapter", folder_lora(false));
  const NamedTensors adapter = read_tensors(folder / "adapter/adapter_model.safetensors");
  quantize_checkpoint(base_folder().path(), folder / "codes", {}, at::kBFloat16);
  MergeOptions options;
  options.dtype = at::kFloat;
  merge_adapter(folder / "codes", folder / "adapter", folder / "of codes", options);
  options.base = MergeBase::kDequantized;
  merge_adapter(base_folder().path(), folder / "adapter", folder / "merged", options);
  CHECK(folder.read("merged/model.safetensors") == folder.read("of codes/model.safetensors"));
  CHECK_FALSE(has(folder.read("of codes/config.json"), "quantization_config"));
  const auto stored = folder_tensors(base_folder().path()), merged = folder_tensors(folder / "merged");
  for (const char* layer : {"model.layers.0.self_attn.k_proj.weight", "model.layers.2.mlp.gate_proj.weight"}) {
    const Quantizer quantizer;
    const at::Tensor seen = quantizer.dequantize(quantizer.quantize(stored.at(layer)), at::kFloat);
    CHECK(not_nearest(merged.at(layer), merged_reference(seen, adapter, layer), 0x1p-23) == 0);
  }
  const LogitDrift drift =
      measure_drift(base_folder().path(), folder / "adapter", folder / "merged", options, at::Device(at::kCPU));
  CHECK(drift.tokens == 32);
  CHECK(drift.same_choice == 32);
  CHECK(drift.largest_change <= 1e-4 * drift.largest_logit);
  options.base = MergeBase::kOriginal;
  const auto original = [&] { merge_adapter(folder / "codes", folder / "adapter", folder / "none", options); };
  CHECK(has(thrown<ValueError>(original), "base=original needs the unquantized weights"));
}

TEST_CASE("a merge that is refused names the tensor and leaves nothing", "[io][cpu]") {
  const TemporaryFolder folder;
  write_folder_adapter(folder / "adapter", folder_lora(false));
  const std::string file = folder / "adapter/adapter_model.safetensors";
  const NamedTensors good = read_tensors(file);
  const auto refused = [&](NamedTensors tensors) {
    write_tensors(file, tensors);
    const auto merge = [&] { merge_adapter(base_folder().path(), folder / "adapter", folder / "merged"); };
    const std::string error = thrown<FormatError>(merge);
    INFO(error);
    CHECK_FALSE(std::filesystem::exists(folder / "merged"));
    CHECK(folder.entries() == 1);  // the adapter
    return error;
  };
  const std::string first = good[0].first;
  NamedTensors tensors = good;
  tensors.erase(tensors.begin());
  CHECK(has(refused(tensors), "lacks '" + first + "', which adapter_config.json requires"));
  tensors = good;
  tensors[0].second = tensors[0].second.t().contiguous();
  CHECK(has(refused(tensors), "'" + first + "' must have shape "));
  tensors = good;
  tensors[0].second.view({-1})[0] = INFINITY;
  CHECK(has(refused(tensors), "'" + first + "' must be finite"));
  (void)folder.write("merged/notes.txt", "mine");
  write_tensors(file, good);
  const auto onto = [&] { merge_adapter(base_folder().path(), folder / "adapter", folder / "merged"); };
  CHECK(has(thrown<ValueError>(onto), folder / "merged"));
  CHECK(folder.read("merged/notes.txt") == "mine");
}

TEST_CASE("a model's adapter comes back from its folder with the same values and hidden states", "[io][cpu]") {
  const TemporaryFolder folder;
  CausalLM model = tiny::make_model(at::kFloat), other = tiny::make_model(at::kFloat);
  const Batch batch = tiny::make_batch(67);
  const at::NoGradGuard no_grad;
  const at::Tensor expected = model.hidden_states(batch, /*training=*/false, 0, 0);
  save_adapter(model, folder.path(), "base");
  for (const at::Tensor& parameter : other.arena().parameters()) parameter.add_(1.0);
  REQUIRE_FALSE(at::allclose(other.hidden_states(batch, false, 0, 0), expected));
  load_adapter(other, folder.path());
  CHECK(at::equal(other.arena().values(), model.arena().values()));
  CHECK(at::equal(other.hidden_states(batch, false, 0, 0), expected));
  load_adapter(other, folder.path(), "second");
  CHECK(at::equal(other.adapters().at("second").arena.values(), model.arena().values()));
}

TEST_CASE("an adapter that does not fit changes nothing in the model", "[io][cpu]") {
  const TemporaryFolder folder;
  CausalLM model = tiny::make_model(at::kFloat);
  save_adapter(model, folder.path(), "base");
  const std::string file = folder / "adapter_model.safetensors";
  NamedTensors tensors = read_tensors(file);
  const std::string last = tensors.back().first;
  tensors.back().second = tensors.back().second.t().contiguous();
  write_tensors(file, tensors);
  const at::NoGradGuard no_grad;
  model.arena().values().add_(1.0);
  const at::Tensor before = model.arena().values().clone();
  for (const char* name : {"default", "second"}) {
    const std::string error = thrown<FormatError>([&] { load_adapter(model, folder.path(), name); });
    CHECK(has(error, file + ": '" + last + "' must have shape "));
  }
  CHECK(at::equal(model.arena().values(), before));
  CHECK(model.adapters().names() == std::vector<std::string>{"default"});
  LoraConfig wider = model.lora_config();
  wider.r = 8;
  model.add_adapters(wider, 1, "wider");
  CHECK(has(thrown<ValueError>([&] { load_adapter(model, folder.path(), "wider"); }), "has other adapters than " + folder.path()));
  model.arena().values().view({-1})[0] = NAN;
  CHECK(has(thrown<ValueError>([&] { save_adapter(model, folder / "new", "base"); }), "inf or nan"));
  CHECK_FALSE(std::filesystem::exists(folder / "new"));
}
