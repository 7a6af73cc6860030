// SPDX-License-Identifier: Apache-2.0
#include "tokenizer_json.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/check.hpp"
#include "json_reading.hpp"

namespace qlorapp {
namespace {

using nlohmann::json;

constexpr std::size_t kLongestAddedToken = 4096;

/// Reads one file.
class Reader : ComponentReader {
 public:
  using ComponentReader::ComponentReader;

  [[nodiscard]] TokenizerDescription read(const json& file) {
    require(file.is_object(), "the file must be a JSON object");
    known_keys(
        file, "the file",
        {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model"});
    // truncation and padding are settings that a caller's last use left behind; transformers resets them at each call.
    out_.normalizer = Normalizer(normalizer(at(file, "normalizer")));
    read_model(at(file, "model"));
    read_added(at(file, "added_tokens"));
    out_.pre_tokenizer = pre_tokenizer(at(file, "pre_tokenizer"));
    out_.model.byte_level = out_.pre_tokenizer.byte_level;
    support(!out_.unigram || !out_.model.byte_level, "pre_tokenizer must not contain ByteLevel with a Unigram model");
    support(!out_.model.byte_level || !out_.model.byte_fallback,
            "model.byte_fallback must be false with ByteLevel: every byte has a token of its own there");
    read_post_processor(at(file, "post_processor"));
    out_.decoder = decoder(at(file, "decoder"));
    support(out_.decoder.byte_level || !out_.model.byte_level,
            message("decoder must be ByteLevel where the pre_tokenizer is; got {}", type_of(at(file, "decoder"))));
    support(!out_.decoder.byte_level || out_.model.byte_level,
            "pre_tokenizer must contain ByteLevel where the decoder is ByteLevel");
    return std::move(out_);
  }

 private:
  [[nodiscard]] int32_t id(const json& value, std::string_view name, std::string_view token = {}) const {
    const bool small = value.is_number_unsigned() && value.get<uint64_t>() < (uint64_t{1} << 31);
    if (!small) {
      require(false, message("{}{} must be a whole number from 0 to 2147483647; got {}", name, token,
                             value.is_number() ? value.dump() : std::string(kind_of(value))));
    }
    return value.get<int32_t>();
  }

  void read_unigram(const json& model) {
    known_keys(model, "the model", {"type", "unk_id", "vocab", "byte_fallback"});
    const json& vocab = at(model, "vocab");
    require(vocab.is_array() && !vocab.empty(),
            message("model.vocab must be an array of tokens with scores; got {}", kind_of(vocab)));
    UnigramOptions options;
    options.byte_fallback = flag(model, "byte_fallback", false);
    if (const json& unk = at(model, "unk_id"); !unk.is_null()) options.unk_id = id(unk, "model.unk_id");
    options.scores.reserve(vocab.size());
    for (const json& entry : vocab) {
      require(entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_number(),
              message("token {} of model.vocab must be a string and its score", options.scores.size()));
      out_.vocabulary.emplace_back(entry[0].get<std::string>(), static_cast<int32_t>(options.scores.size()));
      options.scores.push_back(entry[1].get<double>());
    }
    out_.unigram = std::move(options);
  }

  void read_model(const json& model) {
    require(model.is_object(), message("model must be an object; got {}", kind_of(model)));
    const json& type = at(model, "type");
    if (type == "Unigram") return read_unigram(model);
    support(type.is_null() || type == "BPE", message("model must be BPE or Unigram; got {}", type_of(model)));
    known_keys(model, "the model",
               {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
                "ignore_merges", "vocab", "merges"});
    const json& dropout = at(model, "dropout");
    support(dropout.is_null() || (dropout.is_number() && dropout.get<double>() == 0.0), "model.dropout must be null");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      support(at(model, key).is_null() || at(model, key) == "", message("model.{} must be null", key));
    }
    out_.model.ignore_merges = flag(model, "ignore_merges", false);
    out_.model.byte_fallback = flag(model, "byte_fallback", false);
    out_.model.fuse_unk = flag(model, "fuse_unk", false);
    if (const json& unk = at(model, "unk_token"); !unk.is_null()) {
      require(unk.is_string(), message("model.unk_token must be a string or null; got {}", kind_of(unk)));
      out_.model.unk_token = unk.get<std::string>();
    }

    const json& vocab = at(model, "vocab");
    require(vocab.is_object() && !vocab.empty(), message("model.vocab must be an object with tokens; got {}", kind_of(vocab)));
    out_.vocabulary.reserve(vocab.size());
    for (const auto& [token, value] : vocab.items()) out_.vocabulary.emplace_back(token, id(value, "the id of token ", token));

    const json& merges = at(model, "merges");
    require(merges.is_array(), message("model.merges must be an array; got {}", kind_of(merges)));
    out_.merges.reserve(merges.size());
    for (std::size_t i = 0; i < merges.size(); ++i) {
      // The first line of a merges.txt, which older files carry along.
      if (merges[i].is_string() && merges[i].get_ref<const std::string&>().starts_with("#version")) continue;
      out_.merges.push_back(merge(merges[i], i));
    }
  }

  [[nodiscard]] std::pair<std::string, std::string> merge(const json& value, std::size_t rank) const {
    if (value.is_string()) {
      const auto& text = value.get_ref<const std::string&>();
      const auto space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
        require(false, message("merge {} must be two tokens with a space between; got '{}'", rank, text));
      }
      return {text.substr(0, space), text.substr(space + 1)};
    }
    const bool pair = value.is_array() && value.size() == 2 && value[0].is_string() && value[1].is_string();
    if (!pair) require(false, message("merge {} must be a string or a pair of strings; got {}", rank, kind_of(value)));
    return {value[0].get<std::string>(), value[1].get<std::string>()};
  }

