// SPDX-License-Identifier: Apache-2.0
/// Ids and texts of two small tokenizers, worked out by hand, and of the one in examples/data.
#include "qlorapp/text/tokenizer.hpp"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"
#include "text/examples.hpp"
#include "text/small_tokenizers.hpp"

using namespace qlorapp;
using tiny::byte_level_tokenizer, tiny::character_tokenizer, tiny::json;

namespace {

using Ids = std::vector<TokenId>;
using Ranges = std::vector<std::pair<size_t, size_t>>;

/// U+FFFD.
constexpr const char* kReplacement = "\xEF\xBF\xBD";
constexpr const char* kGrinning = "\xF0\x9F\x98\x80";  // U+1F600
constexpr const char* kHan = "\xE6\xBC\xA2";           // U+6F22

Tokenizer tokenizer_of(const json& file) { return Tokenizer::from_json(file.dump()); }
Ids plain_ids(const Tokenizer& tokenizer, std::string_view text) { return tokenizer.encode(text, /*add_special_tokens=*/false); }

/// In a type that Catch2 can print.
Ranges byte_ranges(const Encoding& encoding) {
  Ranges out;
  for (const TextRange& range : encoding.ranges) out.emplace_back(range.begin, range.end);
  return out;
}

std::string refusal_of(const json& file) {
  return thrown<FormatError>([&] { (void)Tokenizer::from_json(file.dump(), "folder/tokenizer.json"); });
}

}  // namespace

TEST_CASE("merges are made in the order of their ranks, the leftmost first", "[text][cpu]") {
  const Tokenizer tokenizer = tokenizer_of(byte_level_tokenizer());
  CHECK(plain_ids(tokenizer, "hello") == Ids{259});  // he l l o, he ll o, hell o, hello
  CHECK(plain_ids(tokenizer, "hello hello") == Ids{259, 260});
  CHECK(plain_ids(tokenizer, "hel") == Ids{256, 'l'});  // rank 0 before rank 5
  CHECK(plain_ids(tokenizer, "ell") == Ids{'e', 257});  // rank 1 before rank 5, which stands further left
  CHECK(plain_ids(tokenizer, "el") == Ids{261});
  CHECK(plain_ids(tokenizer, "lll") == Ids{257, 'l'});
  CHECK(plain_ids(tokenizer, " hell") == Ids{' ', 258});
  CHECK(plain_ids(tokenizer, "").empty());
}

TEST_CASE("a piece of the pre-tokenizer does not merge with the next", "[text][cpu]") {
  json file = byte_level_tokenizer();
  CHECK(plain_ids(tokenizer_of(file), "he ll") == Ids{256, ' ', 257});
  CHECK(plain_ids(tokenizer_of(file), "he1llo") == Ids{256, '1', 257, 'o'});
  CHECK(plain_ids(tokenizer_of(file), "l's") == Ids{'l', '\'', 's'});
  // A merge across the quote is possible only if the text is one piece.
  file["model"]["vocab"]["l'"] = 263;
  file["model"]["merges"].push_back({"l", "'"});
  file["added_tokens"] = json::array();
  file["post_processor"] = nullptr;
  CHECK(plain_ids(tokenizer_of(file), "l's") == Ids{'l', '\'', 's'});
  file["pre_tokenizer"]["use_regex"] = false;
  CHECK(plain_ids(tokenizer_of(file), "l's") == Ids{263, 's'});
}

TEST_CASE("a token of a part of a character decodes to the character with its other parts, and to U+FFFD without", "[text][cpu]") {
  const Tokenizer tokenizer = tokenizer_of(byte_level_tokenizer());
  CHECK(plain_ids(tokenizer, kGrinning) == Ids{262, 0x98, 0x80});
  CHECK(tokenizer.decode(Ids{262, 0x98, 0x80}) == kGrinning);
  CHECK(tokenizer.decode(Ids{262, 0x98}) == kReplacement);  // one, for the beginning of one character
  CHECK(tokenizer.decode(Ids{262, 'a'}) == std::string(kReplacement) + "a");
  CHECK(tokenizer.decode(Ids{0x98, 0x80}) == std::string(kReplacement) + kReplacement);
  CHECK(tokenizer.decode(Ids{259, 9999, -1, 260}) == "hello hello");  // ids without a token are left out
}

