// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/data/tokenizer.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "added_tokens.hpp"
#include "byte_pair.hpp"
#include "json_reading.hpp"
#include "pretokenize.hpp"
#include "qlorapp/core/check.hpp"
#include "qlorapp/format/folder.hpp"
#include "special_tokens.hpp"
#include "tokenizer_json.hpp"
#include "unicode.hpp"

namespace qlorapp {
namespace {

constexpr size_t kLargestTokenizerFile = 64 << 20;
constexpr std::size_t kLongestText = std::size_t{1} << 30;

std::vector<AddedToken> of_pass(const std::vector<AddedToken>& all, bool normalized) {
  std::vector<AddedToken> out;
  std::copy_if(all.begin(), all.end(), std::back_inserter(out), [&](const AddedToken& t) { return t.normalized == normalized; });
  return out;
}

}  // namespace

struct Tokenizer::Tables {
  struct Token {
    std::string text;   ///< As spelt in the file.
    std::string bytes;  ///< What it decodes to.
    bool special = false;
  };

  TokenizerDescription about;  ///< Without vocabulary and merges, which the model has.
  BytePairModel model;
  AddedTokenFinder first_pass, second_pass;
  std::unordered_map<TokenId, Token> tokens;
  StringMap<TokenId> added_ids;
  TokenId largest = -1;
  SpecialTokens special;

  Tables(TokenizerDescription description, const std::string& where)
      : about(std::move(description)),
        model(about.vocabulary, about.merges, about.ignore_merges, where),
        first_pass(of_pass(about.added, false)),
        second_pass(of_pass(about.added, true)) {
    tokens.reserve(about.vocabulary.size() + about.added.size());
    for (const auto& [text, id] : about.vocabulary) put(id, text, false);
    for (const auto& token : about.added) {
      put(token.id, token.content, token.special);
      added_ids.emplace(token.content, token.id);
    }
    about.vocabulary = {};
    about.merges = {};
    for (const auto* ids : {&about.prefix_ids, &about.suffix_ids}) {
      for (const TokenId id : *ids) {
        QLORAPP_CHECK_FORMAT(tokens.contains(id), "[", where, "] TemplateProcessing must put known tokens around the text; got id ",
                             id, ". Take the tokenizer.json of the model again.");
      }
    }
  }

  void put(TokenId id, const std::string& text, bool is_special) {
    Token token{text, {}, is_special};
    if (!bytes_of_token(text, token.bytes)) token.bytes = text;
    tokens.insert_or_assign(id, std::move(token));
    largest = std::max(largest, id);
  }

