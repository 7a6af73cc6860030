// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/adapter_registry.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <set>
#include <utility>

#include "adapters/adapter_init.hpp"
#include "adapters/adapter_set.hpp"
#include "adapters/dora.hpp"
#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "nn/base_fingerprint.hpp"
#include "nn/decoder.hpp"
#include "ops/embedding.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp {
namespace {

std::string parameter_name(std::string_view module, std::string_view parameter) {
  return message("{}{}.{}", kPeftPrefix, module, parameter);
}

bool decomposes_weight(const LoraConfig& config) {
  const LoraInit init = config.init();
  return init == LoraInit::kOlora || init == LoraInit::kPissa || init == LoraInit::kLoftq;
}

/// The order in memory: a block's A stand before its B, so that the A of projections that share an input have one gradient (R,
/// in).
std::vector<size_t> memory_layout(const AdapterSet& set) {
  std::vector<size_t> layout;
  for (const auto& block : set.slots) {
    for (const auto part : {&AdapterSet::Slot::a, &AdapterSet::Slot::b, &AdapterSet::Slot::magnitude}) {
      for (const AdapterSet::Slot& slot : block) {
        if (slot.*part >= 0) layout.push_back(static_cast<size_t>(slot.*part));
      }
    }
  }
  if (set.embed_tokens >= 0) layout.push_back(static_cast<size_t>(set.embed_tokens));
  if (set.lm_head >= 0 && set.lm_head != set.embed_tokens) layout.push_back(static_cast<size_t>(set.lm_head));
  return layout;
}

}  // namespace

AdapterRegistry::AdapterRegistry(std::shared_ptr<Decoder> decoder)
    : decoder_(std::move(decoder)), none_(std::make_unique<AdapterSet>()) {}
AdapterRegistry::AdapterRegistry(AdapterRegistry&&) noexcept = default;
AdapterRegistry& AdapterRegistry::operator=(AdapterRegistry&&) noexcept = default;
AdapterRegistry::~AdapterRegistry() = default;

/// Names in the config that this model does not have raise or log a warning; none is dropped silently.
void AdapterRegistry::check_targets(const LoraConfig& config) const {
  std::vector<std::string> names;
  for (format::Parameter& linear : decoder_->linear_layers()) names.push_back(std::move(linear.module));
  if (!config.targets_all_linear()) {
    for (const std::string& table : {format::embedding_module(decoder_->config()), std::string(format::kHeadModule)}) {
      QLORAPP_CHECK_VALUE(!config.matches(table),
                          "[lora] target_modules names {}, which gets no low-rank adapter here. Train it in full: modules_to_save.",
                          table);
    }
  }
  const std::vector<std::string> words = format::linear_words(decoder_->config());
  const std::vector<std::string_view> known(words.begin(), words.end());
  const bool any = std::any_of(names.begin(), names.end(), [&](const std::string& name) { return config.matches(name); });
  for (const std::string& unmatched : any ? config.unmatched_targets(names) : std::vector<std::string>{}) {  // none: an error
    log_warning_once(
        message("[lora] target_modules names '{}', which this model does not have.{}", unmatched, did_you_mean(unmatched, known)));
  }
  for (const std::string& wanted : config.modules_to_save.value_or(std::vector<std::string>{})) {
    const auto is_end_of = [&](std::string_view module) { return !wanted.empty() && module.ends_with(wanted); };
    QLORAPP_CHECK_VALUE(is_end_of(format::embedding_module(decoder_->config())) || is_end_of(format::kHeadModule),
                        "[lora] modules_to_save can hold embed_tokens and lm_head; got '{}'. Linear layers are frozen in four bits "
                        "and get adapters (target_modules); norms stay frozen.",
                        wanted);
  }
  if (config.bias != "none")
    log_warning_once(message("[lora] bias='{}' trains nothing here: biases of a {} model, if it has any, stay frozen", config.bias,
                             decoder_->config().family->model_type));
}

