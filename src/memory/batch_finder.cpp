// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/batch_finder.hpp"

#include <ATen/Parallel.h>

#include <algorithm>

#include "core/check.hpp"
#include "largest.hpp"
#include "nn/decoder.hpp"

namespace qlorapp {

int64_t largest_batch(PlanSettings settings, Bytes room, int64_t most) {
  QLORAPP_CHECK_VALUE(most >= 1, "[find_max_batch_size] the largest batch to consider must be at least 1; got {}.", most);
  QLORAPP_CHECK_VALUE(room.count > 0, "[find_max_batch_size] the memory to fill must be above 0; got {} bytes.", room.count);
  return largest_that(most, [&](int64_t batch) {
    settings.batch = batch;
    return plan_memory(settings, room).fits;
  });
}

PlanSettings settings_of(const CausalLM& model) {
  QLORAPP_CHECK_VALUE(!model.adapters().empty(),
                      "[plan] the model has no adapters. Add them first: they and their optimizer are part of the plan.");
  PlanSettings settings;
  settings.model = model.config();
  settings.lora = model.lora_config();
  settings.compute_dtype = model.dtype();
  settings.segments = model.settings().segments();
  settings.memory = model.settings().memory();
  settings.deterministic = model.settings().deterministic();
  settings.load_in_4bit = false;
  for (const format::Parameter& linear : model.decoder().linear_layers()) {
    const QuantizedTensor& weight = model.decoder().own_linear(linear).quantized;
    if (!weight.defined()) {
      settings.skip_modules.push_back(linear.module);
    } else if (linear.layer == 0) {
      settings.load_in_4bit = true;
      settings.keep_blocks = !has_code_book(weight.quant_type);
      if (has_code_book(weight.quant_type)) settings.quantization = Quantizer::like(weight).options();
    }
  }
  if (!settings.load_in_4bit) settings.skip_modules.clear();
  settings.device.type = model.device().type();
  settings.device.threads = at::get_num_threads();
  settings.float8 = model.settings().float8();
  if (model.decoder().ranks()) settings.base_shards = model.decoder().ranks()->size();
  return settings;
}

}  // namespace qlorapp
