// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/text/tokenizer.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "added_tokens.hpp"
#include "byte_pair.hpp"
#include "core/check.hpp"
#include "files/folder.hpp"
#include "json_reading.hpp"
#include "special_tokens.hpp"
#include "tokenizer_json.hpp"
#include "unicode.hpp"
#include "unsupported.hpp"

namespace qlorapp {
namespace {

constexpr size_t kLargestTokenizerFile = 64 << 20;
constexpr std::size_t kLongestText = std::size_t{1} << 30;
constexpr std::size_t kSplitWindow = std::size_t{1} << 19;     // bytes that are split at a time
constexpr std::size_t kLongestPiece = std::size_t{2} << 20;    // its merges take many bytes for each
constexpr std::size_t kLongestChanged = std::size_t{8} << 20;  // so do the origins of its bytes

/// U+2581, with which SentencePiece and its heirs spell a space.
constexpr std::string_view kSpaceMark = "\xE2\x96\x81";
constexpr uint32_t kSpaceMarkCodePoint = 0x2581;

std::vector<AddedToken> of_pass(const std::vector<AddedToken>& all, bool normalized) {
  std::vector<AddedToken> out;
  std::copy_if(all.begin(), all.end(), std::back_inserter(out), [&](const AddedToken& t) { return t.normalized == normalized; });
  return out;
}

std::unique_ptr<const PieceModel> model_of(TokenizerDescription& about, const std::string& where) {
  if (about.unigram) return std::make_unique<const UnigramModel>(about.vocabulary, *std::move(about.unigram), where);
  return std::make_unique<const BytePairModel>(about.vocabulary, about.merges, about.model, where);
}

}  // namespace

struct Tokenizer::Tables {
  struct Token {
    std::string text;     ///< As spelled in the file.
    std::string decoded;  ///< Byte-level: the bytes; else as the decoder's first step gets it.
    bool special = false;
  };

  TokenizerDescription about;  ///< Without vocabulary and merges, which the model has.
  std::unique_ptr<const PieceModel> model;
  AddedTokenFinder first_pass, second_pass;
  TokenDecoder decoder;
  std::unordered_map<TokenId, Token> tokens;
  StringMap<TokenId> added_ids;
  TokenId largest = -1;
  SpecialTokens special;

  Tables(TokenizerDescription description, const std::string& where)
      : about(std::move(description)),
        model(model_of(about, where)),
        first_pass(of_pass(about.added, false)),
        second_pass(normalized(of_pass(about.added, true), where)),
        decoder(about.decoder.steps) {
    if (model->may_cut_before(kSpaceMark)) about.pre_tokenizer.splits.push_back({Split::kBeforeRuns, kSpaceMarkCodePoint});
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
      if (spelling.empty() || !spellings.insert(spelling).second) {
        throw UnsupportedError(message(
            "[{}] added token '{}' must have a unique spelling after the normalizer; got '{}'. Copy tokenizer.json from the model "
            "again.",
            where, token.content, spelling));
      }
      token.content = std::move(spelling);
    }
    return tokens_of_pass;
  }

  /// Appends the tokens of what is between the added tokens of the first pass.
  void encode_section(const Section& given, std::size_t most, Encoding& out) const {
    if (about.normalizer.keeps(given.text)) return find_normalized(given, most, out);
    QLORAPP_CHECK_VALUE(
        given.text.size() <= kLongestChanged,
        "[tokenizer] text that the normalizer changes may have at most {} bytes in one row; got {}. Split it into several "
        "rows.",
        kLongestChanged, given.text.size());
    const AlignedText changed = about.normalizer.apply(given);
    find_normalized(changed.section(), most, out);
  }

  void find_normalized(const Section& section, std::size_t most, Encoding& out) const {
    std::vector<Stretch> stretches;
    second_pass.find(section.text, 0, section.text.size(), special.split, most, stretches);
    for (const Stretch& stretch : stretches) {
      if (out.ids.size() >= most) return;
      if (stretch.id < 0) {
        encode_stretch(section.part(stretch.begin, stretch.end), most, out);
      } else {
        out.ids.push_back(stretch.id);
        out.ranges.push_back(section.range(stretch.begin, stretch.end));
      }
    }
  }

  /// Appends the tokens of a stretch that contains no added token and is not empty.
  void encode_stretch(const Section& stretch, std::size_t most, Encoding& out) const {
    const auto& marker = about.pre_tokenizer.marker;
    const bool changes = marker && (marker->marker != " " || stretch.text.front() != ' ');
    if (!changes) return encode_marked(stretch, most, out);
    QLORAPP_CHECK_VALUE(
        stretch.text.size() <= kLongestChanged,
        "[tokenizer] text whose spaces the pre_tokenizer marks may have at most {} bytes in one row; got {}. Split it into "
        "several rows.",
        kLongestChanged, stretch.text.size());
    AlignedText marked(stretch);
    marked.replace(" ", marker->marker);
    const bool here =
        marker->prepend == PrependScheme::kAlways || (marker->prepend == PrependScheme::kFirst && stretch.range(0, 1).begin == 0);
    if (here && !marked.section().text.starts_with(marker->marker)) marked.prepend(marker->marker);
    encode_marked(marked.section(), most, out);
  }

