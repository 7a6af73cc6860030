// SPDX-License-Identifier: Apache-2.0
/// Whether exported forms of a model are the trained one: the same prompts through each of them, and what differs.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/io/export.hpp"

namespace qlorapp {

struct VerifyOptions {
  /// Base of adapters: a model's folder or a GGUF file. Empty: the one that the adapter's config names.
  std::string base;
  /// Of the reference, if it is an adapter over a checkpoint in 16 or 32 bits: its base is in NF4 with double quantization, as in training.
  bool load_in_4bit = true;
  at::Device device = at::kCPU;
  std::vector<std::string>
      prompts;  ///< A user's message each; of a model without template the text itself. Empty: default_prompts().
  /// Files of rows, whose perplexity is compared, too; the reference makes tokens of them. May be empty.
  std::vector<std::string> data;
  std::string chat_template;  ///< Of the reference, as ExportOptions::chat_template. May be empty.
  std::string
      text;  ///< Folder of every form's tokenizer and template, which a server is given beside them. Empty: each form's own.
  int64_t max_new_tokens = 32;                                ///< Of each greedy answer.
  std::function<void(int64_t done, int64_t total)> progress;  ///< In forms. May be empty.
};

/// Eight short ones that belong to no subject.
[[nodiscard]] const std::vector<std::string>& default_prompts();

/// One form beside the reference; of the reference itself the same numbers beside itself.
struct VerifiedForm {
  std::string path;
  std::string kind;  ///< "adapter over MODEL, nf4", "checkpoint", "GGUF, q4_k" …
  int64_t prompts = 0;
  int64_t same_texts = 0;           ///< Rendered alike.
  int64_t same_ids = 0;             ///< And tokenized alike.
  int64_t same_first = 0;           ///< Answers whose first token is the reference's.
  double same_tokens = 0;           ///< Share of the reference's greedy tokens before the first that differs.
  double divergence = 0;            ///< Mean over the tokens of the reference's answers: KL divergence from the reference, nats.
  int64_t ended = 0;                ///< Answers that ended before max_new_tokens.
  std::optional<double> loss;       ///< Mean over the targets of `data`, the logarithm of the perplexity.
  std::vector<std::string> causes;  ///< What is wrong, a sentence each; empty: it is the trained model.
};

struct ExportVerification {
  std::vector<VerifiedForm> forms;  ///< The reference first.

  [[nodiscard]] bool holds() const;
  /// The receipt: a JSON object of all numbers.
  [[nodiscard]] std::string json() const;
};

/// @param paths  the reference and at least one other: a PEFT folder, a model's folder, a GGUF file of a model or of an adapter. One is in
///               memory at a time, in float32 where that has at most 8 GiB, else in the checkpoint's dtype.
/// @throws ValueError, FormatError, IoError as load_model and load_adapter; FormatError for a tokenizer or template that is not known here; all of the
///         reference. Another form that is no readable one has that as its cause.
[[nodiscard]] ExportVerification verify_export(const std::vector<std::string>& paths, const VerifyOptions& options);

/// Compares the output of export_model() with the model and adapter that it was made from, and writes the receipt to `written`.verify.json.
/// @returns nothing if memory is short or the reference cannot be read; a warning then says why, and how to verify by hand.
[[nodiscard]] std::optional<ExportVerification> verify_written(const std::string& model, const std::string& adapter,
                                                               const ExportOptions& options, const std::string& written,
                                                               at::Device device);

}  // namespace qlorapp