  /// Appends the tokens of a stretch that contains no added token.
  void encode_stretch(std::string_view text, std::size_t begin, std::size_t end, Encoding& out,
                      std::vector<PieceToken>& scratch) const {
    // The space that add_prefix_space asks for stands at begin - 1; its token's range starts at begin all the same.
    const bool prefix = about.add_prefix_space && text[begin] != ' ';
    std::string with_space;
    std::string_view stretch = text.substr(begin, end - begin);
    if (prefix) stretch = with_space.append(1, ' ').append(stretch);

    const std::vector<unicode::CodePoint> decoded = unicode::decode(stretch);
    std::vector<Piece> pieces{{0, decoded.size()}}, finer;
    for (const Split split : about.splits) {
      finer.clear();
      for (const Piece piece : pieces) split_pieces(split, decoded, piece, finer);
      pieces.swap(finer);
    }
    const auto offset = [&](std::size_t i) { return i < decoded.size() ? std::size_t{decoded[i].offset} : stretch.size(); };
    const auto in_text = [&](std::size_t i) { return begin + (prefix ? std::max<std::size_t>(i, 1) - 1 : i); };
    for (const Piece piece : pieces) {
      scratch.clear();
      std::size_t at = offset(piece.begin);
      model.encode(stretch.substr(at, offset(piece.end) - at), scratch);
      for (const PieceToken token : scratch) {
        out.ids.push_back(token.id);
        out.ranges.push_back({in_text(at), in_text(at + token.bytes)});
        at += token.bytes;
      }
    }
  }
};

Tokenizer::Tokenizer(std::shared_ptr<const Tables> tables) : tables_(std::move(tables)) {}

Tokenizer Tokenizer::from_json(std::string_view text, const std::string& where) {
  QLORAPP_CHECK_FORMAT(text.size() <= kLargestTokenizerFile, "[", where, "] may have ", kLargestTokenizerFile, " bytes; it has ",
                       text.size(), ". Check the file.");
  return Tokenizer(std::make_shared<const Tables>(read_tokenizer_json(text, where), where));
}

Tokenizer Tokenizer::from_folder(const std::string& folder) {
  const std::string path = format::path_in(folder, "tokenizer.json");
  if (!format::exists(path)) {
    throw IoError(concat("[", folder,
                         "] must contain tokenizer.json; there is none. Copy the tokenizer files of the model here, "
                         "or save them with tokenizer.save_pretrained()."),
                  ENOENT);
  }
  auto tables = std::make_shared<Tables>(read_tokenizer_json(read_file(path, kLargestTokenizerFile), path), path);
  Tokenizer tokenizer(tables);
  tables->special = read_special_tokens(folder, tokenizer);
  return tokenizer;
}

Encoding Tokenizer::encode_with_ranges(std::string_view text, bool add_special_tokens) const {
  QLORAPP_CHECK_VALUE(text.size() < kLongestText, "[tokenizer] text must be shorter than 1 GiB; got ", text.size(),
                      " bytes. Split it into several rows.");
  const std::size_t invalid = unicode::first_invalid_utf8(text);
  QLORAPP_CHECK_VALUE(invalid == std::string_view::npos, "[tokenizer] text must be well-formed UTF-8; got byte ",
                      static_cast<int>(static_cast<uint8_t>(text[std::min(invalid, text.size() - 1)])), " at offset ", invalid,
                      ". Save the text as UTF-8.");
  Encoding out;
  if (add_special_tokens) {
    out.ids = tables_->about.prefix_ids;
    out.ranges.assign(out.ids.size(), TextRange{0, 0});
  }
  std::vector<Stretch> outer, inner;
  std::vector<PieceToken> scratch;
  tables_->first_pass.find(text, 0, text.size(), outer);
  for (const Stretch& stretch : outer) {
    if (stretch.id < 0) tables_->second_pass.find(text, stretch.begin, stretch.end, inner);
    else inner.push_back(stretch);
  }
  for (const Stretch& stretch : inner) {
    if (stretch.id < 0) {
      tables_->encode_stretch(text, stretch.begin, stretch.end, out, scratch);
    } else {
      out.ids.push_back(stretch.id);
      out.ranges.push_back({stretch.begin, stretch.end});
    }
  }
  if (add_special_tokens) {
    const auto& suffix = tables_->about.suffix_ids;
    out.ids.insert(out.ids.end(), suffix.begin(), suffix.end());
    out.ranges.resize(out.ids.size(), TextRange{text.size(), text.size()});
  }
  return out;
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  return encode_with_ranges(text, add_special_tokens).ids;
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool skip_special_tokens) const {
  std::string bytes;
  for (const TokenId id : ids) {
    const auto token = tables_->tokens.find(id);
    if (token == tables_->tokens.end() || (skip_special_tokens && token->second.special)) continue;
    bytes += token->second.bytes;
  }
  std::string out;
  out.reserve(bytes.size());
  unicode::append_lossy(out, bytes);
  return out;
}

std::optional<TokenId> Tokenizer::token_to_id(std::string_view token) const {
  if (const auto added = tables_->added_ids.find(token); added != tables_->added_ids.end()) return added->second;
  const auto& known = tables_->model.token_ids();
  const auto found = known.find(token);
  return found == known.end() ? std::nullopt : std::optional(found->second);
}

std::optional<std::string> Tokenizer::id_to_token(TokenId id) const {
  const auto token = tables_->tokens.find(id);
  return token == tables_->tokens.end() ? std::nullopt : std::optional(token->second.text);
}

bool Tokenizer::is_special(TokenId id) const {
  const auto token = tables_->tokens.find(id);
  return token != tables_->tokens.end() && token->second.special;
}

int64_t Tokenizer::vocab_size() const { return static_cast<int64_t>(tables_->tokens.size()); }
int64_t Tokenizer::id_limit() const { return int64_t{tables_->largest} + 1; }
std::optional<TokenId> Tokenizer::bos_id() const { return tables_->special.bos; }
std::optional<TokenId> Tokenizer::eos_id() const { return tables_->special.eos; }
std::optional<TokenId> Tokenizer::pad_id() const { return tables_->special.pad; }
const std::vector<TokenId>& Tokenizer::eos_ids() const { return tables_->special.all_eos; }

}  // namespace qlorapp
