// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "adapter_file.hpp"
#include "adapter_modules.hpp"
#include "adapter_tensors.hpp"
#include "adapters/adapter_set.hpp"
#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "export_targets.hpp"
#include "files/folder.hpp"
#include "format/model_folder.hpp"
#include "io/tensor_file.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/io/text_files.hpp"

namespace qlorapp {
namespace {

using format::Group;
using format::Role;

/// What a server makes of an adapter folder. docs/export.md names versions and sources.
struct Server {
  std::string_view name;
  bool is_peft;          ///< PEFT computes it: everything is applied.
  bool has_tables;       ///< Adapters of embedding and head.
  bool fills_groups;     ///< Queries need values, and up needs gate.
  int64_t largest_rank;  ///< 0: any.
};
constexpr auto kServers = std::to_array<Server>({{"peft", true, true, false, 0},
                                                 {"transformers", true, true, false, 0},
                                                 {"vllm", false, false, false, 512},
                                                 {"sglang", false, true, true, 0}});
constexpr std::string_view kLlamaCpp = "llama.cpp";
const Server& server_of(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Server& server : kServers) names.push_back(server.name);
  names.push_back(kLlamaCpp);
  const auto found = std::ranges::find(kServers, name, &Server::name);
  QLORAPP_CHECK_VALUE(found != kServers.end(), "[export] adapter_for must be one of {}; got '{}'.{}", joined(names), name,
                      did_you_mean(name, names));
  return *found;
}

class ServerExporter {
 public:
  ServerExporter(const Server& server, const std::string& model, const std::string& adapter)
      : server_(server),
        model_(model),
        folder_(adapter),
        config_(config_of(server, model)),
        adapter_(open_adapter(adapter, format::AdapterUse::kMerge)),
        tensors_(adapter_tensors(adapter_)),
        written_(adapter_.config) {
    if (config_) places_ = adapter_modules(*config_, adapter_, tensors_);
    if (server_.is_peft) copy_all();
    else convert();
  }

  void write(const std::string& output) const {
    files::FreshFolder fresh(output);
    write_tensors(files::path_in(fresh.path(), kAdapterWeights), result_);
    TextFiles(folder_).write(fresh.path());
    format::save_adapter_config(written_, fresh.path());
    adapter_.file.check_unchanged();
    fresh.keep();
  }

 private:
  /// PEFT needs none, so a family that is unknown here has none.
  static std::optional<format::ModelConfig> config_of(const Server& server, const std::string& model) {
    try {
      return format::settled_config(model);
    } catch (const format::UnsupportedModel&) {
      if (!server.is_peft) throw;
      return std::nullopt;
    }
  }

  [[noreturn]] void refuse(const std::string& rule) const {
    throw FormatError(message("[export] {}: {} {}. Serve the merged model (--merged).", folder_, server_.name, rule));
  }

  void add(const std::string& module, const char* part, const at::Tensor& values) {
    result_.emplace_back(message("{}{}{}", kPeftPrefix, module, part), values.contiguous());
  }

  /// Under the names in memory, which PEFT and transformers look for.
  void copy_all() {
    for (const format::TensorEntry& entry : adapter_.file.tensors()) {
      std::string name = entry.name;
      for (const auto& [parameter, place] : places_.found) {
        const std::string stored = message("{}{}.", kPeftPrefix, place.module);
        if (name.starts_with(stored)) name = message("{}{}.{}", kPeftPrefix, place.parameter.module, name.substr(stored.size()));
      }
      result_.emplace_back(std::move(name), read_tensor(adapter_.file, entry));
    }
  }

  void convert() {
    check();
    int64_t rank = 0;
    for (const auto& [name, place] : places_.found) rank = std::max(rank, place.lora->a->shape[0]);
    QLORAPP_CHECK_FORMAT(server_.largest_rank == 0 || rank <= server_.largest_rank,
                         "[export] {}: {} serves adapters of at most rank {}; this one has {}. Serve the merged model (--merged).",
                         folder_, server_.name, server_.largest_rank, rank);
    // The servers scale by lora_alpha / r of the config alone, and hold adapters of one rank.
    const LoraConfig& lora = adapter_.lora;
    const double alpha_over_rank = lora.lora_alpha / static_cast<double>(rank);
    const bool is_plain = std::ranges::all_of(places_.found, [&](const auto& found) {
      const auto& [name, place] = found;
      return place.lora->a->shape[0] == rank && lora.scaling_of(place.module) == alpha_over_rank;
    });
    std::set<std::string> words;
    for (const auto& [name, place] : places_.found) {
      at::Tensor a = read_tensor(adapter_.file, *place.lora->a), b = read_tensor(adapter_.file, *place.lora->b);
      if (!is_plain) {
        const int64_t missing = rank - a.size(0);
        a = at::constant_pad_nd(a.to(at::kFloat), {0, 0, 0, missing});
        b = at::constant_pad_nd(b.to(at::kFloat) * lora.scaling_of(place.module), {0, missing});
      }
      add_pair(place, a, b, words);
    }
    if (server_.fills_groups) fill_groups(rank, words);
    write_config(rank, is_plain ? lora.lora_alpha : static_cast<double>(rank), words);
    if (server_.name == "vllm") log_rank(rank);
  }

