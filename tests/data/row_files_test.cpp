// SPDX-License-Identifier: Apache-2.0
/// The same rows in every kind of file, what stands in messages about a row, and the columns that count.
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"
#include "qlorapp/data/dataset.hpp"
#include "text/examples.hpp"

using namespace qlorapp;

namespace {

const std::array<std::string, 3> kTexts{"The river runs to the sea.", "A lamp, a \"quiet\" lamp.", "Café; two words."};

/// zlib's bytes of the three rows as JSON lines, in fixed Huffman codes.
constexpr std::string_view kGzipped =
    "1f8b0800000000000203ab562a49ad2851b252500ac9485528ca2c4b2d52282acd2b5628c95728018a14a726ea29d57255c395392ae424e616e828242ac4"
    "28159666a696c428814550553927a61d5e69ad50529eaf509e5f94520c9205007808dd436b000000";

std::string row_file_bytes(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16));
  return bytes;
}

const Tokenizer& row_tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::from_folder(example_file("tiny-llama"));
  return tokenizer;
}

const ChatTemplate& row_template() {
  static const ChatTemplate chat = *ChatTemplate::from_folder(example_file("tiny-llama"));
  return chat;
}

Dataset read_rows(const std::string& path, const DatasetOptions& options = {}, bool has_template = true) {
  return Dataset::read(path, options, &row_tokenizer(), has_template ? &row_template() : nullptr);
}

/// Dataset::read of one file of that name and content.
Dataset rows_of(std::string_view name, std::string_view content, const DatasetOptions& options = {}, bool has_template = true) {
  const TemporaryFolder folder;
  return read_rows(folder.write(name, content), options, has_template);
}

/// The text of the one row, with its trained tokens between « and ».
std::string marked_row(std::string_view row, const DatasetOptions& options = {}, bool has_template = true) {
  const Dataset data = rows_of("rows.jsonl", row, options, has_template);
  REQUIRE(data.examples.size() == 1);
  return render_sample(data.examples[0], row_tokenizer());
}

/// The error's text behind the folder's name; "" if it does not begin with it.
std::string row_refusal(std::string_view name, std::string_view content, const DatasetOptions& options = {}) {
  const TemporaryFolder folder;
  const std::string path = folder.write(name, content);
  const std::string error = thrown<FormatError>([&] { (void)read_rows(path, options); });
  const std::string start = "[" + folder.path() + "/";
  return error.starts_with(start) ? error.substr(start.size()) : "";
}

}  // namespace

TEST_CASE("a line of megabytes, which is read in parts, is a row as any other", "[data][cpu]") {
  const std::string row = "{\"text\": \"a b\"}", blanks(3'000'000, ' ');
  const auto filled = [](size_t bytes, const std::string& end) {  // {"text": "a b", "more": "éé…"}
    std::string line = "{\"text\": \"a b\", \"more\": \"";
    while (line.size() < bytes) line += "\u00e9";
    return line + end;
  };
  for (const size_t bytes : {size_t{1} << 20, (size_t{1} << 20) + 1, size_t{2} << 20, size_t{5'000'001}}) {
    std::string lines = row + "\n" + filled(bytes, "\"}") + "\n" + blanks + "\n\r\n" + blanks + row + blanks;
    for (const char* end : {"", "\n"}) {
      const Dataset data = rows_of("rows.jsonl", lines + end);
      CHECK(data.examples.size() == 3);
      CHECK(data.summary.blank_lines == 2);
    }
    CHECK(rows_of("rows.jsonl", filled(bytes, "\"}")).examples.size() == 1);
    const std::string padded = filled(bytes, "\"}") + std::string(3'000'000, '\0') + "\n" + row;  // the parser ends at a NUL
    CHECK(rows_of("rows.jsonl", padded).examples.size() == 2);
    const std::string broken = filled(bytes, "\", nul}");  // one character, two bytes, each
    const size_t characters = 25 + (broken.size() - 25 - 7) / 2 + 7;
    const std::string error = row_refusal("rows.jsonl", row + "\n" + broken + "\n");
    INFO(error);
    CHECK(has(error, message("rows.jsonl:2] must be valid JSON in UTF-8; line 2, column {}: ", characters)));
    CHECK(has(row_refusal("rows.jsonl", filled(bytes, "")), "missing closing quote"));
  }
}

