// SPDX-License-Identifier: Apache-2.0
/// The named adapters of a model. One is active at a time: the decoder's blocks compute with it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/adapters/lora_adapter.hpp"
#include "qlorapp/adapters/lora_config.hpp"

namespace qlorapp {

struct AdapterSet;  // one adapter's config, arena and places in the model: src/adapters/adapter_set.hpp
class Decoder;

/// PEFT's name for an adapter that was given none.
inline constexpr const char* kDefaultAdapter = "default";

class AdapterRegistry {
 public:
  /// Without adapters: the base alone.
  explicit AdapterRegistry(std::shared_ptr<Decoder> decoder);
  AdapterRegistry(AdapterRegistry&&) noexcept;
  AdapterRegistry& operator=(AdapterRegistry&&) noexcept;
  ~AdapterRegistry();

  /// Adds adapters to the linear layers that the config names, with values by its init_lora_weights and the seed. The first set
  /// becomes the active one; one that subtracts a part from the base (PiSSA, OLoRA) must be the only one.
  /// @param source  weights from before quantization, for the initializations that decompose them.
  /// @throws ValueError if there are adapters of that name, the config matches no layer (naming those that exist), or it names a
  ///         module that cannot have what it asks for.
  void add(const LoraConfig& config, uint64_t seed, const std::string& name = kDefaultAdapter, const WeightSource& source = {});
  /// If it was the active one, the first of the others becomes that. Its arena is freed: no reference to it stays valid.
  void remove(const std::string& name);

  [[nodiscard]] bool empty() const { return sets_.empty(); }
  /// In alphabetical order.
  [[nodiscard]] std::vector<std::string> names() const;
  /// @param name  empty: the active one.  @throws ValueError naming the nearest, if there is none of that name.
  [[nodiscard]] AdapterSet& at(const std::string& name);
  [[nodiscard]] const AdapterSet& at(const std::string& name) const;

  /// Of the active one; a set without parameters where there are no adapters.
  [[nodiscard]] AdapterSet& active() { return active_.empty() ? *none_ : *sets_.at(active_); }
  [[nodiscard]] const AdapterSet& active() const { return active_.empty() ? *none_ : *sets_.at(active_); }
  /// Empty where there are none.
  [[nodiscard]] const std::string& active_name() const { return active_; }
  /// @throws ValueError as at().
  void activate(const std::string& name);
  /// Turns all adapters off (the base model) or on again.
  void enable(bool enabled);
  /// Whether the decoder computes with the active one.
  [[nodiscard]] bool in_use() const { return !sets_.empty() && enabled_; }

  /// AdapterArena::adopt_parameter, and points the block that uses it at the new tensor object.
  void adopt_parameter(int64_t i, const at::Tensor& parameter, const std::string& name = "");
  /// The fingerprint of the base's codes after an initialization took a part out of it: adapters then fit no other base than this one.
  [[nodiscard]] std::optional<uint64_t> changed_base() const { return changed_base_; }

  /// The float32 table that the active adapter trains in place of the frozen one; undefined where it trains none.
  [[nodiscard]] at::Tensor trained_embedding() const;
  [[nodiscard]] at::Tensor trained_head() const;
  /// Rows of the embedding, (M, D) in the compute dtype.
  [[nodiscard]] at::Tensor embed(const at::Tensor& tokens) const;
  /// (V, D) in the compute dtype, on the graph of the trained one.
  [[nodiscard]] at::Tensor head() const;

 private:
  void check_targets(const LoraConfig& config) const;
  void show_active();

  std::shared_ptr<Decoder> decoder_;
  std::map<std::string, std::unique_ptr<AdapterSet>> sets_;
  std::unique_ptr<AdapterSet> none_;
  std::string active_;
  bool enabled_ = true;
  std::optional<uint64_t> changed_base_;
};

}  // namespace qlorapp
