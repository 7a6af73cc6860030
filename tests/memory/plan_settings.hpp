// SPDX-License-Identifier: Apache-2.0
/// A plan's settings for published models on real cards.
#pragma once

#include "qlorapp/memory/gpu_table.hpp"
#include "qlorapp/memory/known_models.hpp"
#include "qlorapp/memory/planner.hpp"

/// r = 16 on all linear layers, rows of 2,048 tokens, bf16, moments in eight bits.
inline qlorapp::PlanSettings settings_for(const char* model, const char* gpu = "H200") {
  qlorapp::PlanSettings settings;
  settings.model = qlorapp::find_model_config(model);
  settings.lora.r = 16;
  settings.lora.target_modules = qlorapp::NamesOrPattern("all-linear");
  settings.compute_dtype = at::kBFloat16;
  settings.length = 2048;
  settings.optimizer_is_8bit = true;
  settings.device = qlorapp::find_gpu(gpu).device();
  return settings;
}

inline qlorapp::PlanSettings settings_for(const char* model, qlorapp::Keep keep) {
  qlorapp::PlanSettings settings = settings_for(model);
  settings.segments = qlorapp::keep_in_each_block(settings.model.num_hidden_layers, keep);
  return settings;
}