TEST_CASE("the same rows come from JSON lines, an array, CSV, TSV, text, paragraphs and gzip", "[data][cpu]") {
  struct Kind {
    std::string_view name;
    std::string content;
    std::array<int64_t, 3> lines;
    FileFormat format = FileFormat::kByName;
  };
  const std::string lines = R"({"text": "The river runs to the sea."})"
                            "\n"
                            R"({"text": "A lamp, a \"quiet\" lamp."})"
                            "\n"
                            R"({"text": "Caf\u00e9; two words."})";
  const std::string records = "The river runs to the sea.\n\n\"A lamp, a \"\"quiet\"\" lamp.\"\nCafé; two words.\n";
  const std::string plain = kTexts[0] + "\r\n" + kTexts[1] + "\r\n \t\r\n" + kTexts[2];
  const std::vector<Kind> kinds{
      {"rows.jsonl", lines, {1, 2, 3}},
      {"rows", "\xEF\xBB\xBF\n" + lines + "\n\n", {2, 3, 4}},
      {"rows.json",
       R"([{"text":"The river runs to the sea."},{"text":"A lamp, a \"quiet\" lamp."},
                        {"text":"Café; two words."}])",
       {1, 1, 2}},
      {"rows.csv", "text\n" + records, {2, 4, 5}},
      {"rows.tsv",
       "text\tother\nThe river runs to the sea.\t1\n\"A lamp, a \"\"quiet\"\" lamp.\"\t\nCafé; two words.\t\"\t\"",
       {2, 3, 4}},
      {"rows.txt", plain, {1, 2, 4}},
      {"rows.text", plain, {1, 2, 4}, FileFormat::kLines},
      {"rows.paragraphs", kTexts[0] + "\n\n\n" + kTexts[1] + "\n\n" + kTexts[2], {1, 4, 6}, FileFormat::kParagraphs},
      {"rows.jsonl.gz", row_file_bytes(kGzipped), {1, 2, 3}},
  };
  for (const Kind& kind : kinds) {
    INFO(kind.name);
    const Dataset data = rows_of(kind.name, kind.content, {.file_format = kind.format});
    REQUIRE(data.examples.size() == 3);
    CHECK(data.summary.rows == 3);
    for (size_t i = 0; i < 3; ++i) {
      std::vector<TokenId> ids = row_tokenizer().encode(kTexts[i]);
      ids.push_back(695);  // eos
      CHECK(data.examples[i].input_ids == ids);
      CHECK(data.examples[i].labels == ids);
      CHECK(data.examples[i].line == kind.lines[i]);
    }
  }
}

TEST_CASE("a paragraph keeps its line ends, and a quoted field of CSV its own", "[data][cpu]") {
  const Dataset paragraphs = rows_of("a.txt", "one\ntwo\n\nthree\n", {.file_format = FileFormat::kParagraphs});
  REQUIRE(paragraphs.examples.size() == 2);
  CHECK(render_sample(paragraphs.examples[0], row_tokenizer()) == "<|begin_of_text|>«one\ntwo<|end_of_text|>»");
  const Dataset records = rows_of("a.csv", "text,b\r\n\"one\r\ntwo\",1\r\nthree,2\r\n");
  REQUIRE(records.examples.size() == 2);
  CHECK(render_sample(records.examples[0], row_tokenizer()) == "<|begin_of_text|>«one\r\ntwo<|end_of_text|>»");
  CHECK(records.examples[1].line == 4);
  CHECK(records.summary.ignored_keys == std::vector<std::string>{"b"});
}

TEST_CASE("a bad row is named by its file and line", "[data][cpu]") {
  const auto refused = [](std::string_view name, const std::string& content, const std::string& start, std::string_view rule) {
    const std::string error = row_refusal(name, content);
    INFO(error);
    CHECK(error.starts_with(start + "]"));
    CHECK(has(error, rule));
  };
  const std::string good = "{\"text\": \"a b\"}\n";
  refused("rows.jsonl", good + "\n" + "{\"text\": \"a\n", "rows.jsonl:3", "valid JSON");
  refused("rows.jsonl", good + "[1]\n", "rows.jsonl:2", "a row must be a JSON object; got an array");
  refused("rows.jsonl", good + "{\"texts\": \"a\"}\n", "rows.jsonl:2",
          "must have key 'text', as the first row has; got keys [texts]");
  refused("rows.jsonl", good + "{\"text\": 1}\n", "rows.jsonl:2", "'text' must be a string; got a number");
  refused("rows.jsonl", good + "{\"text\": \"a\", \"text\": \"b\"}\n", "rows.jsonl:2",
          "a key must be unique in a JSON object; 'text' appears twice");
  refused("rows.json", "[\n{\"text\": \"a b\"},\n\n{\"text\": nan}]", "rows.json:4", "valid JSON");
  refused("rows.json", "[{\"text\": \"a b\"},\n{\"text\": \"a b\"}", "rows.json:2", "the array of rows must end with ]");
  refused("rows.csv", "text,b\none,1\ntwo\n", "rows.csv:3", "a row must have 2 fields, as the header has; got 1");
  refused("rows.csv", "text\none\n\"two\n", "rows.csv:3", "a quoted field must end with a quote");
  refused("rows.csv", "text,text\none,1\n", "rows.csv:1", "the header must name each column once; 'text' appears twice");
  refused("rows.tsv", "text\tb\none\t1\ntwo\t1\t2\n", "rows.tsv:3", "a row must have 2 fields, as the header has; got 3");
  refused("rows.txt", "one\n\ntwo \xFF\n", "rows.txt:3", "text must be UTF-8; byte 4 of the row is not");
  refused("rows.jsonl", "{\"title\": \"a\"}\n", "rows.jsonl:1", "got keys [title]");
}

