// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/data/tokenizer.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "added_tokens.hpp"
#include "byte_pair.hpp"
#include "core/check.hpp"
#include "format/folder.hpp"
#include "json_reading.hpp"
#include "special_tokens.hpp"
#include "tokenizer_json.hpp"
#include "unicode.hpp"

namespace qlorapp {
namespace {

constexpr size_t kLargestTokenizerFile = 64 << 20;
constexpr std::size_t kLongestText = std::size_t{1} << 30;

/// U+2581, with which SentencePiece and its heirs spell a space.
constexpr std::string_view kSpaceMark = "\xE2\x96\x81";
constexpr uint32_t kSpaceMarkCodePoint = 0x2581;

std::vector<AddedToken> of_pass(const std::vector<AddedToken>& all, bool normalized) {
  std::vector<AddedToken> out;
  std::copy_if(all.begin(), all.end(), std::back_inserter(out), [&](const AddedToken& t) { return t.normalized == normalized; });
  return out;
}

}  // namespace

struct Tokenizer::Tables {
  struct Token {
    std::string text;     ///< As spelled in the file.
    std::string decoded;  ///< Byte-level: the bytes; else as the decoder's first step gets it.
    bool special = false;
  };

  TokenizerDescription about;  ///< Without vocabulary and merges, which the model has.
  BytePairModel model;
  AddedTokenFinder first_pass, second_pass;
  TokenDecoder decoder;
  std::unordered_map<TokenId, Token> tokens;
  StringMap<TokenId> added_ids;
  TokenId largest = -1;
  SpecialTokens special;

  Tables(TokenizerDescription description, const std::string& where)
      : about(std::move(description)),
        model(about.vocabulary, about.merges, about.model, where),
        first_pass(of_pass(about.added, false)),
        second_pass(normalized(of_pass(about.added, true), where)),
        decoder(about.decoder.steps) {
    if (model.may_cut_before(kSpaceMark)) about.pre_tokenizer.splits.push_back({Split::kBeforeRuns, kSpaceMarkCodePoint});
    tokens.reserve(about.vocabulary.size() + about.added.size());
    for (const auto& [text, id] : about.vocabulary) put(id, text, false, text);
    for (const auto& token : about.added) {
      put(token.id, token.content, token.special, token.normalized ? normalized(token.content) : token.content);
      added_ids.emplace(token.content, token.id);
    }
    about.vocabulary = {};
    about.merges = {};
    for (const auto* ids : {&about.prefix_ids, &about.suffix_ids}) {
      for (const TokenId id : *ids) {
        QLORAPP_CHECK_FORMAT(
            tokens.contains(id),
            "[{}] TemplateProcessing must put known tokens around the text; got id {}. Copy tokenizer.json from the model again.",
            where, id);
      }
    }
  }

  /// @param spelling  the text as the decoder gets it.
  void put(TokenId id, const std::string& text, bool is_special, const std::string& spelling) {
    Token token{text, {}, is_special};
    if (!about.decoder.byte_level || !bytes_of_token(spelling, token.decoded)) token.decoded = spelling;
    tokens.insert_or_assign(id, std::move(token));
    largest = std::max(largest, id);
  }

  [[nodiscard]] std::string normalized(const std::string& text) const {
    return std::string(about.normalizer.apply({text}).section().text);
  }

  /// The second pass looks at normalized text, so its tokens are looked for as the normalizer spells them.
  [[nodiscard]] std::vector<AddedToken> normalized(std::vector<AddedToken> tokens_of_pass, const std::string& where) const {
    StringSet spellings;
    for (AddedToken& token : tokens_of_pass) {
      std::string spelling = normalized(token.content);
      QLORAPP_CHECK_FORMAT(!spelling.empty() && spellings.insert(spelling).second,
                           "[{}] added token '{}' must have a unique spelling after the normalizer; got '{}'. Copy tokenizer.json "
                           "from the model again.",
                           where, token.content, spelling);
      token.content = std::move(spelling);
    }
    return tokens_of_pass;
  }

  /// Appends the tokens of what is between the added tokens of the first pass.
  void encode_section(const Section& given, Encoding& out) const {
    if (about.normalizer.empty()) return find_normalized(given, out);
    const AlignedText changed = about.normalizer.apply(given);
    find_normalized(changed.section(), out);
  }

  void find_normalized(const Section& section, Encoding& out) const {
    std::vector<Stretch> stretches;
    second_pass.find(section.text, 0, section.text.size(), stretches);
    for (const Stretch& stretch : stretches) {
      if (stretch.id < 0) {
        encode_stretch(section.part(stretch.begin, stretch.end), out);
      } else {
        out.ids.push_back(stretch.id);
        out.ranges.push_back(section.range(stretch.begin, stretch.end));
      }
    }
  }

