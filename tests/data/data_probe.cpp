// SPDX-License-Identifier: Apache-2.0
// Reads one JSON request a line, writes one JSON answer a line. Text travels as hexadecimal digits of its bytes, so that
// ill-formed UTF-8 can be sent too. {"error": …} answers what was thrown.
#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>

#include "core/check.hpp"
#include "data/gzip_reader.hpp"
#include "data/row_reader.hpp"
#include "data/row_shape.hpp"
#include "qlorapp/data/dataset.hpp"
#include "qlorapp/text/chat_template.hpp"
#include "qlorapp/text/tokenizer.hpp"
#include "text/pretokenize.hpp"
#include "text/tokenizer_json.hpp"
#include "text/unicode.hpp"

namespace {

using json = nlohmann::ordered_json;

std::string from_hex(const std::string& hex) {
  std::string out;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) out += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return out;
}

std::string to_hex(const std::string& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const char c : bytes) {
    out += kDigits[static_cast<uint8_t>(c) >> 4];
    out += kDigits[static_cast<uint8_t>(c) & 15];
  }
  return out;
}

json or_null(const std::optional<qlorapp::TokenId>& id) { return id ? json(*id) : json(nullptr); }

/// The pieces of the first Split of a tokenizer.json, in code points.
json split_by_json(const json& request) {
  const qlorapp::TokenizerDescription about = qlorapp::read_tokenizer_json(request["json"].get<std::string>(), "t.json");
  json out = json::array();
  for (const auto& hex : request["texts"]) {
    const std::string text = from_hex(hex.get<std::string>());
    const auto decoded = qlorapp::unicode::decode(text);
    std::vector<qlorapp::Piece> pieces;
    qlorapp::split_pieces(about.pre_tokenizer.splits.at(0), decoded, {0, decoded.size()}, pieces);
    json row = json::array();
    for (const auto& piece : pieces) row.push_back({piece.begin, piece.end});
    out.push_back(std::move(row));
  }
  return out;
}

json split(const json& request) {
  if (request.contains("json")) return split_by_json(request);
  static const std::map<std::string, qlorapp::Split> kNames{{"llama3", qlorapp::Split::kLlama3},
                                                            {"qwen2", qlorapp::Split::kQwen2},
                                                            {"gpt2", qlorapp::Split::kGpt2},
                                                            {"individual_digits", qlorapp::Split::kIndividualDigits},
                                                            {"contiguous_digits", qlorapp::Split::kContiguousDigits}};
  json ends = json::array();
  for (const auto& hex : request["texts"]) {
    const std::string text = from_hex(hex.get<std::string>());
    const auto decoded = qlorapp::unicode::decode(text);
    std::vector<qlorapp::Piece> pieces;
    qlorapp::split_pieces({kNames.at(request["split"].get<std::string>())}, decoded, {0, decoded.size()}, pieces);
    json row = json::array();
    for (const auto& piece : pieces) row.push_back(piece.end);
    ends.push_back(std::move(row));
  }
  return ends;
}

/// {"name"} or {"folder"} or {"source", "bos"}; messages; date and prompt are optional.
json render(const json& request) {
  std::optional<qlorapp::ChatTemplate> chat;
  if (request.contains("name")) chat = qlorapp::ChatTemplate::named(request["name"].get<std::string>());
  else if (request.contains("folder")) chat = qlorapp::ChatTemplate::from_folder(request["folder"].get<std::string>());
  else
    chat = qlorapp::ChatTemplate::from_source(
        request["source"].get<std::string>(),
        {{"bos_token", request["bos"].get<std::string>()}, {"eos_token", request.value("eos", "</e!>")}}, "t.jinja");
  if (!chat) return nullptr;
  std::vector<qlorapp::Message> messages;
  for (const auto& message : request["messages"]) {
    json rest = message;
    rest.erase("role");
    rest.erase("content");
    messages.push_back({message["role"], message.value("content", ""), rest.empty() ? "" : rest.dump()});
  }
  qlorapp::ChatOptions options;
  if (request.contains("tools")) options.tools = request["tools"].dump();
  options.add_generation_prompt = request.value("prompt", false);
  options.served = options.turns = request.value("served", false);
  if (request.contains("date")) options.date_string = request["date"].get<std::string>();
  const auto rendered = chat->render(messages, options);
  json turns = json::array();
  for (const auto& turn : rendered.turns) turns.push_back({turn.begin, turn.end});
  return {{"text", to_hex(rendered.text)}, {"turns", turns}, {"end", chat->end_of_turn().value_or("")}};
}

