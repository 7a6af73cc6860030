// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/export.hpp"

#include <cstdio>
#include <string>

#include "command.hpp"
#include "core/check.hpp"
#include "model_options.hpp"
#include "progress.hpp"
#include "qlorapp/core/units.hpp"
#include "qlorapp/memory/measured_memory.hpp"
#include "qlorapp/text/chat_template.hpp"

namespace qlorapp::cli {

int export_model(const Arguments& arguments) {
  ModelOptions model;
  std::string adapter, gguf, base, chat_template;
  GgufOptions options;
  CommandLine line("export", "--model DIR [--adapter DIR] --gguf FILE",
                   "Writes a model, or a model with its adapter merged, for llama.cpp, Ollama and LM Studio.\nHolds one weight in "
                   "memory at a time.");
  model.add_to(line);
  line.option("adapter", adapter, "PEFT adapter folder");
  line.option("gguf", gguf, "file to write", true);
  line.option("type", options.type, message("one of {}", joined(gguf_types())));
  line.option("base", base,
              "weights to merge into: original (the checkpoint's own; the default if it has them) or dequantized (those that "
              "training used: quantized by quant_type, double_quant and block_size, and back)");
  line.option("chat_template", chat_template, "template in the file: a name or a .jinja file; default: that of adapter or model");
  line.parse(arguments);
  if (!base.empty()) options.merge.base = parse_merge_base(base);
  options.merge.quantization = model.quantization();
  if (!chat_template.empty()) options.chat_template = ChatTemplate::source(chat_template);
  QLORAPP_CHECK_VALUE(!line.given("device"), "[export] --device has no use here: weights are converted by the CPU. Leave it out.");
  for (const char* name : {"quant_type", "double_quant", "block_size"}) {
    QLORAPP_CHECK_VALUE(options.merge.base == MergeBase::kDequantized || !line.given(name),
                        "[export] --{} needs --base dequantized: original weights are not quantized in four bits.", name);
  }
  refuse_hub_name(model.model);
  check_model_folder(model.model);
  if (!adapter.empty()) check_adapter_folder("adapter", adapter);
  ProgressBar bar("exporting");
  options.merge.progress = [&](int64_t done, int64_t total) { bar.update(done, total); };
  Bytes peak;
  {
    const MeasuredMemory memory;
    export_gguf(model.model, adapter, gguf, options);
    peak = {memory.peak()};
  }
  bar.line(message("{} written in {}", gguf, options.type));
  std::printf("peak memory of tensors: %s\n", to_string(peak).c_str());
  return 0;
}

}  // namespace qlorapp::cli