TEST_CASE("each token knows the bytes of the text that it stands for", "[text][cpu]") {
  const Tokenizer tokenizer = tokenizer_of(byte_level_tokenizer());
  const Encoding found = tokenizer.encode_with_ranges(std::string("hello ") + kGrinning + "</s>");
  CHECK(found.ids == Ids{263, 259, ' ', 262, 0x98, 0x80, 264, 264});
  CHECK(byte_ranges(found) == Ranges{{0, 0}, {0, 5}, {5, 6}, {6, 8}, {8, 9}, {9, 10}, {10, 14}, {14, 14}});
}

TEST_CASE("added tokens are found in text, and special ones are left out on demand", "[text][cpu]") {
  const Tokenizer tokenizer = tokenizer_of(byte_level_tokenizer());
  const Ids ids = plain_ids(tokenizer, "hello</s>hello[tool] hello");
  CHECK(ids == Ids{259, 264, 259, 265, 260});
  CHECK(tokenizer.decode(ids) == "hello</s>hello[tool] hello");
  CHECK(tokenizer.decode(ids, /*skip_special_tokens=*/true) == "hellohello[tool] hello");
  CHECK(tokenizer.is_special(264));
  CHECK_FALSE(tokenizer.is_special(265));
  CHECK(plain_ids(tokenizer, "hello  <mask> hello") == Ids{259, 266, 260});  // lstrip: the spaces are the token's
  CHECK(plain_ids(tokenizer, "</s") == Ids{'<', '/', 's'});
  CHECK(tokenizer.token_to_id("[tool]") == 265);
  CHECK(tokenizer.token_to_id("Ġhello") == 260);
  CHECK(tokenizer.token_to_id(" hello") == std::nullopt);
  CHECK(tokenizer.id_to_token(260) == "Ġhello");
  CHECK(tokenizer.vocab_size() == 267);
}

TEST_CASE("characters without a token become the tokens of their bytes", "[text][cpu]") {
  const Tokenizer tokenizer = tokenizer_of(character_tokenizer());
  CHECK(tokenizer.encode("hi hi") == Ids{1, 263, 263, 2});
  CHECK(plain_ids(tokenizer, "hié") == Ids{263, 264});
  CHECK(plain_ids(tokenizer, std::string("hi") + kHan) == Ids{263, 3 + 0xE6, 3 + 0xBC, 3 + 0xA2});
  CHECK(plain_ids(tokenizer, "ih") == Ids{259, 261, 260});
  for (const std::string text : {"hi hi", " hi  é", "a\nb", "h\xF0\x9F\x98\x80i \xE6\xBC\xA2"}) {
    CHECK(tokenizer.decode(plain_ids(tokenizer, text)) == text);
  }
  // SentencePiece: U+FFFD for each byte of what forms no character.
  CHECK(tokenizer.decode(Ids{263, 3 + 0xE6, 3 + 0xBC}) == std::string("hi") + kReplacement + kReplacement);
}

TEST_CASE("without byte fallback unknown characters share one unknown token, if the file says so", "[text][cpu]") {
  json file = character_tokenizer();
  file["model"]["byte_fallback"] = false;
  const std::string text = std::string("hi") + kHan + kHan + "h";
  const Encoding fused = tokenizer_of(file).encode_with_ranges(text, false);
  CHECK(fused.ids == Ids{263, 0, 260});
  CHECK(byte_ranges(fused) == Ranges{{0, 2}, {2, 8}, {8, 9}});
  file["model"]["fuse_unk"] = false;
  CHECK(plain_ids(tokenizer_of(file), text) == Ids{263, 0, 0, 260});
  file["model"]["unk_token"] = nullptr;
  CHECK(has(thrown<ValueError>([&] { (void)tokenizer_of(file).encode(text); }), "has no token for '" + std::string(kHan) + "'"));
}

TEST_CASE("text that is not UTF-8 is refused by the offset of its first bad byte", "[text][cpu]") {
  const Tokenizer tokenizer = tokenizer_of(byte_level_tokenizer());
  CHECK(has(thrown<ValueError>([&] { (void)tokenizer.encode("hello \xFF"); }), "got byte 255 at offset 6"));
  CHECK(has(thrown<ValueError>([&] { (void)tokenizer.encode("\xF0\x9F"); }), "at offset 0"));
}