  void read_added(const json& added) {
    require(added.is_null() || added.is_array(), message("added_tokens must be an array; got {}", kind_of(added)));
    std::unordered_map<std::string_view, int32_t> known;
    int64_t next = 0;  // the id that the engine gives to a token that is not in the vocabulary
    for (const auto& [token, token_id] : out_.vocabulary) known.emplace(token, token_id);
    next = static_cast<int64_t>(known.size());
    std::unordered_set<std::string> contents;
    for (const json& entry : added) {
      require(entry.is_object() && at(entry, "content").is_string(), "each of added_tokens must be an object with 'content'");
      known_keys(entry, "an added token", {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
      AddedToken token;
      token.content = at(entry, "content").get<std::string>();
      token.id = id(at(entry, "id"), "the id of added token ", token.content);
      token.special = flag(entry, "special", false);
      token.lstrip = flag(entry, "lstrip", false);
      token.rstrip = flag(entry, "rstrip", false);
      token.single_word = flag(entry, "single_word", false);
      token.normalized = flag(entry, "normalized", !token.special);
      require(
          !token.content.empty() && token.content.size() <= kLongestAddedToken,
          message("an added token must have 1 to {} bytes; token {} has {}", kLongestAddedToken, token.id, token.content.size()));
      support(contents.insert(token.content).second, message("added token '{}' must appear once", token.content));
      const auto in_vocabulary = known.find(token.content);
      const int64_t expected = in_vocabulary != known.end() ? in_vocabulary->second : next;
      support(token.id == expected, message("added token '{}' must have the id that Hugging Face's tokenizers give it, {}; got {}",
                                            token.content, expected, token.id));
      next = std::max<int64_t>(next, int64_t{token.id} + 1);
      out_.added.push_back(std::move(token));
    }
  }

  void read_post_processor(const json& component) {
    const std::string type = type_of(component);
    if (type == "null" || type == "ByteLevel") return;  // ByteLevel trims offsets and changes no token
    if (type == "Sequence") {
      const json& parts = at(component, "processors");
      require(parts.is_array(), "post_processor.processors must be an array");
      for (const json& part : parts) {
        support(type_of(part) != "Sequence", "a post_processor Sequence inside another is not supported");
        read_post_processor(part);
      }
      return;
    }
    support(type == "TemplateProcessing",
            message("post_processor may contain only TemplateProcessing and ByteLevel; got {}", type));
    support(!saw_template_, "post_processor may contain at most one TemplateProcessing");
    saw_template_ = true;
    const json& single = at(component, "single");
    require(single.is_array(), "TemplateProcessing.single must be an array");
    bool saw_text = false;
    for (const json& part : single) {
      if (const json& sequence = at(part, "Sequence"); !sequence.is_null()) {
        support(!saw_text && at(sequence, "id") == "A", "TemplateProcessing.single must contain the text A once");
        saw_text = true;
        continue;
      }
      const json& name = at(at(part, "SpecialToken"), "id");
      require(name.is_string(), "TemplateProcessing.single may contain only Sequence and SpecialToken");
      const json& ids = at(at(at(component, "special_tokens"), name.get_ref<const std::string&>().c_str()), "ids");
      require(ids.is_array(), message("TemplateProcessing.special_tokens must give the ids of {}", name.get<std::string>()));
      for (const json& value : ids)
        (saw_text ? out_.suffix_ids : out_.prefix_ids).push_back(id(value, "an id of TemplateProcessing"));
    }
    support(saw_text, "TemplateProcessing.single must contain the text A");
  }

  TokenizerDescription out_;
  bool saw_template_ = false;
};

}  // namespace

TokenizerDescription read_tokenizer_json(std::string_view text, const std::string& where) {
  return Reader(where).read(parse_json(text, where));
}

}  // namespace qlorapp
