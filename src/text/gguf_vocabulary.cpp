// SPDX-License-Identifier: Apache-2.0
#include "gguf_vocabulary.hpp"

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "files/folder.hpp"
#include "json_reading.hpp"
#include "qlorapp/core/log.hpp"
#include "tokenizer_json.hpp"

namespace qlorapp {
namespace {

using nlohmann::json;

constexpr size_t kLargestTokenizer = 64 << 20;
enum Type : int32_t { kNormal = 1, kUnknown, kControl, kAdded, kUnused, kByte };

/// The steps of a pre-tokenizer, a line each: patterns as the file writes them, "digits" and "digits+", "bytes" and "gpt2".
std::string steps_of(const json& component) {
  const std::string type = component.is_object() ? component.value("type", "") : "";
  if (type == "Sequence") {
    std::string steps;
    for (const json& part : component.value("pretokenizers", json::array())) steps += (steps.empty() ? "" : "\n") + steps_of(part);
    return steps;
  }
  if (type == "Digits") return component.value("individual_digits", false) ? "digits" : "digits+";
  if (type == "ByteLevel") return component.value("use_regex", true) ? "gpt2" : "bytes";
  if (type != "Split" || !component.contains("pattern") || !component["pattern"].is_object()) return type;
  std::string escaped;  // some files hold the characters themselves
  for (const char c : component["pattern"].value("Regex", component["pattern"].value("String", "")))
    escaped += c == '\r' ? std::string("\\r") : c == '\n' ? std::string("\\n") : std::string(1, c);
  return escaped;
}

constexpr std::string_view kContraction = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
#define QLORAPP_TAIL R"(\s*[\r\n]+|\s+(?!\S)|\s+)"
#define QLORAPP_UPPER R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
#define QLORAPP_LOWER R"([\p{Ll}\p{Lm}\p{Lo}\p{M}])"

constexpr std::string_view kDeepSeek =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

struct NamedSplit {
  std::string steps;
  std::string_view merged_first;  ///< The name with ignore_merges; empty: none.
  std::string_view name;          ///< Without.
};

/// Splits that a name of llama.cpp stands for.
const std::vector<NamedSplit>& named_splits() {
  static const std::vector<NamedSplit> splits = [] {
    const auto words = [](std::string_view digits) {
      return message("{}|[^\\r\\n\\p{{L}}\\p{{N}}]?\\p{{L}}+|{}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n]*|{}", kContraction, digits,
                     QLORAPP_TAIL);
    };
    const auto cased = [](std::string_view contraction, std::string_view digits) {
      constexpr std::string_view kFront = R"([^\r\n\p{L}\p{N}]?)";
      return message("{0}{1}*{2}+{3}|{0}{1}+{2}*{3}|{4}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n/]*|{5}", kFront, QLORAPP_UPPER,
                     QLORAPP_LOWER, contraction, digits, QLORAPP_TAIL);
    };
    const std::string three = R"(\p{N}{1,3})", one = R"(\p{N})";
    return std::vector<NamedSplit>{{words(three) + "\nbytes", "llama-bpe", "dbrx"},
                                   {words(one) + "\nbytes", "", "qwen2"},
                                   {cased(std::string(kContraction) + "?", three) + "\nbytes", "", "gpt-4o"},
                                   {cased("", one) + "\nbytes", "tekken", ""},
                                   {three + "\n[一-龥぀-ゟ゠-ヿ]+\n" + std::string(kDeepSeek) + "\nbytes", "", "deepseek-v3"},
                                   {"digits\ngpt2", "", "smollm"},
                                   {"gpt2", "", "gpt-2"}};
  }();
  return splits;
}

#undef QLORAPP_TAIL
#undef QLORAPP_UPPER
#undef QLORAPP_LOWER

std::string name_of_split(const json& component, bool ignores_merges, const std::string& where) {
  const std::string steps = steps_of(component);
  for (const NamedSplit& split : named_splits()) {
    if (split.steps != steps) continue;
    const std::string_view name = ignores_merges ? split.merged_first : split.name;
    QLORAPP_CHECK_FORMAT(!name.empty(), "[{}] model.ignore_merges must be {} for a GGUF file with this pre_tokenizer; it is {}.",
                         where, !ignores_merges, ignores_merges);
    return std::string(name);
  }
  std::string shown = steps.substr(0, 200);
  std::ranges::replace(shown, '\n', ' ');
  throw FormatError(
      message("[{}] pre_tokenizer must be one that llama.cpp has a name for (Llama 3, Qwen 2, Phi-4, Phi-4-mini, Tekken, "
              "SmolLM and Granite 3, GPT-2); got '{}'. Use the merged checkpoint with another server.",
              where, shown));
}

/// Whether a text gets a space in front, by the normalizer (Llama 2) or Metaspace.
bool adds_space(const TokenizerDescription& description, const json& normalizer) {
  if (description.pre_tokenizer.marker) return description.pre_tokenizer.marker->prepend != PrependScheme::kNever;
  const auto prepends = [](const json& step) { return step.is_object() && step.value("type", "") == "Prepend"; };
  if (prepends(normalizer)) return true;
  const json steps = normalizer.is_object() ? normalizer.value("normalizers", json::array()) : json::array();
  return std::ranges::any_of(steps, prepends);
}

bool is_byte(std::string_view token) { return token.size() == 6 && token.starts_with("<0x") && token.ends_with(">"); }

}  // namespace

GgufVocabulary gguf_vocabulary(const std::string& folder, const std::string& model_folder, int64_t rows) {
  const std::string where = files::path_in(folder, "tokenizer.json");
  const Tokenizer tokenizer = Tokenizer::from_folder(folder, model_folder);
  const std::string text = read_file_inside(where, kLargestTokenizer);
  const TokenizerDescription description = read_tokenizer_json(text, where);
  const json file = parse_json(text, where);
  QLORAPP_CHECK_FORMAT(!description.unigram, "[{}] model must be BPE for a GGUF file; got Unigram.", where);
  QLORAPP_CHECK_FORMAT(tokenizer.id_limit() <= rows, "[{}] the embedding must have a row for each token; it has {} rows for {}.",
                       where, rows, tokenizer.id_limit());

  GgufVocabulary out;
  out.tokens.resize(static_cast<size_t>(rows));
  out.types.assign(static_cast<size_t>(rows), kUnused);
  for (int64_t i = 0; i < rows; ++i) out.tokens[static_cast<size_t>(i)] = message("[PAD{}]", i);
  const auto put = [&](std::string_view token, int32_t id, Type type) {
    out.tokens[static_cast<size_t>(id)] = token;
    out.types[static_cast<size_t>(id)] = type;
  };
  const bool bytes = description.model.byte_level;
  for (const auto& [token, id] : description.vocabulary) put(token, id, !bytes && is_byte(token) ? kByte : kNormal);
  for (const AddedToken& token : description.added) put(token.content, token.id, token.special ? kControl : kAdded);
  if (description.model.unk_token) {
    out.unknown = tokenizer.token_to_id(*description.model.unk_token);
    if (out.unknown && !bytes) out.types[static_cast<size_t>(*out.unknown)] = kUnknown;
  }
  if (bytes) {
    out.model = "gpt2";
    out.pre = name_of_split(file.value("pre_tokenizer", json()), description.model.ignore_merges, where);
    for (const auto& [left, right] : description.merges) out.merges.push_back(left + " " + right);
  } else {
    out.model = "llama";
    out.pre = "default";
    out.adds_space = adds_space(description, file.value("normalizer", json()));
    // llama.cpp joins the pair whose token has the highest score; of the same rank order as merges.
    out.scores.assign(static_cast<size_t>(rows), 0.0f);
    std::unordered_map<std::string, float> ranks;
    for (size_t i = 0; i < description.merges.size(); ++i)
      ranks.emplace(description.merges[i].first + description.merges[i].second, -static_cast<float>(i + 1));
    for (const auto& [token, id] : description.vocabulary) {
      if (const auto rank = ranks.find(token); rank != ranks.end()) out.scores[static_cast<size_t>(id)] = rank->second;
    }
  }
  out.bos = tokenizer.bos_id();
  if (description.prefix_ids.size() == 1) out.bos = description.prefix_ids.front();  // also where tokenizer_config.json names none
  out.eos = tokenizer.eos_id();
  out.pad = tokenizer.pad_id();
  for (const TokenId id : tokenizer.eos_ids()) {
    if (id != out.eos) out.other_ends.push_back(id);
  }
  const auto is_alone = [](const std::vector<int32_t>& ids, const std::optional<TokenId>& id) {
    return ids.size() == 1 && id && ids.front() == *id;
  };
  out.adds_bos = is_alone(description.prefix_ids, out.bos);
  out.adds_eos = is_alone(description.suffix_ids, out.eos);
  const size_t unsaid = (out.adds_bos ? 0 : description.prefix_ids.size()) + (out.adds_eos ? 0 : description.suffix_ids.size());
  if (unsaid > 0) {
    log_warning(
        message("[export] a GGUF file can say that bos_token goes before a text, and eos_token behind it; the post_processor of {} "
                "adds {} other "
                "tokens. They are in a conversation if its template writes them.",
                where, unsaid));
  }
  return out;
}

}  // namespace qlorapp