void AdapterRegistry::add(const LoraConfig& given, uint64_t seed, const std::string& name, const WeightSource& source) {
  QLORAPP_CHECK_VALUE(!sets_.contains(name),
                      "[lora] the model has adapters named '{}' already; load or train those, delete them, or give another name.",
                      name);
  QLORAPP_CHECK_VALUE(!name.empty() && name.find('.') == std::string::npos && name.find('/') == std::string::npos,
                      "[lora] an adapter's name must not be empty and hold no '.' or '/'; got '{}'.", name);
  given.validate();
  check_targets(given.for_model(decoder_->config()));
  const LoraConfig config = given.for_text_of(decoder_->config());
  const bool decomposes = decomposes_weight(config);
  QLORAPP_CHECK_VALUE(!decomposes || sets_.empty(),
                      "[lora] init_lora_weights that decomposes the base needs a model without adapters; it has {}.",
                      joined(this->names()));
  const std::vector<format::Parameter> linears = decoder_->linear_layers();
  std::vector<std::pair<std::string, std::vector<int64_t>>> parameters;
  const auto add = [&](std::string_view module, std::string_view parameter, std::vector<int64_t> shape) {
    parameters.emplace_back(parameter_name(module, parameter), std::move(shape));
    return std::ssize(parameters) - 1;
  };
  AdapterSet set;
  set.config = config;
  std::vector<DecoderBlock>& blocks = decoder_->blocks();
  for (const DecoderBlock& block : blocks) {
    set.slots.emplace_back(block.weights().projections.size());
    set.blocks.emplace_back(block.weights().projections.size());
  }
  for (const format::Parameter& linear : linears) {
    if (!config.matches(linear.module)) continue;
    const auto block = static_cast<size_t>(linear.layer);
    const int64_t rank = config.rank_of(linear.module), out = linear.shape[0], in = linear.shape[1];
    AdapterSet::Slot& slot = set.slots[block][linear.slot];
    slot.a = add(linear.module, "lora_A.weight", {rank, in});
    slot.b = add(linear.module, "lora_B.weight", {out, rank});
    if (config.use_dora) slot.magnitude = add(linear.module, "lora_magnitude_vector", {out});
    LoraAdapter& adapter = set.blocks[block][linear.slot].emplace();
    adapter.scaling = config.scaling_of(linear.module);
    adapter.dropout = config.lora_dropout;
  }
  if (parameters.empty()) {
    const std::vector<std::string> words = format::linear_words(decoder_->config());
    throw ValueError(message("[lora] target_modules names no linear layer of this model; it has {}.",
                             joined(std::set<std::string>(words.begin(), words.end()))));
  }
  const std::string embed_tokens = format::embedding_module(decoder_->config());
  const bool tied = decoder_->config().tie_word_embeddings, embeds = config.saves(embed_tokens),
             heads = config.saves(format::kHeadModule);
  const std::vector<int64_t> table{decoder_->config().vocab_size, decoder_->config().hidden_size};
  if (tied && config.ensure_weight_tying && (embeds || heads)) {
    set.embed_tokens = set.lm_head = add(embed_tokens, "weight", table);
  } else {
    if (embeds) set.embed_tokens = add(embed_tokens, "weight", table);
    if (heads) set.lm_head = add(format::kHeadModule, "weight", table);
    if (tied && (embeds || heads)) {
      log_warning_once(
          "[lora] embedding and head are one table in this model; modules_to_save trains a copy, and they part. To keep them "
          "one: "
          "ensure_weight_tying=True");
    }
  }
  set.arena = AdapterArena(std::move(parameters), decoder_->device(), memory_layout(set));
  set.bind();

  std::vector<std::pair<const format::Parameter*, FrozenWeight>> changed;
  for (const format::Parameter& linear : linears) {
    const auto block = static_cast<size_t>(linear.layer);
    const AdapterSet::Slot& slot = set.slots[block][linear.slot];
    if (slot.a < 0) continue;
    LoraAdapter& adapter = *set.blocks[block][linear.slot];
    if (decoder_->device().is_meta()) {  // a plan: shapes without values
      if (slot.magnitude >= 0) adapter.weight_norm_squared = at::empty_like(adapter.magnitude.detach());
      continue;
    }
    FrozenWeight weight = decoder_->own_linear(linear);
    if (decomposes || slot.magnitude >= 0) weight = decoder_->linear(linear).to(decoder_->device());
    if (decomposes) {
      FrozenWeight rest = initialize_adapter_from_weight(adapter, config, linear.module, weight,
                                                         source ? source(linear.module) : at::Tensor(), seed);
      const bool same = rest.quantized.defined() && rest.quantized.packed.is_same(weight.quantized.packed);
      if (!same) changed.emplace_back(&linear, decoder_->residency() == Residency::kResident ? std::move(rest) : rest.to(at::kCPU));
    } else {
      initialize_adapter(adapter, config, linear.module, seed);
    }
    if (slot.magnitude < 0) continue;
    adapter.weight_norm_squared = squared_row_norms(weight);
    adapter.magnitude.detach().copy_(dora_norm(weight, adapter));
  }
  const at::NoGradGuard no_grad;
  if (set.embed_tokens >= 0) set.arena.parameter(set.embed_tokens).detach().copy_(decoder_->embed_tokens());
  if (set.lm_head >= 0 && set.lm_head != set.embed_tokens) set.arena.parameter(set.lm_head).detach().copy_(decoder_->lm_head());
  for (auto& [linear, rest] : changed)
    decoder_->replace_projection(linear->layer, static_cast<Projection>(linear->slot), std::move(rest));
  if (!changed.empty()) changed_base_ = four_bit_fingerprint(*decoder_);  // here: all ranks that hold shards are
  sets_.emplace(name, std::make_unique<AdapterSet>(std::move(set)));
  if (active_.empty()) {
    active_ = name;
    show_active();
  }
}

