// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "core/check.hpp"
#include "model_options.hpp"
#include "progress.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/model_config.hpp"

namespace qlorapp::cli {

int quantize(const Arguments& arguments) {
  ModelOptions model;
  std::string output, compute_dtype = "bfloat16", compat = "none";
  CommandLine line("quantize", "--model DIR --output DIR",
                   "Writes a checkpoint whose linear layers are stored in four bits, as bitsandbytes stores them.");
  model.add_to(line);
  line.option("output", output, "new or empty folder", true);
  line.option("compute_dtype", compute_dtype, "bnb_4bit_compute_dtype of the written config: float32, bfloat16 or float16");
  line.option("compat", compat, "bnb: encode the scales exactly as bitsandbytes does; none: use the nearest code");
  line.alias("bnb_4bit_compute_dtype", "compute_dtype");
  line.parse(arguments);
  QLORAPP_CHECK_VALUE(compat == "none" || compat == "bnb", "[compat] must be none or bnb; got '{}'.", compat);
  Quantizer::Options options = model.quantization();
  if (compat == "bnb") options.compat = Compat::kBnb;
  model.open();
  (void)model.config();  // a folder without a model is refused before rows are read
  ProgressBar bar("quantizing");
  quantize_checkpoint(model.model, output, options, parse_dtype(compute_dtype),
                      [&](int64_t done, int64_t total) { bar.update(done, total); });
  bar.line(message("quantized checkpoint written to {}", output));
  return 0;
}

}  // namespace qlorapp::cli