TEST_CASE("a file of another kind, or a damaged gzip file, is named", "[data][cpu]") {
  CHECK(row_refusal("rows.jsonl", "PAR1 ...").starts_with("rows.jsonl] rows must be JSON lines"));
  CHECK(has(row_refusal("rows.txt", "\xFF\xFEt"), "got UTF-16. Save the file as UTF-8."));
  const std::string packed = row_file_bytes(kGzipped);
  CHECK(row_refusal("rows.jsonl.gz", packed.substr(0, packed.size() - 9))
            .starts_with("rows.jsonl.gz] must be an undamaged gzip file"));
  std::string flipped = packed;
  flipped[packed.size() - 6] ^= 1;  // of the CRC
  CHECK(row_refusal("rows.jsonl.gz", flipped).starts_with("rows.jsonl.gz] must be an undamaged gzip file"));
  const TemporaryFolder folder;
  CHECK(has(thrown<IoError>([&] { (void)read_rows(folder / "none.jsonl"); }), folder / "none.jsonl"));
}

TEST_CASE("a file of any kind without rows is refused", "[data][cpu]") {
  const std::vector<std::pair<std::string, std::string>> files{{"a.jsonl", ""},       {"a.json", "[ ]"}, {"a.csv", ""},
                                                               {"a.csv", "text,b\n"}, {"a.tsv", "\n"},   {"a.txt", " \n\n"}};
  for (const auto& [name, content] : files) {
    INFO(name << " '" << content << "'");
    CHECK(row_refusal(name, content).starts_with(name + "] the data must have a row; it is empty"));
  }
}

TEST_CASE("of several shapes in a row the first of the documented order counts, and the others are named", "[data][cpu]") {
  const std::string columns = R"("text": "t", "prompt": "p", "completion": "c", "messages": [{"role": "user", "content": "m"}])";
  const auto read = [&](const std::string& row, const DatasetOptions& options = {}) {
    return rows_of("rows.jsonl", "{" + row + "}", options).summary;
  };
  const DatasetSummary messages = read(columns);
  CHECK(messages.format == RowFormat::kMessages);
  CHECK(messages.ignored_keys == std::vector<std::string>{"text", "prompt", "completion"});
  CHECK(read(R"("text": "t", "prompt": "p", "completion": "c", "messages": null)").format == RowFormat::kPromptCompletion);
  CHECK(read(columns + R"(, "input_ids": [1, 2])").format == RowFormat::kInputIds);
  DatasetOptions pair;
  pair.prompt_field = "text";
  pair.completion_field = "completion";
  const DatasetSummary named = read(columns, pair);
  CHECK(named.format == RowFormat::kPromptCompletion);
  CHECK(named.ignored_keys == std::vector<std::string>{"prompt", "messages"});
  CHECK(read(columns + R"(, "body": "x y")", {.text_field = "body"}).format == RowFormat::kText);
  const std::string error = row_refusal("rows.jsonl", R"({"prompt": "p", "chosen": "a", "rejected": "b"})");
  CHECK(has(error, "'chosen' and 'rejected' are preference data"));
}

TEST_CASE("prompts get no loss, and a completion ends with EOS", "[data][cpu]") {
  const std::string row = R"({"prompt": "The river", "completion": " runs."})";
  CHECK(marked_row(row) == "<|begin_of_text|>The river« runs.<|end_of_text|>»");
  CHECK(marked_row(row, {.append_eos = false}) == "<|begin_of_text|>The river« runs.»");
  CHECK(marked_row(row, {.completion_only_loss = false}) == "<|begin_of_text|>«The river runs.<|end_of_text|>»");
  const Dataset cut = rows_of("rows.jsonl", row + "\n" + R"({"prompt": "a b c d e f g h", "completion": "i"})", {.max_length = 6});
  CHECK(cut.examples.size() == 1);
  CHECK(cut.summary.truncated == 2);
  CHECK(cut.summary.dropped == 1);  // nothing of its completion is left
}

TEST_CASE("loss on the assistant alone lies on its turns, the end of the turn included", "[data][cpu]") {
  const std::string row =
      R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Bye"}]})";
  const std::string text =
      "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
      "«Hello!<|eot_id|>»<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>";
  CHECK(marked_row(row, {.assistant_only_loss = true}) == text);
}

TEST_CASE("an instruction becomes turns of the template, and Alpaca's text where there is none", "[data][cpu]") {
  const std::string row = R"({"instruction": "Add.", "input": "1 2", "output": "3"})";
  CHECK(has(marked_row(row), "user<|end_header_id|>\n\nAdd.\n1 2<|eot_id|>"));
  CHECK(has(marked_row(row), "assistant<|end_header_id|>\n\n«3<|eot_id|>»"));
  CHECK(marked_row(row, {}, /*has_template=*/false)
            .ends_with("\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n«3<|end_of_text|>»"));
}