TEST_CASE("a tokenizer.json with something unknown or contradictory is refused by file and key", "[text][cpu]") {
  const json good = byte_level_tokenizer();
  const auto refused = [&](const char* path, const json& value, std::string_view rule) {
    json file = good;
    file[json::json_pointer(path)] = value;
    const std::string error = refusal_of(file);
    INFO(path << ": " << error);
    CHECK(has(error, "[folder/tokenizer.json]"));
    CHECK(has(error, rule));
  };
  refused("/model/type", "WordPiece", "model must be BPE or Unigram; got WordPiece");
  refused("/model/dropout", 0.1, "model.dropout must be null");
  refused("/model/color", 1, "key 'color' of the model is not supported");
  refused("/model/vocab/he", 257, "model.vocab must give each token its own id");
  refused("/model/merges/2", {"he", "xx"}, "merge 2 is 'he' + 'xx'");
  refused("/added_tokens/1/id", 300, "added token '</s>' must have the id that Hugging Face's tokenizers give it, 264; got 300");
  refused("/normalizer", {{"type", "Lowercase"}}, "normalizer may contain only Sequence, Prepend, Replace and NFC; got Lowercase");
  refused("/pre_tokenizer", {{"type", "Whitespace"}}, "pre_tokenizer may contain only");
  refused("/decoder", {{"type", "Fuse"}}, "decoder must be ByteLevel where the pre_tokenizer is; got Fuse");
  refused("/post_processor/special_tokens/<s>/ids", {400}, "TemplateProcessing must put known tokens around the text; got id 400");
  const auto broken = [] { (void)Tokenizer::from_json("{\"model\": ", "folder/tokenizer.json"); };
  CHECK(has(thrown<FormatError>(broken), "folder/tokenizer.json"));
}

TEST_CASE("a folder that is absent or has no tokenizer.json, or whose eos_token is not a token, is refused by name",
          "[text][cpu]") {
  const TemporaryFolder folder;
  const std::string absent = folder.path() + "/lamp";
  CHECK(has(thrown<IoError>([&] { (void)Tokenizer::from_folder(absent); }),
            "'" + absent + "' must be a model's folder; there is none"));
  CHECK(
      has(thrown<IoError>([&] { (void)Tokenizer::from_folder(folder.path()); }), folder.path() + "] must contain tokenizer.json"));
  (void)folder.write("tokenizer.json", byte_level_tokenizer().dump());
  CHECK(Tokenizer::from_folder(folder.path()).eos_id() == std::nullopt);
  const std::string config = folder.write("tokenizer_config.json", R"({"eos_token": "</s>", "bos_token": {"content": "<s>"}})");
  (void)folder.write("generation_config.json", R"({"eos_token_id": [264, 265, 9999], "pad_token_id": 266})");
  const Tokenizer tokenizer = Tokenizer::from_folder(folder.path());
  CHECK(tokenizer.bos_id() == 263);
  CHECK(tokenizer.pad_id() == 266);
  CHECK(tokenizer.eos_ids() == Ids{264, 265});
  (void)folder.write("tokenizer_config.json", R"({"eos_token": "<end>"})");
  CHECK(has(thrown<FormatError>([&] { (void)Tokenizer::from_folder(folder.path()); }), config + "] 'eos_token' must be a token"));
}

TEST_CASE("the tokenizer of examples/data gives each text back, and each token its own id", "[text][cpu]") {
  const Tokenizer tokenizer = Tokenizer::from_folder(example_file("tiny-llama"));
  CHECK(tokenizer.bos_id() == 694);
  CHECK(tokenizer.eos_ids() == Ids{695, 698});
  CHECK(tokenizer.pad_id() == std::nullopt);
  CHECK(tokenizer.encode("") == Ids{694});
  CHECK(plain_ids(tokenizer, "<|eot_id|>\n") == Ids{698, *tokenizer.token_to_id("Ċ")});
  for (const std::string text :
       {"The river runs to the sea.", "  two  spaces \r\n\ttab", "1234567 + 89", "e\xCC\x81 is not \xC3\xA9",
        "\xE6\xBC\xA2\xE5\xAD\x97\xF0\x9F\x98\x80", "we'll see, they'RE", "a<|eot_id|>b", "\n\n\n"}) {
    const Encoding found = tokenizer.encode_with_ranges(text, false);
    CHECK(tokenizer.decode(found.ids) == text);
    std::string joined;
    for (const TextRange& range : found.ranges) joined += text.substr(range.begin, range.end - range.begin);
    CHECK(joined == text);
  }
  for (TokenId id = 0; id < tokenizer.id_limit(); ++id) REQUIRE(tokenizer.token_to_id(*tokenizer.id_to_token(id)) == id);
  CHECK(tokenizer.vocab_size() == 699);
}
