// SPDX-License-Identifier: Apache-2.0
#include "gguf_vocabulary.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/printable.hpp"
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

constexpr std::string_view kDeepSeekLetters =
    R"(\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-Ჺ)"
    R"(Ჽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝ)"
    R"(ℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀)"
    R"(-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+)";
constexpr std::string_view kDeepSeekOthers = "[一-龥ࠀ-一가-퟿]+\ndigits\nbytes";

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
    const std::string qwen35 =
        std::string(kContraction) + R"(|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|)" QLORAPP_TAIL;
    const std::string seed =
        std::string(kContraction) + R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|)" QLORAPP_TAIL;
    return std::vector<NamedSplit>{
        {words(three) + "\nbytes", "llama-bpe", "dbrx"},
        {words(one) + "\nbytes", "", "qwen2"},
        {qwen35 + "\nbytes", "", "qwen35"},
        {seed + "\nbytes", "seed-coder", "seed-coder"},
        {cased(std::string(kContraction) + "?", three) + "\nbytes", "", "gpt-4o"},
        {cased("", one) + "\nbytes", "tekken", ""},
        {three + "\n[一-龥぀-ゟ゠-ヿ]+\n" + std::string(kDeepSeek) + "\nbytes", "", "deepseek-v3"},
        {message("[\\r\\n]\n{}\n\\s?[!-/:-~！-／：-～‘-‟　-。]+\n\\s+$\n{}", kDeepSeekLetters, kDeepSeekOthers), "",
         "deepseek-llm"},
        {message("[\\r\\n]\n\\s?\\p{{L}}+\n\\s?\\p{{P}}+\n{}", kDeepSeekOthers), "", "deepseek-coder"},
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
      message("[{}] pre_tokenizer must be one that llama.cpp has a name for (Llama 3, Qwen 2, Phi-4, Phi-4-mini, Tekken, DeepSeek, "
              "Qwen 3.5, Seed, SmolLM and Granite 3, GPT-2); got '{}'. Use the merged checkpoint with another server.",
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

/// Whether conversations begin with a token. Servers put bos_token in front of those that do not, where the file says so; training did not.
bool begins_with(const ChatTemplate& chat, const std::optional<TokenId>& token, const Tokenizer& tokenizer) {
  const std::vector<Message> messages{{"user", "a"}};
  const std::string text = chat.render(messages, {.add_generation_prompt = true, .turns = false}).text;
  return token && text.starts_with(tokenizer.id_to_token(*token).value_or("\n"));
}

bool is_byte(std::string_view token) { return token.size() == 6 && token.starts_with("<0x") && token.ends_with(">"); }

}  // namespace

GgufVocabulary gguf_vocabulary(const std::string& folder, const std::string& model_folder, int64_t rows, const ChatTemplate* chat) {
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
  const auto end = chat != nullptr ? chat->end_of_turn() : std::nullopt;
  if (const auto id = end ? tokenizer.token_to_id(*end) : std::nullopt) {
    const bool known = id == out.eos || std::ranges::find(out.other_ends, *id) != out.other_ends.end();
    if (!known) out.other_ends.insert(out.other_ends.begin(), *id);
  }
  const auto is_alone = [](const std::vector<int32_t>& ids, const std::optional<TokenId>& id) {
    return ids.size() == 1 && id && ids.front() == *id;
  };
  out.adds_bos = is_alone(description.prefix_ids, out.bos) && (chat == nullptr || begins_with(*chat, out.bos, tokenizer));
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

namespace {

constexpr size_t kLongestToken = 1024, kMostMerges = 16 << 20;

/// Other names of llama.cpp for the same split.
constexpr auto kOtherNames = std::to_array<std::pair<std::string_view, std::string_view>>({{"llama3", "llama-bpe"},
                                                                                           {"llama-v3", "llama-bpe"},
                                                                                           {"falcon3", "llama-bpe"},
                                                                                           {"pixtral", "llama-bpe"},
                                                                                           {"deepseek-r1-qwen", "qwen2"},
                                                                                           {"stablelm2", "qwen2"},
                                                                                           {"smaug-bpe", "dbrx"},
                                                                                           {"hunyuan-dense", "deepseek-v3"},
                                                                                           {"refact", "smollm"},
                                                                                           {"command-r", "smollm"},
                                                                                           {"starcoder", "smollm"},
                                                                                           {"exaone", "smollm"},
                                                                                           {"mpt", "gpt-2"},
                                                                                           {"exaone4", "gpt-2"},
                                                                                           {"glm4", "dbrx"},
                                                                                           {"chatglm-bpe", "dbrx"},
                                                                                           {"olmo", "gpt-2"},
                                                                                           {"llama4", "gpt-4o"},
                                                                                           {"phi-2", "gpt-2"}});

/// The pre_tokenizer of one step (steps_of).
json component_of(const std::string& step) {
  if (step == "digits") return {{"type", "Digits"}, {"individual_digits", true}};
  if (step == "bytes" || step == "gpt2")
    return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", step == "gpt2"}};
  return {{"type", "Split"}, {"pattern", {{"Regex", step}}}, {"behavior", "Isolated"}, {"invert", false}};
}

class TokenizerWriter {
 public:
  TokenizerWriter(const GgufVocabulary& vocabulary, const std::string& where) : v_(vocabulary), where_(where) { check(); }

  TokenizerTexts write() const {
    json tokenizer{{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}, {"added_tokens", added_tokens()}};
    json model{{"type", "BPE"},
               {"dropout", nullptr},
               {"unk_token", nullptr},
               {"continuing_subword_prefix", nullptr},
               {"end_of_word_suffix", nullptr},
               {"fuse_unk", false},
               {"byte_fallback", false},
               {"ignore_merges", false}};
    if (v_.model == "gpt2") add_bytes(tokenizer, model);
    else add_characters(tokenizer, model);
    model["vocab"] = json::object();
    size_t last = 0;
    for (size_t i = 0; i < v_.tokens.size(); ++i) last = is_piece(i) ? i : last;
    // Engines number added tokens behind the vocabulary on; those between others belong to it, too.
    for (size_t i = 0; i <= last && i < v_.tokens.size(); ++i) {
      if (v_.types[i] != kUnused) model["vocab"][v_.tokens[i]] = i;
    }
    tokenizer["model"] = std::move(model);
    tokenizer["post_processor"] = post_processor();
    json config{{"add_bos_token", v_.adds_bos},
                {"add_eos_token", v_.adds_eos},
                {"clean_up_tokenization_spaces", false},
                {"tokenizer_class", "PreTrainedTokenizerFast"}};
    const std::pair<const char*, std::optional<TokenId>> named[] = {
        {"bos_token", v_.bos}, {"eos_token", v_.eos}, {"pad_token", v_.pad}, {"unk_token", v_.unknown}};
    for (const auto& [key, id] : named) {
      if (id) config[key] = token(*id);
    }
    return {tokenizer.dump(), config.dump(2) + "\n"};
  }

 private:
  void check() const {
    const auto refuse = [&](const std::string& rule) {
      throw FormatError(message("[{}] {} Use the model's checkpoint instead.", where_, rule));
    };
    if (v_.model != "gpt2" && v_.model != "llama")
      refuse(message("tokenizer.ggml.model must be gpt2 or llama; got '{}'.", v_.model));
    if (v_.types.size() != v_.tokens.size())
      refuse(message("tokenizer.ggml.token_type must have an entry for each of {} tokens; it has {}.", v_.tokens.size(),
                     v_.types.size()));
    if (v_.model == "llama" && v_.scores.size() != v_.tokens.size())
      refuse(message("tokenizer.ggml.scores must have an entry for each of {} tokens; it has {}.", v_.tokens.size(),
                     v_.scores.size()));
    for (const float score : v_.scores) {
      if (!std::isfinite(score)) refuse("tokenizer.ggml.scores must be finite; one is not.");
    }
    for (const std::string& token : v_.tokens) {
      if (token.size() > kLongestToken) refuse(message("a token may have {} bytes; one has {}.", kLongestToken, token.size()));
    }
    std::vector<TokenId> ids = v_.other_ends;
    for (const auto& id : {v_.bos, v_.eos, v_.pad, v_.unknown}) {
      if (id) ids.push_back(*id);
    }
    for (const TokenId id : ids) {
      if (id < 0 || static_cast<size_t>(id) >= v_.tokens.size())
        refuse(message("special tokens must be some of {} tokens; one is {}.", v_.tokens.size(), id));
    }
  }

  [[nodiscard]] const std::string& token(TokenId id) const { return v_.tokens[static_cast<size_t>(id)]; }
  /// Whether the model of the tokenizer has it; the others are found in the text before.
  [[nodiscard]] bool is_piece(size_t i) const { return v_.types[i] == kNormal || v_.types[i] == kByte || v_.types[i] == kUnknown; }

  [[nodiscard]] json added_tokens() const {
    json added = json::array();
    for (size_t i = 0; i < v_.tokens.size(); ++i) {
      if (v_.types[i] != kControl && v_.types[i] != kAdded && v_.types[i] != kUnknown) continue;
      added.push_back({{"id", i},
                       {"content", v_.tokens[i]},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", v_.types[i] != kAdded}});
    }
    return added;
  }

  void add_bytes(json& tokenizer, json& model) const {
    const auto other = std::ranges::find(kOtherNames, v_.pre, &std::pair<std::string_view, std::string_view>::first);
    const std::string_view name = other == kOtherNames.end() ? std::string_view(v_.pre) : other->second;
    const auto split = std::ranges::find_if(
        named_splits(), [&](const NamedSplit& known) { return known.name == name || known.merged_first == name; });
    if (split == named_splits().end()) {
      throw FormatError(
          message("[{}] tokenizer.ggml.pre must be a split that is known here (llama-bpe, dbrx, qwen2, gpt-4o, tekken, "
                  "deepseek-v3, deepseek-llm, deepseek-coder, qwen35, seed-coder, "
                  "smollm, gpt-2); got {}. Use the model's checkpoint instead.",
                  where_, printable(v_.pre)));
    }
    json steps = json::array();
    for (size_t begin = 0; begin <= split->steps.size();) {
      const size_t end = std::min(split->steps.find('\n', begin), split->steps.size());
      steps.push_back(component_of(split->steps.substr(begin, end - begin)));
      begin = end + 1;
    }
    tokenizer["normalizer"] = nullptr;
    tokenizer["pre_tokenizer"] = steps.size() == 1 ? steps[0] : json{{"type", "Sequence"}, {"pretokenizers", steps}};
    tokenizer["decoder"] = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}};
    model["ignore_merges"] = split->merged_first == name;
    model["merges"] = json::array();
    for (const std::string& merge : v_.merges) {
      const size_t space = merge.find(' ');
      QLORAPP_CHECK_FORMAT(space != std::string::npos && space > 0 && merge.find(' ', space + 1) == std::string::npos,
                           "[{}] a merge must be two tokens and a space between; got '{}'. Use the model's checkpoint instead.",
                           where_, merge);
      model["merges"].push_back({merge.substr(0, space), merge.substr(space + 1)});
    }
  }

  void add_characters(json& tokenizer, json& model) const {
    constexpr std::string_view kSpace = "\u2581";
    const json replace{{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", kSpace}};
    json decoders = {
        {{"type", "Replace"}, {"pattern", {{"String", kSpace}}}, {"content", " "}}, {{"type", "ByteFallback"}}, {{"type", "Fuse"}}};
    tokenizer["normalizer"] = replace;
    if (v_.adds_space) {
      tokenizer["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "Prepend"}, {"prepend", kSpace}}, replace}}};
      decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
    }
    tokenizer["pre_tokenizer"] = nullptr;
    tokenizer["decoder"] = {{"type", "Sequence"}, {"decoders", decoders}};
    model["byte_fallback"] = true;
    model["fuse_unk"] = true;
    const auto unknown = std::ranges::find(v_.types, static_cast<int32_t>(kUnknown));
    if (unknown != v_.types.end()) model["unk_token"] = v_.tokens[static_cast<size_t>(unknown - v_.types.begin())];
    model["merges"] = merges_of_scores();
  }

  /// llama.cpp joins the two neighbors whose union has the highest score: so each token is the merge of every two tokens that it consists of.
  [[nodiscard]] json merges_of_scores() const {
    std::unordered_map<std::string_view, size_t> ids;
    for (size_t i = 0; i < v_.tokens.size(); ++i) {
      if (v_.types[i] == kNormal) ids.emplace(v_.tokens[i], i);
    }
    struct Merge {
      size_t whole, left, right;
    };
    std::vector<Merge> merges;
    for (const auto& [text, id] : ids) {
      for (size_t at = 1; at < text.size(); ++at) {
        if ((static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) continue;  // within a character
        const auto left = ids.find(text.substr(0, at)), right = ids.find(text.substr(at));
        if (left != ids.end() && right != ids.end()) merges.push_back({id, left->second, right->second});
        QLORAPP_CHECK_FORMAT(merges.size() <= kMostMerges,
                             "[{}] tokens may be merges of {} pairs; there are more. Use the model's checkpoint instead.", where_,
                             kMostMerges);
      }
    }
    std::ranges::sort(merges, [&](const Merge& a, const Merge& b) {
      if (v_.scores[a.whole] != v_.scores[b.whole]) return v_.scores[a.whole] > v_.scores[b.whole];
      return std::tie(a.whole, a.left, a.right) < std::tie(b.whole, b.left, b.right);
    });
    json out = json::array();
    for (const Merge& merge : merges) out.push_back({v_.tokens[merge.left], v_.tokens[merge.right]});
    return out;
  }

  [[nodiscard]] json post_processor() const {
    if (!(v_.adds_bos && v_.bos) && !(v_.adds_eos && v_.eos)) return nullptr;
    json single = json::array(), pair = json::array(), specials = json::object();
    const auto add = [&](json& list, TokenId id, int type) {
      list.push_back({{"SpecialToken", {{"id", token(id)}, {"type_id", type}}}});
      specials[token(id)] = {{"id", token(id)}, {"ids", {id}}, {"tokens", {token(id)}}};
    };
    for (const auto& [sequence, type] : {std::pair{"A", 0}, std::pair{"B", 1}}) {
      for (json* const list : {&single, &pair}) {
        if (list == &single && type == 1) continue;
        if (v_.adds_bos && v_.bos) add(*list, *v_.bos, type);
        list->push_back({{"Sequence", {{"id", sequence}, {"type_id", type}}}});
        if (v_.adds_eos && v_.eos) add(*list, *v_.eos, type);
      }
    }
    return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", specials}};
  }

  const GgufVocabulary& v_;
  const std::string& where_;
};

}  // namespace

TokenizerTexts tokenizer_texts(const GgufVocabulary& vocabulary, const std::string& where) {
  return TokenizerWriter(vocabulary, where).write();
}

}  // namespace qlorapp
