// SPDX-License-Identifier: Apache-2.0
#include "train/run_report.hpp"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>
#include <torch/version.h>

#include <nlohmann/json.hpp>

#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "files/json_file.hpp"
#include "json/python_json.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/train/plan_run.hpp"

namespace qlorapp {
namespace {

using format::Json;

constexpr const char* kFile = "run_report.json";

Json memory_of(const CausalLM& model, const TrainingArguments& args, const RunReport& report) {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  Json memory = {{"planned_bytes", planned_peak(model, args, report.longest_row, report.evaluates).count},
                 {"process_peak_resident_bytes", static_cast<int64_t>(usage.ru_maxrss) * 1024}};
  if (!model.device().is_cpu()) {
    const auto stats = at::getDeviceAllocator(model.device().type())->getDeviceStats(model.device().index());
    memory["device_peak_allocated_bytes"] = stats.allocated_bytes[0].peak;
    memory["device_peak_reserved_bytes"] = stats.reserved_bytes[0].peak;
  }
  return memory;
}

}  // namespace

void write_run_report(const std::string& folder, const RunReport& report, const CausalLM& model, const TrainState& state,
                      const TrainingArguments& args) {
  const auto or_null = [](const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); };
  const at::Device device = model.device();
  const Json json = {
      {"outcome", report.outcome},
      {"error", or_null(report.error)},
      {"run_id", report.run_id},
      {"resumed_from", or_null(report.resumed_from)},
      {"resumed_with_changes", report.resumed_with_changes},
      {"first_step", report.first_step},
      {"global_step", state.global_step},
      {"max_steps", report.max_steps},
      {"optimizer_steps", state.optimizer.step_count()},
      {"skipped_steps", state.skipped_steps},
      {"rollbacks", state.rollbacks},
      {"train_loss", state.global_step > 0 ? state.loss_sum / static_cast<double>(state.global_step) : 0.0},
      {"input_tokens", state.tokens_seen},
      {"train_runtime", report.seconds},
      {"rows", report.rows},
      {"rows_ending_in_eos", report.rows_ending_in_eos},
      {"memory", memory_of(model, args, report)},
      {"device", device.is_cpu() ? "cpu" : gpu_name(device)},
      {"versions", {{"qlorapp", QLORAPP_VERSION}, {"torch", TORCH_VERSION}}},
  };
  files::write_file_atomically(files::path_in(folder, kFile), format::dump_python_json(json, format::kConfigStyle) + "\n");
}

void add_to_run_report(const std::string& folder, const Comparison& comparison) {
  const std::string path = files::path_in(folder, kFile);
  if (!files::exists(path)) return;
  Json report = files::read_json_file(path, {.allow_nonfinite = true});
  report["comparison"] = comparison.to_json();
  files::write_file_atomically(path, format::dump_python_json(report, format::kConfigStyle) + "\n");
}

}  // namespace qlorapp
