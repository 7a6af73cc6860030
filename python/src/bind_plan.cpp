// SPDX-License-Identifier: Apache-2.0
// Plans, and the probe that checks them.
#include <nlohmann/json.hpp>

#include "bind.hpp"
#include "core/check.hpp"
#include "format/config_json.hpp"
#include "lora_config_json.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/io/compute_dtype.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/memory/batch_finder.hpp"
#include "qlorapp/memory/budget.hpp"
#include "qlorapp/memory/generation_plan.hpp"
#include "qlorapp/memory/known_models.hpp"
#include "qlorapp/memory/plan_report.hpp"
#include "qlorapp/memory/timeline_svg.hpp"
#include "qlorapp/train/batch_probe.hpp"
#include "qlorapp/train/plan_run.hpp"
#include "quantizer_options.hpp"
#include "train/qlora_defaults.hpp"

namespace qlorapp::python {
namespace {

struct Planned {
  PlanSettings settings;
  MemoryPlan plan;
  std::string card;
  Bytes room;   ///< Of the card.
  Probe probe;  ///< Of a step that was taken; empty until then.
};

std::shared_ptr<Planned> planned(const PlanSettings& settings, const std::string& card, Bytes room) {
  return std::make_shared<Planned>(Planned{settings, plan_memory_in(settings, room), card, room, {}});
}

std::string card_of(at::Device device) {
  const std::string name = gpu_name(device);
  return name.empty() ? "a CPU" : name;
}

/// lora_config=None.
constexpr std::string_view kNoConfig = "{}";

LoraConfig checked_lora_config(const std::string& json) {
  LoraConfig config = lora_config_from(json);
  config.validate();
  return config;
}

TrainingArguments arguments_from(const std::string& json) {
  TrainingArguments args;
  format::from_json(format::parse_json(json, "TrainingArguments"), args, "TrainingArguments");
  args.validate();
  return args;
}

struct Place {
  ops::PlannedDevice device;
  Gpu rates;
  Bytes room;
  std::string card;
};

/// @param gpu  a card of the table, its memory, "cpu", or "auto": the one that is here.
Place place_of(const std::string& gpu) {
  if (gpu != "cpu" && gpu != "auto") {
    const Gpu card = find_gpu(gpu);
    return {card.device(), card, room_on(card, {}), card.name.empty() ? gpu : std::string(card.name)};
  }
  const at::Device device = parse_device(gpu);
  return {planned_device(device), rates_of(gpu_name(device), gpu_architecture(device), {}), memory_for(device), card_of(device)};
}

std::shared_ptr<Planned> plan_configs(const std::string& model, const std::string& lora_json, const std::string& args_json,
                                      const std::string& gpu, std::optional<at::ScalarType> requested, bool load_in_4bit,
                                      const std::string& quant_type, bool double_quant, std::vector<std::string> skip_modules) {
  const format::Json given_args = format::parse_json(args_json, "TrainingArguments");
  const IsGiven given = [&](std::string_view name) { return given_args.contains(name); };
  TrainingArguments args;
  LoraConfig lora;
  set_qlora_defaults(args);
  set_qlora_defaults(lora);
  format::from_json(given_args, args, "TrainingArguments");
  settle_qlora_defaults(args, lora, given);
  args.validate();
  if (lora_json != kNoConfig) lora = checked_lora_config(lora_json);
  const Place place = place_of(gpu);
  const format::ModelConfig config = find_model_config(model);
  const ComputeDtype computed = choose_compute_dtype(requested, config.dtype, place.device.type, place.device.architecture);
  if (computed.is_substitute) log_info(message("plan: the run computes in {}", computed.reason));
  PlanSettings settings = plan_settings(config, lora, args,
                                        {.load_in_4bit = load_in_4bit,
                                         .quantization = quantizer_options(quant_type, 64, double_quant, 256, "none"),
                                         .skip_modules = std::move(skip_modules),
                                         .compute_dtype = computed.dtype,
                                         .device = place.device});
  if (needs_checkpointing(args, settings, given, place.room)) {
    args.gradient_checkpointing = true;
    settings.segments = parse_segments(args.keep_text(), config.num_hidden_layers);
  }
  return planned(fit_arguments(settings, args, place.rates, place.room).settings, place.card, place.room);
}

struct PlannedAnswers {
  PlanSettings settings;
  GenerationPlan plan;
  int64_t most = 0;  ///< Rows of this length that fit together.
};

/// @param lora_json  of the adapter; kNoConfig: none is loaded.
std::shared_ptr<PlannedAnswers> plan_answers(const std::string& model, const std::string& lora_json,
                                             std::optional<int64_t> prompt_tokens, int64_t max_new_tokens, int64_t max_rows,
                                             int64_t cache, bool do_sample, const std::string& gpu, std::optional<int64_t> budget,
                                             std::optional<at::ScalarType> requested, bool load_in_4bit,
                                             const std::string& quant_type, bool double_quant,
                                             std::vector<std::string> skip_modules) {
  constexpr int64_t kMostRows = 4096;
  QLORAPP_CHECK_VALUE(max_rows >= 1 && max_rows <= kMostRows, "[plan] max_rows must be from 1 to {}; got {}.", kMostRows, max_rows);
  const Place place = place_of(gpu);
  PlanSettings settings;
  settings.model = find_model_config(model);
  const bool has_adapter = lora_json != kNoConfig;
  if (has_adapter) settings.lora = checked_lora_config(lora_json);
  settings.load_in_4bit = load_in_4bit;
  settings.quantization = quantizer_options(quant_type, 64, double_quant, 256, "none");
  settings.skip_modules = std::move(skip_modules);
  settings.compute_dtype =
      choose_compute_dtype(requested, settings.model.dtype, place.device.type, place.device.architecture).dtype;
  settings.device = place.device;
  const GenerationRows rows{.prompts = std::vector<int64_t>(static_cast<size_t>(max_rows),
                                                            planned_prompt_tokens(settings.model, prompt_tokens, max_new_tokens)),
                            .max_new_tokens = max_new_tokens,
                            .max_rows = max_rows,
                            .cache = {cache},
                            .sampling = {.do_sample = do_sample, .top_p = do_sample ? kPlannedTopP : 1.0},
                            .has_adapter = has_adapter};
  const Bytes room = budget ? std::min(Bytes{*budget}, place.room) : generation_room(place.room);
  GenerationPlan plan = plan_generation(settings, rows, room);
  const int64_t most = largest_rows(settings, rows, room, kMostRows);
  return std::make_shared<PlannedAnswers>(PlannedAnswers{std::move(settings), std::move(plan), most});
}

PlanSettings settings_for(const CausalLM& model, int64_t batch, int64_t length, bool optimizer_is_8bit, bool evaluates) {
  PlanSettings settings = settings_of(model);
  settings.batch = batch;
  settings.length = length;
  settings.optimizer_is_8bit = optimizer_is_8bit;
  settings.eval_batch = evaluates ? batch : 0;
  settings.device = planned_device(model.device());
  return settings;
}

/// The plan of what Trainer(model, args) would do over rows of up to `length` tokens.
std::shared_ptr<Planned> plan_loaded(const CausalLM& model, const std::string& args_json) {
  const TrainingArguments args = arguments_from(args_json);
  const Bytes room = memory_for(model.device());
  return planned(fit_arguments(model, args, args.max_length, args.eval_strategy != "no").settings, card_of(model.device()), room);
}

std::map<std::string, int64_t> by_name(const MemoryParts& parts) {
  std::map<std::string, int64_t> named;
  for (size_t i = 0; i < parts.size(); ++i) named.emplace(ops::to_string(static_cast<ops::MemoryUse>(i)), parts[i].count);
  return named;
}

py::dict phases_of(const MemoryPlan& plan) {
  py::dict phases;
  for (size_t i = 0; i < plan.phases.size(); ++i) {
    const PhasePlan& phase = plan.phases[i];
    if (!phase.planned) continue;
    py::dict row;
    row["tensors"] = phase.tensors.count;
    row["allocated"] = phase.allocated.count;
    row["reserved"] = phase.reserved.count;
    row["parts"] = by_name(phase.parts);
    phases[py::str(std::string(ops::to_string(static_cast<ops::MemoryPhase>(i))))] = row;
  }
  return phases;
}

}  // namespace

void bind_plan(py::module_& m) {
  py::class_<Planned, std::shared_ptr<Planned>>(m, "MemoryPlan", "include/qlorapp/memory/planner.hpp")
      .def_property_readonly("peak_allocated", [](const Planned& self) { return self.plan.peak_allocated().count; })
      .def_property_readonly("peak_reserved", [](const Planned& self) { return self.plan.peak_reserved().count; })
      .def_property_readonly("fits", [](const Planned& self) { return self.plan.fits; })
      .def_property_readonly("batch", [](const Planned& self) { return self.settings.batch; })
      .def_property_readonly("pinned_host", [](const Planned& self) { return self.plan.pinned_host.count; })
      .def_property_readonly("phases", [](const Planned& self) { return phases_of(self.plan); })
      .def_property_readonly("summary", [](const Planned& self) { return summary_line(self.plan, self.settings); })
      .def_property_readonly("checklist", [](const Planned& self) { return checklist(self.plan, self.settings); })
      .def_property_readonly(
          "measured",
          [](const Planned& self) { return self.probe.moments.empty() ? std::nullopt : std::optional(self.probe.peak.count); })
      .def(
          "measure", [](Planned& self, CausalLM& model) { self.probe = probe_planned(model, self.settings, /*records=*/true); },
          py::arg("model"), NoGil())
      .def(
          "svg",
          [](const Planned& self, const std::string& model, std::optional<int64_t> budget) {
            std::optional<Bytes> limit = budget ? std::optional(Bytes{*budget}) : std::nullopt;
            if (!limit && self.settings.device.type == at::kCUDA) limit = self.room;
            return timeline_svg(self.plan, timeline_title(model, self.settings, self.card), limit, self.probe.moments);
          },
          py::arg("model") = "", py::arg("budget") = std::nullopt);

  py::class_<PlannedAnswers, std::shared_ptr<PlannedAnswers>>(m, "GenerationPlan", "include/qlorapp/memory/generation_plan.hpp")
      .def_property_readonly("peak_allocated", [](const PlannedAnswers& self) { return self.plan.memory.peak_allocated().count; })
      .def_property_readonly("peak_reserved", [](const PlannedAnswers& self) { return self.plan.memory.peak_reserved().count; })
      .def_property_readonly("fits", [](const PlannedAnswers& self) { return self.plan.memory.fits; })
      .def_property_readonly("rows", [](const PlannedAnswers& self) { return self.plan.rows; })
      .def_property_readonly("most_rows", [](const PlannedAnswers& self) { return self.most; })
      .def_property_readonly("bytes_per_token", [](const PlannedAnswers& self) { return self.plan.position.count; })
      .def_property_readonly("cache_memory", [](const PlannedAnswers& self) { return self.plan.cache.count; })
      .def_property_readonly("phases", [](const PlannedAnswers& self) { return phases_of(self.plan.memory); })
      .def_property_readonly("summary", [](const PlannedAnswers& self) { return summary_line(self.plan, self.settings); });
  m.def("plan_generation", &plan_answers, py::arg("model"), py::arg("lora_config_json"), py::kw_only(),
        py::arg("prompt_tokens").none(true), py::arg("max_new_tokens"), py::arg("max_rows"), py::arg("cache_memory"),
        py::arg("do_sample"), py::arg("gpu"), py::arg("memory_budget").none(true), py::arg("requested_dtype").none(true),
        py::arg("load_in_4bit"), py::arg("quant_type"), py::arg("double_quant"), py::arg("skip_modules"), NoGil());
  m.def("plan_memory", &plan_configs, py::arg("model"), py::arg("lora_config_json"), py::arg("args_json"), py::kw_only(),
        py::arg("gpu"), py::arg("requested_dtype").none(true), py::arg("load_in_4bit"), py::arg("quant_type"),
        py::arg("double_quant"), py::arg("skip_modules"), NoGil());
  m.def(
      "largest_batch",
      [](const CausalLM& model, int64_t length, int64_t room, int64_t most, bool optimizer_is_8bit, bool evaluates) {
        return largest_batch(settings_for(model, 1, length, optimizer_is_8bit, evaluates), {room}, most);
      },
      py::arg("model"), py::arg("length"), py::arg("room"), py::arg("most"), py::kw_only(), py::arg("optimizer_is_8bit"),
      py::arg("evaluates"), NoGil());
  m.def("plan_model", &plan_loaded, py::arg("model"), py::arg("args_json"), NoGil());
  m.def(
      "probe_step",
      [](CausalLM& model, int64_t batch, int64_t length, bool optimizer_is_8bit) {
        return probe_step(model, {batch, length, 1, batch, optimizer_is_8bit, /*records=*/false}).peak.count;
      },
      py::arg("model"), py::arg("batch"), py::arg("length"), py::kw_only(), py::arg("optimizer_is_8bit"), NoGil());
  m.def(
      "memory_for", [](const std::string& device) { return memory_for(parse_device(device)).count; }, py::arg("device"));
  m.def(
      "dtype_on",
      [](const std::string& device, at::ScalarType wanted) { return dtype_on(gpu_architecture(parse_device(device)), wanted); },
      py::arg("device"), py::arg("wanted"));
  m.def(
      "advice_for_one_row",
      [](const CausalLM& model, int64_t length, bool optimizer_is_8bit, int64_t room, bool evaluates) {
        return advice_for_one_row(settings_for(model, 1, length, optimizer_is_8bit, evaluates), {room});
      },
      py::arg("model"), py::arg("length"), py::kw_only(), py::arg("optimizer_is_8bit"), py::arg("room"),
      py::arg("evaluates") = true, NoGil());
  m.def(
      "parse_bytes", [](const std::string& what, const std::string& text) { return parse_bytes(what, text).count; },
      py::arg("what"), py::arg("text"));
}

}  // namespace qlorapp::python
