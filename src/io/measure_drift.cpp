// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "qlorapp/io/adapter.hpp"
#include "qlorapp/io/load_model.hpp"
#include "qlorapp/io/merge.hpp"
#include "qlorapp/nn/batch.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {
namespace {

/// Of a prompt that is the same for every model: tokens from all over the vocabulary.
at::Tensor logits_of(CausalLM& model) {
  const int64_t count = std::min<int64_t>(32, model.config().max_position_embeddings);
  const at::Tensor tokens = at::arange(count, at::kLong).mul_(7919).add_(1).remainder_(model.config().vocab_size).unsqueeze(0);
  const Batch batch = Batch::of_equal_rows(tokens).to(model.device());
  return model.logits(model.hidden_states(batch, /*training=*/false, 0, 0)).to(at::kCPU, at::kFloat);
}

}  // namespace

LogitDrift measure_drift(const std::string& model, const std::string& adapter, const std::string& merged,
                         const MergeOptions& options, at::Device device) {
  const at::NoGradGuard no_grad;
  LoadOptions load;
  load.device = device;
  load.compute_dtype = at::kFloat;
  load.quantization = options.quantization;
  load.skip_modules = options.skip_modules;
  at::Tensor before, after;
  {
    CausalLM base = load_model(model, load);
    load_adapter(base, adapter);
    before = logits_of(base);
  }
  {
    load.load_in_4bit = false;
    CausalLM plain = load_model(merged, load);
    after = logits_of(plain);
  }
  return {before.size(0), before.abs().max().item<double>(), (after - before).abs().max().item<double>(),
          before.argmax(1).eq(after.argmax(1)).sum().item<int64_t>()};
}

}  // namespace qlorapp
