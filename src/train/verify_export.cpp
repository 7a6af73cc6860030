// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/verify_export.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "format/model_folder.hpp"
#include "io/gguf_adapter.hpp"
#include "json/python_json.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/data/dataset.hpp"
#include "qlorapp/format/adapter_config.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/io/gguf.hpp"
#include "qlorapp/io/load_model.hpp"
#include "qlorapp/io/text_files.hpp"
#include "qlorapp/json/json.hpp"
#include "qlorapp/nn/generate.hpp"
#include "qlorapp/text/chat_template.hpp"
#include "qlorapp/text/tokenizer.hpp"
#include "qlorapp/train/evaluate.hpp"

namespace qlorapp {
namespace {

constexpr int64_t kMostInFloat32 = int64_t{8} << 30;
/// Beyond these the weights are others, whatever their type loses.
constexpr double kMostDivergence = 0.5, kChanged = 1e-4, kUnchanged = 1e-7;

using Ids = std::vector<int64_t>;

/// Where a form lies.
struct Place {
  std::string path, model, adapter;  ///< Folders; adapter is empty for a model.
  std::string kind;
};

Place place_of(const std::string& path, const VerifyOptions& options) {
  const bool is_file = is_gguf_file(path);
  if (is_file && !is_gguf_adapter(path)) return {path, model_folder(path), "", "GGUF"};
  const bool is_adapter = is_file || (files::exists(files::path_in(path, "adapter_config.json")) &&
                                      !files::exists(files::path_in(path, "config.json")));
  if (!is_adapter) return {path, path, "", "checkpoint"};
  std::string base = options.base;
  if (base.empty() && !is_file) base = format::load_adapter_config(path).base_model_name_or_path.value_or("");
  QLORAPP_CHECK_VALUE(files::exists(base),
                      "[verify] the base of the adapter {} must be a folder or a GGUF file; got '{}'. Give it as base (--model).",
                      path, base);
  const std::string model = model_folder(base);
  return {path, model, is_file ? adapter_folder(path, format::settled_config(model)) : path,
          message("adapter over {}", model_path(base))};
}

/// A form in memory.
struct Form {
  Place place;
  CausalLM model;
  Tokenizer tokenizer;
  std::optional<ChatTemplate> chat;
  Ids ends;
};

std::string storage_of(const CausalLM& model) {
  std::set<std::string> kinds;
  for (const format::Parameter& linear : model.decoder().linear_layers()) {
    const FrozenWeight& weight = model.decoder().own_linear(linear);
    kinds.insert(weight.quantized.defined() ? std::string(to_string(weight.quantized.quant_type))
                                            : std::string(at::toString(weight.dense.scalar_type())));
  }
  std::string all;
  for (const std::string& kind : kinds) all += (all.empty() ? "" : " and ") + kind;
  return all;
}

Form open(const Place& place, const VerifyOptions& options, bool is_reference) {
  const format::ModelConfig config = format::settled_config(place.model);
  LoadOptions load;
  load.device = options.device;
  load.load_in_4bit = !place.adapter.empty() && options.load_in_4bit && config.blocks.empty();
  const bool fits = format::parameter_count(config) * 4 <= kMostInFloat32;
  load.compute_dtype = fits ? at::kFloat : at::kBFloat16;
  const bool has_own_text = !place.adapter.empty() && TextFiles::has_tokenizer(place.adapter);
  const std::string text = !options.text.empty() ? options.text : has_own_text ? place.adapter : place.model;
  const bool has_template = !options.chat_template.empty() && (is_reference || !options.text.empty());
  Form form{place,
            load_model(place.model, load),
            Tokenizer::from_folder(text, place.model),
            has_template ? ChatTemplate::choose(options.chat_template, text) : ChatTemplate::from_folder(text),
            {}};
  form.place.kind += ", " + storage_of(form.model);
  if (!place.adapter.empty()) load_adapter(form.model, place.adapter);
  std::set<int64_t> ends(form.model.config().eos_token_ids.begin(), form.model.config().eos_token_ids.end());
  for (const TokenId id : form.tokenizer.eos_ids()) ends.insert(id);
  if (const auto end = form.chat ? form.chat->end_of_turn() : std::nullopt) {
    if (const auto id = form.tokenizer.token_to_id(*end)) ends.insert(*id);
  }
  form.ends = {ends.begin(), ends.end()};
  return form;
}

struct Prompt {
  std::string text;
  Ids ids;
};

std::vector<Prompt> render(const Form& form, const std::vector<std::string>& prompts) {
  std::vector<Prompt> out;
  for (const std::string& prompt : prompts) {
    Prompt made;
    const std::vector<Message> messages{{"user", prompt}};
    made.text = form.chat ? form.chat->render(messages, {.add_generation_prompt = true, .turns = false}).text : prompt;
    for (const TokenId id : form.tokenizer.encode(made.text, !form.chat)) made.ids.push_back(id);
    out.push_back(std::move(made));
  }
  return out;
}

/// (tokens of the answer, V) log-probabilities of each of its tokens, behind the prompt and those before it.
at::Tensor log_probabilities(CausalLM& model, const Ids& prompt, const Ids& answer) {
  Ids tokens = prompt;
  tokens.insert(tokens.end(), answer.begin(), answer.end());
  const Batch batch = Batch::of_equal_rows(at::tensor(at::ArrayRef<int64_t>(tokens)).unsqueeze(0)).to(model.device());
  const at::Tensor hidden = model.hidden_states(batch, /*training=*/false, 0, 0);
  const auto first = static_cast<int64_t>(prompt.size()) - 1;
  return model.logits(hidden.narrow(0, first, static_cast<int64_t>(answer.size()))).to(at::kCPU, at::kFloat).log_softmax(-1);
}

/// Of each prompt's answer; nothing where a form has not the answer's tokens.
using Scores = std::vector<std::optional<at::Tensor>>;

/// Mean KL divergence of `other` from `own`, over the tokens that both have.
double divergence(const at::Tensor& own, const at::Tensor& other) {
  const int64_t tokens = std::min(own.size(1), other.size(1));
  const at::Tensor p = own.narrow(1, 0, tokens), q = other.narrow(1, 0, tokens);
  return std::max(0.0, (p.exp() * (p - q)).sum(-1).mean().item<double>());
}

std::vector<Ids> answers_of(Form& form, const std::vector<Prompt>& prompts, int64_t most) {
  std::vector<Ids> ids;
  for (const Prompt& prompt : prompts) ids.push_back(prompt.ids);
  GenerateOptions options;
  options.max_new_tokens = most;
  options.fits_positions = true;  // a long prompt has a shorter answer in every form
  options.eos_token_ids = form.ends;
  return generate(form.model, ids, options);
}

double shared_tokens(const Ids& own, const Ids& other) {
  const auto end = std::mismatch(own.begin(), own.end(), other.begin(), other.end()).first;
  return own.empty() ? 1.0 : static_cast<double>(end - own.begin()) / static_cast<double>(own.size());
}

std::string shown(std::string_view text) {
  std::string out = nlohmann::json(text.substr(0, 60)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return text.size() > 60 ? out + "…" : out;
}

class Verifier {
 public:
  explicit Verifier(const VerifyOptions& options)
      : options_(options), prompts_(options.prompts.empty() ? default_prompts() : options.prompts) {}

  VerifiedForm reference(const std::string& path) {
    reference_ = place_of(path, options_);
    Form form = open(reference_, options_, true);
    check_room(form.model.config().vocab_size);
    rendered_ = render(form, prompts_);
    for (const std::string& file : options_.data) {
      const DatasetOptions rows{.prefer_assistant_only = form.chat.has_value(), .model_vocab_size = form.model.config().vocab_size};
      std::ranges::move(Dataset::read(file, rows, &form.tokenizer, form.chat ? &*form.chat : nullptr).examples,
                        std::back_inserter(rows_));
    }
    answers_ = answers_of(form, rendered_, options_.max_new_tokens);
    const std::vector<at::Tensor> own = scores_of_reference(form);
    own_.assign(own.begin(), own.end());
    ends_ = names_of_ends(form);
    tensors_ = tensors_of(form);
    VerifiedForm found = measured(form, path, rendered_, answers_, own_);
    if (reference_.adapter.empty()) return found;
    form.model.adapters().enable(false);
    base_ = scores_of_reference(form);
    base_divergence_ = mean_divergence(own_, [&](size_t i) -> const at::Tensor& { return base_[i]; });
    if (*base_divergence_ < kUnchanged && !brings_tables(reference_.adapter, format::settled_config(reference_.model).vocab_size))
      found.causes.emplace_back("the adapter changes nothing: its matrices B are zero, or of another model");
    return found;
  }

  VerifiedForm other(const std::string& path) {
    const Place place = place_of(path, options_);
    VerifiedForm out;
    std::vector<Prompt> prompts;
    Scores found;
    {
      Form form = open(place, options_, false);
      prompts = render(form, prompts_);
      const std::vector<Ids> answers = answers_of(form, prompts, options_.max_new_tokens);
      found.resize(prompts.size());
      const int64_t rows = form.model.config().vocab_size;
      for (size_t i = 0; i < prompts.size(); ++i) {
        const bool fits = std::ranges::all_of(answers_[i], [&](int64_t id) { return id < rows; });
        if (fits) found[i] = log_probabilities(form.model, prompts[i].ids, answers_[i]);
      }
      out = measured(form, path, prompts, answers, found);
      find_causes_in_text(out, names_of_ends(form), prompts);
      if (!place.adapter.empty()) find_missing(out, tensors_of(form));
    }
    find_causes_in_weights(out, found);
    return out;
  }

 private:
  /// Log-probabilities of the reference, of its base and of one form are in memory.
  void check_room(int64_t vocab_size) const {
    const Bytes needed{3 * std::ssize(prompts_) * options_.max_new_tokens * vocab_size * 4}, room = memory_for(at::kCPU);
    QLORAPP_CHECK_VALUE(
        needed.count <= room.count,
        "[verify] {} prompts of {} new tokens need {} for log-probabilities; there is {}. Take fewer prompts, or lower "
        "max_new_tokens.",
        prompts_.size(), options_.max_new_tokens, to_string(needed), to_string(room));
  }

  /// Of the reference's answers.
  [[nodiscard]] std::vector<at::Tensor> scores_of_reference(Form& form) const {
    std::vector<at::Tensor> scores;
    for (size_t i = 0; i < rendered_.size(); ++i) scores.push_back(log_probabilities(form.model, rendered_[i].ids, answers_[i]));
    return scores;
  }

  /// Of the adapter, by PEFT's names.
  static std::set<std::string> tensors_of(const Form& form) {
    std::set<std::string> names;
    if (form.model.adapters().empty()) return names;
    for (const AdapterArena::Entry& entry : form.model.arena().entries()) names.insert(entry.name);
    return names;
  }

  static std::set<std::string> names_of_ends(const Form& form) {
    std::set<std::string> names;
    for (const int64_t id : form.ends) names.insert(form.tokenizer.id_to_token(static_cast<TokenId>(id)).value_or(""));
    return names;
  }

  VerifiedForm measured(Form& form, const std::string& path, const std::vector<Prompt>& prompts, const std::vector<Ids>& answers,
                        const Scores& found) const {
    VerifiedForm out;
    out.path = path;
    out.kind = form.place.kind;
    out.prompts = std::ssize(prompts);
    double shared = 0;
    for (size_t i = 0; i < prompts.size(); ++i) {
      out.same_texts += prompts[i].text == rendered_[i].text ? 1 : 0;
      out.same_ids += prompts[i].ids == rendered_[i].ids ? 1 : 0;
      out.same_first += !answers[i].empty() && answers[i].front() == answers_[i].front() ? 1 : 0;
      shared += shared_tokens(answers_[i], answers[i]);
      out.ended += !answers[i].empty() && std::ranges::binary_search(form.ends, answers[i].back()) ? 1 : 0;
    }
    out.same_tokens = shared / static_cast<double>(prompts.size());
    out.divergence = mean_divergence(found, [&](size_t i) -> const at::Tensor& { return *own_[i]; });
    const bool has_tokens = std::ranges::all_of(rows_, [&](const Example& row) {
      return std::ranges::all_of(row.input_ids, [&](int64_t id) { return id < form.model.config().vocab_size; });
    });
    if (!rows_.empty() && has_tokens) out.loss = evaluate(form.model, rows_, {}).token_weighted;
    return out;
  }

  void find_causes_in_text(VerifiedForm& out, const std::set<std::string>& ends, const std::vector<Prompt>& prompts) const {
    for (size_t i = 0; i < prompts.size(); ++i) {
      const Prompt &own = rendered_[i], &other = prompts[i];
      if (own.text != other.text) {
        const auto at = static_cast<size_t>(
            std::mismatch(own.text.begin(), own.text.end(), other.text.begin(), other.text.end()).first - own.text.begin());
        out.causes.push_back(message("template: prompt {} is rendered otherwise from character {} on: {} here, {} there", i + 1,
                                     at + 1, shown(std::string_view(other.text).substr(at)),
                                     shown(std::string_view(own.text).substr(at))));
        break;
      }
      if (own.ids != other.ids) {
        out.causes.push_back(cause_of_ids(own.ids, other.ids, i));
        break;
      }
    }
    for (const std::string& end : ends_) {
      if (!ends.contains(end))
        out.causes.push_back(message("EOS: {} ends the reference's answers, and none of this form", shown(end)));
    }
  }

  /// What the reference's adapter has, and this one has not.
  void find_missing(VerifiedForm& out, const std::set<std::string>& names) const {
    std::vector<std::string> missing;
    std::ranges::set_difference(tensors_, names, std::back_inserter(missing));
    if (!missing.empty())
      out.causes.push_back(message("adapter: {} of the reference's {} tensors are missing: {}{}", missing.size(), tensors_.size(),
                                   missing.front(), missing.size() > 1 ? " …" : ""));
  }

  void find_causes_in_weights(VerifiedForm& out, const Scores& found) {
    const bool has_all = std::ranges::all_of(found, [](const auto& scores) { return scores.has_value(); });
    if (!has_all) out.causes.emplace_back("vocabulary: the reference answers with tokens that this form has not");
    const auto is_nearer_to = [&](const std::vector<at::Tensor>& scores) {
      return mean_divergence(found, [&](size_t i) -> const at::Tensor& { return scores[i]; }) < out.divergence / 4;
    };
    if (base_divergence_ && *base_divergence_ > kChanged && has_all && is_nearer_to(base_)) {
      out.causes.emplace_back("adapter: answers are those of the base; the adapter, or some of its tensors, is not applied");
    } else if (out.divergence > kMostDivergence && out.causes.empty()) {
      const bool is_precision = find_other_precision() && is_nearer_to(other_precision_);
      out.causes.push_back(
          is_precision
              ? message("base precision: the divergence is {:.3g} nats, and small beside the reference over a base {}; export with "
                        "base {}, or verify with load_in_4bit {}",
                        out.divergence, options_.load_in_4bit ? "that is not quantized" : "in NF4",
                        options_.load_in_4bit ? "dequantized" : "original", !options_.load_in_4bit)
              : message(
                    "weights: the divergence is {:.3g} nats; the base of this form, or its type, is another than the reference's",
                    out.divergence));
    }
  }

  /// Runs the reference over the other storage of its base, NF4 or what the checkpoint holds. @returns whether there are two.
  bool find_other_precision() {
    const format::ModelConfig config = format::settled_config(reference_.model);
    if (reference_.adapter.empty() || config.quantization || !config.blocks.empty()) return false;
    if (!other_precision_.empty()) return true;
    VerifyOptions other = options_;
    other.load_in_4bit = !other.load_in_4bit;
    Form form = open(reference_, other, true);
    other_precision_ = scores_of_reference(form);
    return true;
  }

  template <typename OwnOf>
  static double mean_divergence(const Scores& found, const OwnOf& own_of) {
    double sum = 0;
    int64_t count = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      if (!found[i]) continue;
      sum += divergence(own_of(i), *found[i]);
      ++count;
    }
    return count == 0 ? 0 : sum / static_cast<double>(count);
  }

  static std::string cause_of_ids(const Ids& own, const Ids& other, size_t i) {
    const auto begins_with = [](const Ids& ids, int64_t id) {
      return std::ranges::find_if(ids, [&](int64_t each) { return each != id; }) - ids.begin();
    };
    const Ids& longer = own.size() > other.size() ? own : other;
    const Ids& shorter = own.size() > other.size() ? other : own;
    if (!shorter.empty() && longer.size() > shorter.size() && std::equal(shorter.rbegin(), shorter.rend(), longer.rbegin())) {
      return message("BOS: prompt {} begins with {} times token {}, in the reference with {}", i + 1,
                     begins_with(other, longer.front()), longer.front(), begins_with(own, longer.front()));
    }
    return message("tokenizer: prompt {} has other tokens ({} of them, {} in the reference)", i + 1, other.size(), own.size());
  }

  const VerifyOptions& options_;
  const std::vector<std::string>& prompts_;
  Place reference_;
  std::vector<Prompt> rendered_;
  std::vector<Example> rows_;
  std::vector<Ids> answers_;
  Scores own_;
  std::vector<at::Tensor> base_, other_precision_;
  std::optional<double> base_divergence_;
  std::set<std::string> tensors_;
  std::set<std::string> ends_;
};

}  // namespace

const std::vector<std::string>& default_prompts() {
  static const std::vector<std::string> prompts{"Hello!",
                                                "What is the capital of France?",
                                                "Write one sentence about the sea.",
                                                "Count from one to five.",
                                                "Why is the sky blue?",
                                                "Translate into German: good morning",
                                                "Name three fruits.",
                                                "Write a function that adds two numbers."};
  return prompts;
}

bool ExportVerification::holds() const {
  return std::ranges::all_of(forms, [](const VerifiedForm& form) { return form.causes.empty(); });
}

std::string ExportVerification::json() const {
  format::Json all = format::Json::object();
  all["holds"] = holds();
  all["reference"] = forms.empty() ? "" : forms.front().path;
  all["forms"] = format::Json::array();
  for (const VerifiedForm& form : forms) {
    format::Json one{{"path", form.path},
                     {"kind", form.kind},
                     {"prompts", form.prompts},
                     {"same_texts", form.same_texts},
                     {"same_ids", form.same_ids},
                     {"same_first_token", form.same_first},
                     {"same_greedy_tokens", form.same_tokens},
                     {"kl_divergence", form.divergence},
                     {"ended", form.ended},
                     {"causes", form.causes}};
    if (form.loss) {
      one["loss"] = *form.loss;
      one["perplexity"] = std::exp(*form.loss);
    }
    all["forms"].push_back(std::move(one));
  }
  return format::dump_python_json(all, {.indent = 2, .ensure_ascii = false}) + "\n";
}

ExportVerification verify_export(const std::vector<std::string>& paths, const VerifyOptions& options) {
  QLORAPP_CHECK_VALUE(paths.size() >= 2, "[verify] needs the reference and at least one other form; got {}.", paths.size());
  QLORAPP_CHECK_VALUE(options.max_new_tokens >= 1, "[verify] max_new_tokens must be at least 1; got {}.", options.max_new_tokens);
  const at::NoGradGuard no_grad;
  Verifier verifier(options);
  ExportVerification out;
  for (size_t i = 0; i < paths.size(); ++i) {
    try {
      out.forms.push_back(i == 0 ? verifier.reference(paths[i]) : verifier.other(paths[i]));
    } catch (const FormatError& error) {
      if (i == 0) throw;
      VerifiedForm& unread = out.forms.emplace_back();
      unread.path = paths[i];
      unread.kind = "unread";
      unread.causes.push_back(message("cannot be read: {}", error.what()));
    }
    if (options.progress) options.progress(static_cast<int64_t>(i) + 1, std::ssize(paths));
  }
  return out;
}

std::optional<ExportVerification> verify_written(const std::string& model, const std::string& adapter, const ExportOptions& options,
                                                 const std::string& written, at::Device device) {
  const std::string in_folder = options.ollama_base.empty() ? "model.gguf" : "adapter.gguf";
  const std::string form = options.ollama.empty() ? written : files::path_in(written, in_folder);
  const std::string& reference = adapter.empty() ? model : adapter;
  const auto skip = [&](const std::string& why) {
    log_warning(message("[export] not verified: {} By hand: qlorapp verify-export {} {}{}", why, reference, form,
                        adapter.empty() ? "" : message(" --model {}", model_path(model))));
    return std::nullopt;
  };
  VerifyOptions verify;
  verify.base = model;
  verify.chat_template = options.chat_template;
  if (!options.ollama_base.empty())
    verify.text = !adapter.empty() && TextFiles::has_tokenizer(adapter) ? adapter : model_folder(model);
  verify.device = device;
  verify.load_in_4bit = options.merge.base == MergeBase::kDequantized;
  try {
    const int64_t parameters = format::parameter_count(format::settled_config(model_folder(model)));
    const Bytes needed{parameters * (parameters * 4 <= kMostInFloat32 ? 4 : 2)}, room = memory_for(device);
    if (needed.count > room.count)
      return skip(message("a model takes {}, and {} has {}.", to_string(needed), device.str(), to_string(room)));
    ExportVerification found = verify_export({reference, form}, verify);
    files::write_file_atomically(written + ".verify.json", found.json());
    return found;
  } catch (const Error& error) {  // the export is whole, and stays
    return skip(error.what());
  } catch (const c10::Error& error) { return skip(error.what_without_backtrace()); }
}

}  // namespace qlorapp
