// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/verify_export.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "command.hpp"
#include "command_line.hpp"
#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "files/file_reader.hpp"
#include "files/folder.hpp"
#include "hub.hpp"
#include "model_options.hpp"
#include "progress.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/io/gguf.hpp"

namespace qlorapp::cli {
namespace {

/// A prompt each line; of lines that are JSON objects the first message of the user, or the prompt.
std::vector<std::string> read_prompts(const std::string& path, int64_t most) {
  const std::string text = files::FileReader(path).read_all(size_t{64} << 20);
  std::vector<std::string> prompts;
  for (size_t begin = 0; begin < text.size() && std::ssize(prompts) < most;) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    if (line.front() != '{') {
      prompts.push_back(std::move(line));
      continue;
    }
    const format::Json row = format::parse_json(line, path);
    for (const char* key : {"prompt", "instruction", "question", "text"}) {
      if (row.contains(key) && row[key].is_string()) {
        prompts.push_back(row[key]);
        break;
      }
    }
    const auto messages = row.find("messages");
    if (messages == row.end() || !messages->is_array()) continue;
    for (const format::Json& said : *messages) {
      if (!said.is_object() || said.value("role", "") != "user" || !said.contains("content") || !said["content"].is_string())
        continue;
      prompts.push_back(said["content"]);
      break;
    }
  }
  QLORAPP_CHECK_FORMAT(
      !prompts.empty(),
      "[verify] {} must hold prompts: a line of text each, or rows with messages, prompt, instruction, question or text; "
      "it holds none.",
      path);
  return prompts;
}

std::string found_on_hub(const std::string& name) { return is_hub_name(name) ? hub_folder(name, "model", "") : name; }

}  // namespace

void print_verification(const ExportVerification& found) {
  size_t width = 4;
  for (const VerifiedForm& form : found.forms) width = std::max(width, form.path.size());
  std::printf("%-*s  %7s  %6s  %6s  %9s  %5s%s\n", static_cast<int>(width), "form", "prompts", "first", "greedy", "KL", "ended",
              found.forms.front().loss ? "  perplexity" : "");
  for (const VerifiedForm& form : found.forms) {
    std::string line =
        message("{:<{}}  {:>3}/{:<3}  {:>2}/{:<3}  {:>5.1f}%  {:>9.2e}  {:>2}/{:<2}", form.path, width, form.same_ids, form.prompts,
                form.same_first, form.prompts, 100 * form.same_tokens, form.divergence, form.ended, form.prompts);
    if (form.loss) line += message("  {:>10.4g}", std::exp(*form.loss));
    print_line(stdout, message("{}  {}", line, form.kind));
    for (const std::string& cause : form.causes) print_line(stdout, message("  off: {}", cause));
  }
  print_line(stdout, found.holds() ? "every form is the trained model" : "NOT the trained model");
}

int verify_export(const Arguments& arguments) {
  std::string model, data, prompts, receipt, device = "auto";
  int64_t count = 8;
  VerifyOptions options;
  CommandLine line("verify-export", "FORM FORM …",
                   "Runs the same prompts through a trained model, the first form, and what was exported of it: a PEFT folder, a "
                   "model's folder, a "
                   "GGUF file\nof a model or an adapter. Exit code 1 if one of them is another model.");
  line.option("model", model,
              "folder, GGUF file or name on the Hugging Face Hub, which adapters lie over; default: what the adapter names");
  line.option("prompts", prompts, "file of prompts: a line of text each, or rows as train reads them; default: eight short ones");
  line.option("data", data, "rows whose perplexity is compared, too: a file, or a name on the Hub (as train's --eval_data)");
  line.option("count", count, "of the prompts of that file");
  line.option("max_new_tokens", options.max_new_tokens, "of each answer");
  line.option("load_in_4bit", options.load_in_4bit, "the base of an adapter is in NF4, as in training; false: as it is stored");
  line.option("receipt", receipt, "JSON file to write; default: beside the second form");
  line.option("device", device, "auto (a GPU if present), cpu, cuda or cuda:<number>");
  std::vector<std::string> forms;
  Arguments named;
  for (const std::string& word : arguments) {
    if (named.empty() && !word.starts_with('-')) forms.push_back(word);
    else named.push_back(word);
  }
  line.parse(named);
  QLORAPP_CHECK_VALUE(forms.size() >= 2,
                      "[verify] needs the trained model and what was exported of it, in front of the options; got {} path(s).",
                      forms.size());
  for (std::string& form : forms) form = found_on_hub(form);
  options.base = found_on_hub(model);
  if (!data.empty()) options.data = row_files(data, Split::kEval);
  options.device = parse_device(device);
  if (!prompts.empty()) options.prompts = read_prompts(prompts, count);
  if (receipt.empty()) receipt = forms[1] + ".verify.json";
  ProgressBar bar("verifying");
  options.progress = [&](int64_t done, int64_t total) { bar.update(done, total); };
  const ExportVerification found = qlorapp::verify_export(forms, options);
  bar.line(message("{} forms compared", found.forms.size()));
  print_verification(found);
  files::write_file_atomically(receipt, found.json());
  print_line(stdout, message("receipt: {}", receipt));
  return found.holds() ? 0 : 1;
}

}  // namespace qlorapp::cli