  /// What the server would leave out, or cannot compute.
  void check() const {
    if (!config_->family->servers.in_sglang && server_.name == "sglang")
      refuse(message("computes {} through transformers' classes and applies parts of an adapter there",
                     config_->family->architecture));
    if (tensors_.modules.empty()) refuse("serves low-rank matrices, of which it holds none");
    if (adapter_.config.base_fingerprint) refuse("has the original base, which this adapter's initialization changed");
    std::vector<std::string> unserved;
    for (const auto& [name, entry] : tensors_.saved) {
      if (!is_table_of_base(model_, adapter_, tensors_, name)) unserved.push_back(entry->name);
    }
    for (const std::string& module : places_.others) unserved.push_back(tensors_.modules.at(module).a->name);
    for (const auto& [name, module] : tensors_.modules) {
      for (const format::TensorEntry* const other : {module.bias, module.magnitude}) {
        if (other != nullptr) unserved.push_back(other->name);
      }
    }
    for (const auto& [name, place] : places_.found) {
      if (place.parameter.role != Role::kLinear && !server_.has_tables) unserved.push_back(place.lora->a->name);
    }
    if (!unserved.empty()) refuse(message("does not serve {}", joined(unserved)));
  }

  void add_pair(const AdapterModules::Found& place, const at::Tensor& a, const at::Tensor& b, std::set<std::string>& words) {
    const std::string& module = place.parameter.module;
    const auto words_there = server_.name == "vllm" ? config_->family->servers.vllm_gate_up : std::span<const std::string_view>();
    const bool is_gate_up =
        place.parameter.role == Role::kLinear && config_->family->linears[place.parameter.slot].group == Group::kGateUp;
    if (is_gate_up && !words_there.empty()) {
      const std::string path = module.substr(0, module.rfind('.') + 1);
      const int64_t part = b.size(0) / std::ssize(words_there);
      for (size_t i = 0; i < words_there.size(); ++i)
        add_named(path + std::string(words_there[i]), a.clone(), b.narrow(0, static_cast<int64_t>(i) * part, part), words);
    } else if (place.lora->embedding) {
      add(module, ".lora_embedding_A", a);
      add(module, ".lora_embedding_B", b);
      words.insert(module.substr(module.rfind('.') + 1));
    } else {
      add_named(module, a, b, words);
    }
  }

  void add_named(const std::string& module, const at::Tensor& a, const at::Tensor& b, std::set<std::string>& words) {
    add(module, ".lora_A.weight", a);
    add(module, ".lora_B.weight", b);
    words.insert(module.substr(module.rfind('.') + 1));
  }

  /// Zeros for layers without an adapter, where another of their group has one.
  void fill_groups(int64_t rank, std::set<std::string>& words) {
    const auto& rows = config_->family->linears;
    const auto has = [&](const format::Parameter& parameter) { return places_.found.contains(parameter.name()); };
    const std::vector<format::Parameter> linears = format::parameters(*config_, Role::kLinear);
    for (const format::Parameter& parameter : linears) {
      const Group group = rows[parameter.slot].group;
      if ((group != Group::kQkv && group != Group::kGateUp) || has(parameter)) continue;
      const bool is_asked = std::ranges::any_of(linears, [&](const format::Parameter& other) {
        return other.layer == parameter.layer && rows[other.slot].group == group && has(other);
      });
      if (!is_asked) continue;
      add_named(parameter.module, at::zeros({rank, parameter.shape[1]}), at::zeros({parameter.shape[0], rank}), words);
    }
  }

  void write_config(int64_t rank, double alpha, const std::set<std::string>& words) {
    format::AdapterConfig config;
    config.r = rank;
    config.lora_alpha = alpha;
    config.lora_dropout = adapter_.config.lora_dropout;
    config.target_modules = {words.begin(), words.end()};
    config.task_type = adapter_.config.task_type;
    config.base_model_name_or_path = adapter_.config.base_model_name_or_path;
    config.revision = adapter_.config.revision;
    config.inference_mode = true;
    config.peft_version = adapter_.config.peft_version;
    written_ = std::move(config);
  }

  static void log_rank(int64_t rank) {
    constexpr auto kRanks = std::to_array<int64_t>({16, 32, 64, 128, 256, 320, 512});
    log_info(message("[export] start vLLM with --enable-lora --max-lora-rank {}", *std::ranges::lower_bound(kRanks, rank)));
  }

  const Server& server_;
  std::string model_, folder_;
  std::optional<format::ModelConfig> config_;
  AdapterFile adapter_;
  AdapterTensors tensors_;
  AdapterModules places_;
  format::AdapterConfig written_;
  NamedTensors result_;
};

}  // namespace

void export_for_server(const std::string& model, const std::string& adapter, const std::string& output,
                       const ExportOptions& options) {
  if (options.adapter_for == kLlamaCpp) return export_gguf_adapter(model, adapter, output, options.type);
  ServerExporter(server_of(options.adapter_for), model, adapter).write(output);
}

}  // namespace qlorapp