  /// A window at a time: a long text is never decoded as a whole.
  void encode_marked(const Section& stretch, std::size_t most, Encoding& out) const {
    std::vector<Piece> pieces;
    std::vector<PieceToken> of_piece;
    std::size_t size = kSplitWindow;
    for (std::size_t begin = 0; begin < stretch.text.size() && out.ids.size() < most;) {
      std::size_t end = std::min(begin + size, stretch.text.size());
      while (end < stretch.text.size() && (static_cast<uint8_t>(stretch.text[end]) & 0xC0) == 0x80) ++end;
      const bool is_end = end == stretch.text.size();
      const std::string_view window = stretch.text.substr(begin, end - begin);
      const std::vector<unicode::CodePoint> decoded = unicode::decode(window);
      const std::size_t done = split_window(about.pre_tokenizer.splits, decoded, is_end, pieces);
      const auto offset = [&](std::size_t i) { return i < decoded.size() ? std::size_t{decoded[i].offset} : window.size(); };
      for (const Piece piece : pieces) {
        if (done == 0 || out.ids.size() >= most) break;
        of_piece.clear();
        std::size_t at = offset(piece.begin);
        check_piece(offset(piece.end) - at);
        model->encode(window.substr(at, offset(piece.end) - at), of_piece);
        for (const PieceToken token : of_piece) {
          out.ids.push_back(token.id);
          out.ranges.push_back(token.bytes == 0 ? out.ranges.back() : stretch.range(begin + at, begin + at + token.bytes));
          at += token.bytes;
        }
      }
      if (done == 0) check_window(size);
      size = done == 0 ? size * 2 : kSplitWindow;
      begin += done == 0 ? 0 : offset(done);
    }
  }

  /// @param bytes  of a window that is too short.
  void check_window(std::size_t bytes) const {
    const auto& steps = about.pre_tokenizer.splits;
    if (std::none_of(steps.begin(), steps.end(), [](const SplitStep& step) { return step.pattern != nullptr; }))
      return check_piece(bytes);
    QLORAPP_CHECK_VALUE(bytes <= kLongestChanged,
                        "[tokenizer] with this pre_tokenizer a text without the end of a word may have at most {} bytes; this one "
                        "has more. Split the "
                        "row.",
                        kLongestChanged);
  }

  static void check_piece(std::size_t bytes) {
    QLORAPP_CHECK_VALUE(
        bytes <= kLongestPiece,
        "[tokenizer] a part of a text that the pre_tokenizer does not divide may have at most {} bytes; this one has more. "
        "Split the row.",
        kLongestPiece);
  }
};

Tokenizer::Tokenizer(std::shared_ptr<const Tables> tables) : tables_(std::move(tables)) {}

Tokenizer Tokenizer::from_json(std::string_view text, const std::string& where) {
  QLORAPP_CHECK_FORMAT(text.size() <= kLargestTokenizerFile, "[{}] may have at most {} bytes; it has {}. Check the file.", where,
                       kLargestTokenizerFile, text.size());
  return Tokenizer(std::make_shared<const Tables>(read_tokenizer_json(text, where), where));
}

Tokenizer Tokenizer::from_folder(const std::string& folder, const std::string& model_folder) {
  const std::string path = files::path_in(folder, "tokenizer.json");
  if (!files::exists(folder)) throw IoError(message("[tokenizer] '{}' must be a model's folder; there is none.", folder), ENOENT);
  if (!files::has_entry(folder, "tokenizer.json")) {
    throw IoError(message("[{}] must contain tokenizer.json; there is none. Copy the tokenizer files of the model here, or save "
                          "them with tokenizer.save_pretrained().",
                          folder),
                  ENOENT);
  }
  auto tables = std::make_shared<Tables>(read_tokenizer_json(read_file_inside(path, kLargestTokenizerFile), path), path);
  Tokenizer tokenizer(tables);
  tables->special = read_special_tokens(folder, model_folder.empty() ? folder : model_folder, tokenizer);
  return tokenizer;
}

Encoding Tokenizer::encode_with_ranges(std::string_view text, bool add_special_tokens, std::size_t most) const {
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
  tables_->first_pass.find(text, 0, text.size(), tables_->special.split, most, stretches);
  for (const Stretch& stretch : stretches) {
    if (out.ids.size() >= most) break;
    if (stretch.id < 0) {
      tables_->encode_section({text.substr(stretch.begin, stretch.end - stretch.begin), nullptr, stretch.begin}, most, out);
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
  if (out.ids.size() > most) {
    out.ids.resize(most);
    out.ranges.resize(most);
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
  const auto& known = tables_->model->token_ids();
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
std::vector<std::string> Tokenizer::special_tokens() const {
  std::vector<std::string> out;
  for (const auto& [id, token] : tables_->tokens) {
    if (token.special) out.push_back(token.text);
  }
  return out;
}

std::optional<TokenId> Tokenizer::bos_id() const { return tables_->special.bos; }
std::optional<TokenId> Tokenizer::eos_id() const { return tables_->special.eos; }
std::optional<TokenId> Tokenizer::pad_id() const { return tables_->special.pad; }
const std::vector<TokenId>& Tokenizer::eos_ids() const { return tables_->special.all_eos; }

}  // namespace qlorapp