qlorapp::DatasetOptions options_of(const json& request) {
  qlorapp::DatasetOptions options;
  options.max_length = request.value("max_length", options.max_length);
  if (request.contains("completion_only_loss")) options.completion_only_loss = request["completion_only_loss"].get<bool>();
  options.assistant_only_loss = request.value("assistant_only_loss", false);
  options.append_eos = request.value("append_eos", true);
  options.text_field = request.value("text_field", options.text_field);
  options.prompt_field = request.value("prompt_field", std::string());
  options.completion_field = request.value("completion_field", std::string());
  options.messages_field = request.value("messages_field", std::string());
  options.file_format = qlorapp::parse_file_format(request.value("file_format", "auto"));
  options.model_vocab_size = request.value("model_vocab_size", int64_t{0});
  return options;
}

/// Bytes of a gzip file, `step` at a time on both sides; hexadecimal. What comes before an error is dropped.
json gunzip(const json& request) {
  const std::string packed = from_hex(request["bytes"].get<std::string>());
  const std::size_t step = request.value("step", std::size_t{1000});
  std::size_t at = 0;
  const auto source = [&](std::span<char> into) {
    const std::size_t size = packed.copy(into.data(), std::min(step, into.size()), at);
    at += size;
    return size;
  };
  qlorapp::GzipReader reader(source, "x.gz");
  std::string out, piece(step, 0);
  for (std::size_t size = 0; (size = reader.read(piece)) > 0;) out.append(piece, 0, size);
  return to_hex(out);
}

/// The rows of a file as they are read, or with "chat" (whether the model has a template) as they are encoded.
json rows(const json& request) {
  const auto options = options_of(request);
  const std::string path = request["path"].get<std::string>();
  json out = {{"rows", json::array()}, {"lines", json::array()}};
  std::optional<qlorapp::RowShape> shape;
  const auto visit = [&](qlorapp::Row row, int64_t line) {
    const std::string where = qlorapp::message("{}:{}", path, line);
    if (request.contains("chat")) {
      const auto has_template = [&] { return request["chat"].get<bool>(); };
      if (!shape) shape = qlorapp::RowShape::detect(row, options, has_template, where);
      row = shape->canonical(std::move(row), where);
      out["shape"] = shape->description();
    }
    for (auto& [key, value] : row.items()) {
      const auto ids = qlorapp::packed_ids(value);
      qlorapp::Row list = qlorapp::Row::array();
      for (std::size_t i = 0; ids && i < ids->size(); ++i) list.push_back((*ids)[i]);
      if (ids) value = std::move(list);
    }
    out["rows"].push_back(row.dump());  // as text: the order of its keys counts
    out["lines"].push_back(line);
  };
  out["blank_lines"] = for_each_row(path, options.file_format, options.text_field, visit).blank_lines;
  return out;
}