  /// Appends the tokens of a stretch that contains no added token and is not empty.
  void encode_stretch(const Section& stretch, Encoding& out) const {
    const auto& marker = about.pre_tokenizer.marker;
    const bool changes = marker && (marker->marker != " " || stretch.text.front() != ' ');
    if (!changes) return encode_marked(stretch, out);
    AlignedText marked(stretch);
    marked.replace(" ", marker->marker);
    const bool here =
        marker->prepend == PrependScheme::kAlways || (marker->prepend == PrependScheme::kFirst && stretch.range(0, 1).begin == 0);
    if (here && !marked.section().text.starts_with(marker->marker)) marked.prepend(marker->marker);
    encode_marked(marked.section(), out);
  }

  void encode_marked(const Section& stretch, Encoding& out) const {
    const std::vector<unicode::CodePoint> decoded = unicode::decode(stretch.text);
    std::vector<Piece> pieces{{0, decoded.size()}}, finer;
    for (const SplitStep& split : about.pre_tokenizer.splits) {
      finer.clear();
      for (const Piece piece : pieces) split_pieces(split, decoded, piece, finer);
      pieces.swap(finer);
    }
    const auto offset = [&](std::size_t i) { return i < decoded.size() ? std::size_t{decoded[i].offset} : stretch.text.size(); };
    std::vector<PieceToken> of_piece;
    for (const Piece piece : pieces) {
      of_piece.clear();
      std::size_t at = offset(piece.begin);
      model.encode(stretch.text.substr(at, offset(piece.end) - at), of_piece);
      for (const PieceToken token : of_piece) {
        out.ids.push_back(token.id);
        out.ranges.push_back(stretch.range(at, at + token.bytes));
        at += token.bytes;
      }
    }
  }
};

Tokenizer::Tokenizer(std::shared_ptr<const Tables> tables) : tables_(std::move(tables)) {}

Tokenizer Tokenizer::from_json(std::string_view text, const std::string& where) {
  QLORAPP_CHECK_FORMAT(text.size() <= kLargestTokenizerFile, "[{}] may have at most {} bytes; it has {}. Check the file.", where,
                       kLargestTokenizerFile, text.size());
  return Tokenizer(std::make_shared<const Tables>(read_tokenizer_json(text, where), where));
}

Tokenizer Tokenizer::from_folder(const std::string& folder) {
  const std::string path = format::path_in(folder, "tokenizer.json");
  if (!format::exists(folder)) throw IoError(message("[tokenizer] '{}' must be a model's folder; there is none.", folder), ENOENT);
  if (!format::exists(path)) {
    throw IoError(message("[{}] must contain tokenizer.json; there is none. Copy the tokenizer files of the model here, or save "
                          "them with tokenizer.save_pretrained().",
                          folder),
                  ENOENT);
  }
  auto tables = std::make_shared<Tables>(read_tokenizer_json(read_file_inside(path, kLargestTokenizerFile), path), path);
  Tokenizer tokenizer(tables);
  tables->special = read_special_tokens(folder, tokenizer);
  return tokenizer;
}

Encoding Tokenizer::encode_with_ranges(std::string_view text, bool add_special_tokens) const {
  QLORAPP_CHECK_VALUE(text.size() < kLongestText,
                      "[tokenizer] text must be shorter than 1 GiB; got {} bytes. Split it into several rows.", text.size());
  const std::size_t invalid = unicode::first_invalid_utf8(text);
  QLORAPP_CHECK_VALUE(invalid == std::string_view::npos,
                      "[tokenizer] text must be well-formed UTF-8; got byte {} at offset {}. Save the text as UTF-8.",
                      static_cast<int>(static_cast<uint8_t>(text[std::min(invalid, text.size() - 1)])), invalid);
  Encoding out;
  if (add_special_tokens) {
    out.ids = tables_->about.prefix_ids;
    out.ranges.assign(out.ids.size(), TextRange{0, 0});
  }
  std::vector<Stretch> stretches;
  tables_->first_pass.find(text, 0, text.size(), stretches);
  for (const Stretch& stretch : stretches) {
    if (stretch.id < 0) {
      tables_->encode_section({text.substr(stretch.begin, stretch.end - stretch.begin), nullptr, stretch.begin}, out);
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
  const bool byte_level = tables_->about.decoder.byte_level;
  std::string bytes;
  std::vector<std::string> tokens;
  for (const TokenId id : ids) {
    const auto token = tables_->tokens.find(id);
    if (token == tables_->tokens.end() || (skip_special_tokens && token->second.special)) continue;
    if (byte_level) bytes += token->second.decoded;
    else tokens.push_back(token->second.decoded);
  }
  if (!byte_level) return tables_->decoder.decode(std::move(tokens));
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