std::vector<std::string> AdapterRegistry::names() const {
  std::vector<std::string> names;
  for (const auto& [name, set] : sets_) names.push_back(name);
  return names;
}

AdapterSet& AdapterRegistry::at(const std::string& name) {
  return const_cast<AdapterSet&>(std::as_const(*this).at(name));  // the object itself is not const here
}

const AdapterSet& AdapterRegistry::at(const std::string& name) const {
  if (name.empty()) return active();
  const auto found = sets_.find(name);
  if (found != sets_.end()) return *found->second;
  const std::vector<std::string> known = names();
  throw ValueError(message("[lora] there are no adapters named '{}'; the model has {}.{}", name, joined(known),
                           did_you_mean(name, std::vector<std::string_view>(known.begin(), known.end()))));
}

void AdapterRegistry::activate(const std::string& name) {
  QLORAPP_CHECK_VALUE(!name.empty(), "[lora] an adapter's name must not be empty.");
  static_cast<void>(at(name));
  active_ = name;
  show_active();
}

void AdapterRegistry::remove(const std::string& name) {
  static_cast<void>(at(name));
  sets_.erase(name);
  if (active_ == name) active_ = sets_.empty() ? std::string() : sets_.begin()->first;
  show_active();
}

void AdapterRegistry::adopt_parameter(int64_t i, const at::Tensor& parameter, const std::string& name) {
  AdapterSet& set = at(name);
  set.arena.adopt_parameter(i, parameter);
  set.bind();
  show_active();
}

void AdapterRegistry::enable(bool enabled) {
  enabled_ = enabled;
  show_active();
}

void AdapterRegistry::show_active() {
  const AdapterSet& set = active();
  std::vector<DecoderBlock>& blocks = decoder_->blocks();
  for (size_t block = 0; block < blocks.size(); ++block) {
    DecoderBlock::Adapters& adapters = blocks[block].adapters();
    adapters = in_use() ? set.blocks[block] : DecoderBlock::Adapters(adapters.size());
  }
}

at::Tensor AdapterRegistry::trained_embedding() const {
  const AdapterSet& set = active();
  return in_use() && set.embed_tokens >= 0 ? set.arena.parameter(set.embed_tokens) : at::Tensor();
}

at::Tensor AdapterRegistry::trained_head() const {
  const AdapterSet& set = active();
  return in_use() && set.lm_head >= 0 ? set.arena.parameter(set.lm_head) : at::Tensor();
}

at::Tensor AdapterRegistry::embed(const at::Tensor& tokens) const {
  const at::Tensor table = trained_embedding();
  const double factor = decoder_->embedding_factor();
  if (!table.defined()) {
    at::Tensor own = ops::embedding(decoder_->embed_tokens(), tokens);
    return factor == 1 ? own : own.mul_(factor);
  }
  // A plan's tensors: not every operator has a Meta kernel in C++.
  const at::Tensor rows =
      table.is_meta() ? at::empty({tokens.size(0), table.size(1)}, table.options()) : at::embedding(table, tokens);
  return factor == 1 ? rows.to(decoder_->dtype()) : rows.to(decoder_->dtype()) * factor;
}

at::Tensor AdapterRegistry::head() const {
  const at::Tensor master = trained_head();
  return master.defined() ? master.to(decoder_->dtype()) : decoder_->lm_head();
}

}  // namespace qlorapp
