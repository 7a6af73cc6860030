// SPDX-License-Identifier: Apache-2.0
/// Adapters of a torch::nn model of one's own, to and from a PEFT folder.
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "catch.hpp"
#include "format/safetensors.hpp"
#include "qlorapp/core/error.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/nn/inject.hpp"
#include "qlorapp/nn/lora_linear_module.hpp"

using namespace qlorapp;
using Catch::Matchers::ContainsSubstring;

namespace {

struct Model : torch::nn::Module {
  Model() : up(register_module("up", LoraLinearModule(16, 24))), down(register_module("down", LoraLinearModule(24, 16))) {}
  LoraLinearModule up, down;
};

Model adapted(const LoraConfig& config, uint64_t seed) {
  at::manual_seed(5);
  Model model;
  inject(model, config, seed);
  return model;
}

struct Folder {
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "qlorapp_XXXXXX").string();
    path = mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

}  // namespace

TEST_CASE("a model's adapters come back from a PEFT folder, under PEFT's names", "[io][cpu]") {
  const Folder folder;
  LoraConfig config{.r = 4, .target_modules = {"up", "down"}, .lora_alpha = 8};
  config.use_dora = true;
  const Model model = adapted(config, 1);
  const auto named = adapter_parameters(model);
  for (const auto& [name, tensor] : named) tensor.detach().add_(0.25);
  save_adapter(named, config, folder.path, "my-model");

  const format::SafetensorsFile file(folder.path + "/adapter_model.safetensors");
  REQUIRE(file.tensors().size() == 6);
  CHECK(file.find("base_model.model.up.lora_A.weight") != nullptr);
  CHECK(file.find("base_model.model.down.lora_magnitude_vector") != nullptr);

  const Model other = adapted(config, 2);
  const LoraConfig read = load_adapter(adapter_parameters(other), folder.path);
  CHECK(read.same_shape(config));
  CHECK(read.base_model_name_or_path == "my-model");
  const auto loaded = adapter_parameters(other);
  for (size_t i = 0; i < named.size(); ++i) {
    CHECK(loaded[i].first == named[i].first);
    CHECK(at::equal(loaded[i].second, named[i].second));
  }
}

TEST_CASE("a folder of another model changes nothing, and values that are not finite are not saved", "[io][cpu]") {
  const Folder folder;
  const LoraConfig config{.r = 4, .target_modules = {"up", "down"}, .lora_alpha = 8};
  const Model model = adapted(config, 1);
  save_adapter(adapter_parameters(model), config, folder.path, "my-model");
  const Model other = adapted({.r = 2, .target_modules = {"up", "down"}}, 2);
  const at::Tensor before = other.up->layer().a().detach().clone();
  CHECK_THROWS_WITH(load_adapter(adapter_parameters(other), folder.path), ContainsSubstring("must have shape [2, 16]"));
  CHECK(at::equal(other.up->layer().a(), before));
  model.up->layer().b().detach().fill_(std::nan(""));
  CHECK_THROWS_WITH(save_adapter(adapter_parameters(model), config, folder.path + "/broken", "my-model"),
                    ContainsSubstring("inf or nan"));
  CHECK_FALSE(std::filesystem::exists(folder.path + "/broken"));
}
