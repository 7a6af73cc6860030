// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/export.hpp"

#include <cstdio>
#include <string>

#include "command.hpp"
#include "core/check.hpp"
#include "model_options.hpp"
#include "progress.hpp"
#include "qlorapp/core/units.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/memory/measured_memory.hpp"
#include "qlorapp/train/importance.hpp"
#include "qlorapp/train/verify_export.hpp"

namespace qlorapp::cli {
int export_to(const Arguments& arguments) {
  ModelOptions model;
  std::string adapter, base, importance;
  bool verify = true;
  ExportOptions options;
  CommandLine line(
      "export", "--model DIR [--adapter DIR] --gguf FILE | --ollama DIR | --adapter_for NAME --output DIR",
      "Writes a model, a model with its adapter merged, or an adapter for other programs.\nHolds one weight in memory at a "
      "time.");
  model.add_to(line);
  line.option("adapter", adapter, "PEFT adapter folder");
  line.option("gguf", options.gguf, "file to write for llama.cpp, Ollama and LM Studio: the model, with the adapter merged");
  line.option("gguf_adapter", options.gguf_adapter, "file to write: the adapter alone, for llama.cpp's --lora");
  line.option("ollama", options.ollama, "new or empty folder: a GGUF file, and a Modelfile with template and stop tokens");
  line.option("ollama_base", options.ollama_base,
              "with --ollama: model of Ollama, or GGUF file, over which the adapter alone is to run");
  line.option("merged", options.merged, "new or empty folder: a checkpoint as `qlorapp merge` writes it");
  line.option("adapter_for", options.adapter_for,
              "peft, transformers, vllm, sglang or llama.cpp: the adapter alone as it reads it, written to --output");
  line.option("output", options.output, "with --adapter_for: new or empty folder; for llama.cpp a file");
  line.option("type", options.type,
              message("of a model's weights one of {}, by default Q4_K_M; of an adapter F32, the default, F16 or BF16",
                      joined(gguf_types())));
  line.option("base", base,
              "weights to merge into: original (the checkpoint's own; the default if it has them) or dequantized (those that "
              "training used: quantized by quant_type, double_quant and block_size, and back)");
  line.option("chat_template", options.chat_template,
              "with --gguf and --ollama: a name or a .jinja file; default: the template of adapter or model");
  line.option("importance", importance,
              "with --gguf and --ollama: file of rows, best those of the training; rounding errors of the channels that these use "
              "most weigh "
              "most (importance matrix)");
  line.option("verify", verify, "run eight prompts through the model and what was written of it, and compare (verify-export)");
  line.parse(arguments);
  if (!base.empty()) options.merge.base = parse_merge_base(base);
  options.merge.quantization = model.quantization();
  QLORAPP_CHECK_VALUE(!line.given("device"), "[export] --device has no use here: weights are converted by the CPU. Leave it out.");
  for (const char* name : {"quant_type", "double_quant", "block_size"}) {
    QLORAPP_CHECK_VALUE(options.merge.base == MergeBase::kDequantized || !line.given(name),
                        "[export] --{} needs --base dequantized: original weights are not quantized in four bits.", name);
  }
  model.open();
  if (!adapter.empty()) check_adapter_folder("adapter", adapter);
  if (!importance.empty())
    options.importance = [&] { return measure_importance(model.model, adapter, importance, {.device = parse_device("auto")}); };
  ProgressBar bar("exporting");
  options.merge.progress = [&](int64_t done, int64_t total) { bar.update(done, total); };
  std::string written;
  Bytes peak;
  {
    const MeasuredMemory memory;
    written = export_model(model.model, adapter, options);
    peak = {memory.peak()};
  }
  bar.line(message("{} written{}{}", written,
                   options.gguf.empty() ? "" : message(" in {}", options.type.empty() ? "Q4_K_M" : options.type),
                   options.ollama.empty() ? "" : message("; next: cd {} && ollama create NAME -f Modelfile", written)));
  std::printf("peak memory of tensors: %s\n", to_string(peak).c_str());
  if (!verify) return 0;
  const auto found = verify_written(model.model, adapter, options, written, parse_device("auto"));
  if (!found) return 0;
  print_verification(*found);
  print_line(stdout, message("receipt: {}.verify.json", written));
  return found->holds() ? 0 : 1;
}

}  // namespace qlorapp::cli
