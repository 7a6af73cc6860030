// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/merge.hpp"

#include <cstdio>
#include <string>

#include "command.hpp"
#include "core/check.hpp"
#include "model_options.hpp"
#include "progress.hpp"
#include "qlorapp/core/units.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/memory/gpu_table.hpp"
#include "qlorapp/memory/measured_memory.hpp"

namespace qlorapp::cli {

int merge(const Arguments& arguments) {
  ModelOptions model;
  std::string adapter, output, base, dtype, max_shard_size = "5GB";
  bool drift = false;
  CommandLine line("merge", "--model DIR --adapter DIR --output DIR",
                   "Merges an adapter into its base, of any family, and writes one unquantized checkpoint.\nHolds one weight in "
                   "memory at a time.");
  model.add_to(line);
  line.option("adapter", adapter, "PEFT adapter folder", true);
  line.option("output", output, "new or empty folder", true);
  line.option("base", base,
              "weights to merge into: original (the checkpoint's own; the default if it has them) or dequantized (those that "
              "training used: quantized by quant_type, double_quant and block_size, and back)");
  line.option("dtype", dtype, "dtype of the written weights: bfloat16, float16 or float32; default: the checkpoint's");
  line.option("max_shard_size", max_shard_size, "largest size of a weight file");
  line.option(
      "drift", drift,
      "load both models on --device and print how far the merged logits differ from those of the four-bit base with its adapter");
  line.parse(arguments);

  MergeOptions options;
  if (!base.empty()) options.base = parse_merge_base(base);
  if (!dtype.empty()) options.dtype = parse_dtype(dtype);
  options.quantization = model.quantization();
  options.max_shard_size = parse_bytes("max_shard_size", max_shard_size);
  QLORAPP_CHECK_VALUE(drift || !line.given("device"), "[merge] --device needs --drift: weights are merged by the CPU.");
  for (const char* name : {"quant_type", "double_quant", "block_size"}) {
    QLORAPP_CHECK_VALUE(drift || options.base == MergeBase::kDequantized || !line.given(name),
                        "[merge] --{} needs --base dequantized, or --drift: original weights are not quantized.", name);
  }
  model.open();
  check_adapter_folder("adapter", adapter);
  const at::Device device = parse_device(model.device);
  ProgressBar bar("merging");
  options.progress = [&](int64_t done, int64_t total) { bar.update(done, total); };
  Bytes peak;
  {
    const MeasuredMemory memory;
    merge_adapter(model.model, adapter, output, options);
    peak = {memory.peak()};
  }
  bar.line(message("merged checkpoint written to {}", output));
  std::printf("peak memory of tensors: %s\n", to_string(peak).c_str());
  if (!drift) return 0;
  const LogitDrift found = measure_drift(model.model, adapter, output, options, device);
  std::printf(
      "drift: logits differ by at most %.3g from those of the four-bit base with its adapter (largest logit: %.3g); the most "
      "probable token is the same after %lld of %lld tokens\n",
      found.largest_change, found.largest_logit, static_cast<long long>(found.same_choice), static_cast<long long>(found.tokens));
  return 0;
}

}  // namespace qlorapp::cli