class Probe {
 public:
  json answer(const json& request) {
    const std::string command = request["command"].get<std::string>();
    if (command == "split") return split(request);
    if (command == "render") return render(request);
    if (command == "gunzip") return gunzip(request);
    if (command == "rows") return rows(request);
    if (command == "template_source") return qlorapp::ChatTemplate::source(request["name"].get<std::string>());
    if (command == "template_names") return qlorapp::ChatTemplate::names();
    if (command == "load") {
      tokenizer_ = qlorapp::Tokenizer::from_folder(request["folder"].get<std::string>());
      return {{"vocab_size", tokenizer_->vocab_size()}, {"id_limit", tokenizer_->id_limit()},
              {"bos", or_null(tokenizer_->bos_id())},   {"eos", or_null(tokenizer_->eos_id())},
              {"pad", or_null(tokenizer_->pad_id())},   {"eos_ids", tokenizer_->eos_ids()}};
    }
    if (command == "from_json") {
      tokenizer_ = qlorapp::Tokenizer::from_json(request["text"].get<std::string>(), "t.json");
      return true;
    }
    if (command == "encode") {
      json out = json::array();
      for (const auto& hex : request["texts"]) {
        out.push_back(tokenizer_->encode(from_hex(hex.get<std::string>()), request.value("special", true)));
      }
      return out;
    }
    if (command == "ranges") {
      const auto encoding = tokenizer_->encode_with_ranges(from_hex(request["text"].get<std::string>()), true);
      json out = json::array();
      for (const auto& range : encoding.ranges) out.push_back({range.begin, range.end});
      return out;
    }
    if (command == "encode_with_ranges") {
      json out = json::array();
      for (const auto& hex : request["texts"]) {
        const auto encoding = tokenizer_->encode_with_ranges(from_hex(hex.get<std::string>()), true);
        json ranges = json::array();
        for (const auto& range : encoding.ranges) ranges.push_back({range.begin, range.end});
        out.push_back({encoding.ids, std::move(ranges)});
      }
      return out;
    }
    if (command == "decode") {
      json out = json::array();
      for (const auto& ids : request["ids"]) {
        out.push_back(to_hex(tokenizer_->decode(ids.get<std::vector<qlorapp::TokenId>>(), request.value("skip", false))));
      }
      return out;
    }
    if (command == "dataset") {
      std::optional<qlorapp::ChatTemplate> chat;
      if (request.contains("chat")) chat = qlorapp::ChatTemplate::named(request["chat"].get<std::string>());
      if (request.contains("chat_source"))
        chat = qlorapp::ChatTemplate::from_source(request["chat_source"].get<std::string>(),
                                                  {{"bos_token", "<s!>"}, {"eos_token", "</e!>"}}, "t.jinja");
      const bool use_tokenizer = tokenizer_ && request.value("tokenizer", true);
      const auto data = qlorapp::Dataset::read(request["path"].get<std::string>(), options_of(request),
                                               use_tokenizer ? &*tokenizer_ : nullptr, chat ? &*chat : nullptr);
      json examples = json::array();
      for (const auto& example : data.examples) {
        examples.push_back({{"input_ids", example.input_ids},
                            {"labels", example.labels},
                            {"line", example.line},
                            {"sample", use_tokenizer ? render_sample(example, *tokenizer_) : ""}});
      }
      const auto& s = data.summary;
      return {{"examples", examples},
              {"line", s.line()},
              {"warnings", s.warnings()},
              {"format", to_string(s.format)},
              {"rows", s.rows},
              {"blank_lines", s.blank_lines},
              {"tokens", s.tokens},
              {"target_tokens", s.target_tokens},
              {"longest", s.longest},
              {"longest_line", s.longest_line},
              {"truncated", s.truncated},
              {"dropped", s.dropped},
              {"ends_in_eos", s.ends_in_eos},
              {"empty_answers", s.empty_answers},
              {"split_rows", s.split_rows},
              {"flagged_rows", s.flagged_rows},
              {"rewritten_rows", s.rewritten_rows},
              {"straddling", s.straddling}};
    }
    if (command == "token") return or_null(tokenizer_->token_to_id(request["token"].get<std::string>()));
    throw qlorapp::ValueError("[data_probe] unknown command");
  }

 private:
  std::optional<qlorapp::Tokenizer> tokenizer_;
};

}  // namespace

int main() {
  Probe probe;
  for (std::string line; std::getline(std::cin, line);) {
    json reply;
    try {
      reply = {{"ok", probe.answer(json::parse(line))}};
    } catch (const std::exception& error) { reply = {{"error", error.what()}}; }
    std::cout << reply.dump(-1, ' ', true, json::error_handler_t::replace) << std::endl;
  }
}
