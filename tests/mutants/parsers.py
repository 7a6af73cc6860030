# SPDX-License-Identifier: Apache-2.0
"""Mistakes of the readers of files that strangers wrote."""

from mutant import cpp, py, within

HEADER = cpp("format", "each rule of the format has its own refusal")
DISAGREE = cpp("json", "what JSON readers disagree on")
LEADS_OUT = cpp("format", "an index cannot lead out")
SHARDS = cpp("format", "each way in which shards and index disagree")
CONFIG = cpp("format", "what would change the result")
ADAPTER = cpp("format", "an adapter that cannot be what it says")
STATE = cpp("format", "a quant state that is not exactly one")
PARTS = cpp("format", "the parts of a four-bit weight")
PROBE = "tests/data/data_probe"
TOKENIZER = py("test_tokenizer.py", "what_is_not_known or hostile_json", PROBE)
LARGE = py("test_large_rows.py", "at_most_200_mb and (short or numbers)", "tests/fuzz/judge")
IDS = py("test_row_files.py", "lists_of_ids", PROBE)
CSV = py("test_row_files.py", "bad_csv", PROBE)
GZIP = py("test_row_files.py", "damaged_gzip or malformed_blocks", PROBE)

MUTANTS = [
    *within(
        "safetensors",
        "src/format/safetensors_header.cpp",
        ("rank_65", "tensor.shape.size() == kMaxTensorRank", "tensor.shape.size() > kMaxTensorRank", HEADER),
        (
            "metadata_key_twice",
            "if (!header_.metadata.emplace(std::move(metadata_key_), std::move(value)).second)",
            "if (header_.metadata.emplace(std::move(metadata_key_), std::move(value)); false)",
            HEADER,
        ),
        ("field_twice", "if (std::exchange(seen, true))", "if (std::exchange(seen, true); false)", HEADER),
        ("name_of_4097_bytes", "name.size() > kMaxTensorNameBytes", "name.size() > kMaxTensorNameBytes + 1", HEADER),
        ("holes", "begin == expected && end >= begin", "begin >= expected && end >= begin", HEADER),
        (
            "size_overflows",
            "if (__builtin_mul_overflow(bits, size, &bits)) return false;",
            "__builtin_mul_overflow(bits, size, &bits);",
            HEADER,
        ),
        ("range_too_long", "QLORAPP_CHECK_FORMAT(end - begin == bytes,", "QLORAPP_CHECK_FORMAT(end - begin >= bytes,", HEADER),
        ("bytes_behind", "      expected == data_bytes, ", "      expected <= data_bytes, ", HEADER),
    ),
    *within(
        "safetensors_file",
        "src/format/safetensors.cpp",
        ("header_beyond_the_file", "header_bytes <= size - kLengthBytes,", "header_bytes <= size,", HEADER),
        ("tensor_twice", "      twice == by_name_.end(),\n", "      twice == by_name_.end() || true,\n", HEADER),
        (
            "read_behind_the_tensor",
            "offset >= 0 && offset <= tensor.nbytes && ",
            "offset >= 0 && ",
            cpp("format", "reads stay within the tensor"),
        ),
    ),
    *within(
        "json",
        "src/json/json.cpp",
        ("key_twice", "if (!tree_.add_key(name)) fail", "if (!tree_.add_key(name) && name.empty()) fail", DISAGREE),
        ("one_level_deeper", "tree_.depth() >= limits_.max_depth", "tree_.depth() > limits_.max_depth", DISAGREE),
        ("one_byte_longer", "text.size() <= limits.max_bytes", "text.size() <= limits.max_bytes + 1", DISAGREE),
        ("integer_of_64_bits", "if (!limits_.allow_big_integers) fail", "if (limits_.allow_big_integers) fail", DISAGREE),
        ("nan_in_a_number", "(i > 0 && !separates(text[i - 1])) || ", "", cpp("json", "Python's NaN and Infinity")),
    ),
    *within(
        "json_text",
        "src/json/json_cursor.hpp",
        ("nul", "QLORAPP_CHECK_FORMAT(nul == std::string_view::npos,", "QLORAPP_CHECK_FORMAT(nul == nul,", DISAGREE),
        units=("src/json/json.cpp",),
    ),
    *within(
        "index",
        "src/format/tensor_files.cpp",
        ("long_shard_name", " || name.size() > 255) return", ") return", LEADS_OUT),
        ("slash_in_a_shard", "c == '.' || c == '_' || c == '-';", "c == '.' || c == '_' || c == '-' || c == '/';", LEADS_OUT),
        ("tensor_in_two_shards", "if (twice != all.end()) {", "if (twice != all.end() && files_.empty()) {", SHARDS),
        ("empty_map", "map != nullptr && map->is_object() && !map->empty(),", "map != nullptr && map->is_object(),", SHARDS),
    ),
    *within(
        "file_reader",
        "src/files/file_reader.cpp",
        ("follows_links", "name.c_str(), kOpenFlags | O_NOFOLLOW)", "name.c_str(), kOpenFlags)", LEADS_OUT),
        (
            "blob_of_any_name",
            'return target.substr(kPrefix.size()).find_first_not_of("0123456789abcdef") == std::string_view::npos;',
            "return true;",
            cpp("format", "the Hugging Face cache's links"),
        ),
        (
            "device_is_a_file",
            "failed != 0 || !S_ISREG(status.st_mode)",
            "failed != 0 || S_ISDIR(status.st_mode)",
            cpp("format", "a directory"),
        ),
    ),
    *within(
        "config",
        "src/format/model_config.cpp",
        (
            "kv_heads",
            "config.num_attention_heads % config.num_key_value_heads != 0",
            "config.num_attention_heads < config.num_key_value_heads",
            CONFIG,
        ),
        ("eos_beyond_vocabulary", "id.get<int64_t>() >= vocabulary", "id.get<int64_t>() > vocabulary", CONFIG),
        ("eps_of_0", "*value > field.least && ", "*value >= field.least && ", CONFIG),
    ),
    *within(
        "config",
        "src/format/layer_options.cpp",
        (
            "equal_frequencies",
            "rope.high_freq_factor > rope.low_freq_factor",
            "rope.high_freq_factor >= rope.low_freq_factor",
            CONFIG,
        ),
    ),
    *within(
        "config_keys",
        "src/format/model_config_keys.cpp",
        ("code_in_the_folder", '{"auto_map", "trust_remote_code", ', '{"trust_remote_code", ', CONFIG),
        ("windows_that_are_used", "(uses_window != nullptr && is_neutral(*uses_window, 0))", "uses_window != nullptr", CONFIG),
        ("misspelled", "if (fields.value(key) != nullptr) refuse_misspelled", "if (false) refuse_misspelled", CONFIG),
    ),
    *within(
        "model_folder",
        "src/format/model_folder.cpp",
        ("unknown_tensors", "if (!unknown.empty()) refuse(model, unknown);", "", cpp("io", "a tensor that the config's model")),
        ("two_tables", "  model.config.tie_word_embeddings = false;\n", "", cpp("io", "a tied config beside two tables")),
        (
            "head_alone",
            "if (files.find(table) == nullptr)",
            "if (false)",
            cpp("io", "a table that is stored twice"),
        ),
    ),
    *within(
        "text_files",
        "src/io/text_files.cpp",
        ("two_templates", 'json.erase("chat_template") == 0', "json.empty()", cpp("io", "a chosen template is the only one")),
        (
            "templates_beside",
            "if (chat_template && is_template(name)) continue;",
            "",
            cpp("io", "a chosen template is the only one"),
        ),
    ),
    *within(
        "quantization_config",
        "src/format/quantization_config.cpp",
        (
            "eight_bits_accepted",
            "if (fields.boolean(key).value_or(false)) {",
            "if (fields.boolean(key).value_or(false) && key.empty()) {",
            CONFIG,
        ),
        (
            "one_of_two_keys",
            "four.value_or(true) && private_four.value_or(true),",
            "four.value_or(private_four.value_or(false)),",
            CONFIG,
        ),
    ),
    *within(
        "adapter_config",
        "src/format/adapter_config.cpp",
        (
            "dropout_of_1",
            "config.lora_dropout >= 0 && config.lora_dropout < 1",
            "config.lora_dropout >= 0 && config.lora_dropout <= 1",
            ADAPTER,
        ),
        (
            "transposed_weights",
            '{"fan_in_fan_out", "false", "weights must be stored as (out, in)", true}',
            '{"fan_in_fan_out", "false", ""}',
            ADAPTER,
        ),
        ("rank_0_in_a_pattern", "v.get<int64_t>() >= 1 && v", "v.get<int64_t>() >= 0 && v", ADAPTER),
        (
            "text_for_a_boolean",
            "if (!is_init(config.init_lora_weights) || spelled_bool) {",
            "if (!is_init(config.init_lora_weights)) {",
            ADAPTER,
        ),
    ),
    *within(
        "quant_state",
        "src/format/quant_state.cpp",
        (
            "any_block_size",
            'if (!is_block_size(size)) fields.fail(key, "must be a power of two"',
            'if (size < 0) fields.fail(key, "must be a power of two"',
            STATE,
        ),
        ("empty_shape", "if (size < 1 || __builtin", "if (size < 0 || __builtin", STATE),
        (
            "offset_beyond_float",
            "if (!std::isfinite(state.nested_offset)) fields",
            "if (std::isnan(state.nested_offset)) fields",
            STATE,
        ),
        ("more_codes", "packed.nbytes == state.packed_bytes(),", "packed.nbytes >= state.packed_bytes(),", PARTS),
        ("extra_parts", "QLORAPP_CHECK_FORMAT(known, ", "QLORAPP_CHECK_FORMAT(known || tensor != nullptr, ", PARTS),
    ),
    *within(
        "tokenizer",
        "src/text/tokenizer_json.cpp",
        (
            "merge_of_three",
            "space == std::string::npos || text.find(' ', space + 1) != std::string::npos",
            "space == std::string::npos",
            TOKENIZER,
        ),
        ("added_token_twice", "support(contents.insert(token.content).second,", "support(true,", TOKENIZER),
        ("id_of_an_added_token", "support(token.id == expected,", "support(token.id >= expected,", TOKENIZER),
        ("byte_fallback", "support(!out_.model.byte_level || !out_.model.byte_fallback,", "support(true,", TOKENIZER),
        (
            "template_without_text",
            '    support(saw_text, "TemplateProcessing.single must contain the text A");\n',
            "",
            TOKENIZER,
        ),
    ),
    *within(
        "jinja",
        "src/text/jinja/template.cpp",
        (
            "steps_without_end",
            "if (steps_ > kMostSteps)",
            "if (steps_ < 0)",
            py("test_jinja.py", "refused_by_rule_and_soon", PROBE),
        ),
        (
            "a_loop_turn_leaks",
            "if (scope && scope.use_count() == 1) scope->names.clear();",
            "if (scope) (void)scope;",
            py("test_jinja.py", "writes_what_jinja2", PROBE),
        ),
    ),
    *within(
        "jinja_white_space",
        "src/text/jinja/lexer.cpp",
        ("line_before_a_tag", "source_[tag - text.size() - 1] == '\\n'", "true", py("test_jinja.py", "white_space", PROBE)),
    ),
    *within(
        "served_answers",
        "src/text/chat_renderer.cpp",
        (
            "answer_without_its_head",
            "      text = head + text.substr(begin);\n",
            "",
            py("test_trained_turns.py", "stands_in_the_last_question", PROBE),
        ),
    ),
    *within(
        "json_rows",
        "src/text/json_reading.cpp",
        (
            "key_twice",
            "QLORAPP_CHECK_FORMAT(tree_.add_key(name),",
            "QLORAPP_CHECK_FORMAT(tree_.add_key(name) || true,",
            TOKENIZER,
        ),
        (
            "any_depth",
            "QLORAPP_CHECK_FORMAT(tree_.depth() < kJsonDepth,",
            "QLORAPP_CHECK_FORMAT(tree_.depth() <= kJsonDepth,",
            TOKENIZER,
        ),
        ("any_number_of_values", "++values_ <= limits_.values,", "++values_ > 0,", LARGE),
        ("any_number_of_ids", "packed_.size() < kMostRowIds * sizeof(int32_t),", "packed_.size() < SIZE_MAX,", LARGE),
        ("ids_before_a_text_lost", "      else put(static_cast<uint64_t>(ids[i]));\n", "", IDS),
        ("id_of_33_bits_cut", "is_packing_ && value <= INT32_MAX && pack", "is_packing_ && pack", IDS),
    ),
    *within(
        "rows",
        "src/data/row_reader.cpp",
        ("field_too_few", "          fields.size() == columns.size(),\n", "          fields.size() <= columns.size(),\n", CSV),
        (
            "column_twice",
            "QLORAPP_CHECK_FORMAT(seen.insert(columns[i]).second,",
            "QLORAPP_CHECK_FORMAT(seen.insert(columns[i]).second || true,",
            CSV,
        ),
        (
            "text_not_utf8",
            "QLORAPP_CHECK_FORMAT(bad == std::string::npos, ",
            "QLORAPP_CHECK_FORMAT(bad == bad, ",
            py("test_row_files.py", "json_in_a_text_file", PROBE),
        ),
        (
            "text_behind_the_array",
            "    QLORAPP_CHECK_FORMAT(bytes_.peek() < 0,\n",
            "    QLORAPP_CHECK_FORMAT(bytes_.peek() < 256,\n",
            py("test_data.py", "behind", PROBE),
        ),
    ),
    *within(
        "conversations",
        "src/data/row_encoder.cpp",
        (
            "masked_turns_trained",
            "one.trained.value_or(true);",
            "!read.empty();",
            py("test_trained_turns.py", "an_answer_that_is_marked", PROBE),
        ),
        (
            "lost_text_passes",
            "    if (part.written || ",
            "    if (part.written || part.message < messages.size() || ",
            py("test_trained_turns.py", "never_writes", PROBE),
        ),
    ),
    *within(
        "answers",
        "src/data/answers.cpp",
        (
            "earlier_turns_as_they_were_rewritten",
            "return text.size() >= answer.end && std::hash",
            "return text.size() >= answer.end || std::hash",
            py("test_trained_turns.py", "as_it_is_served", PROBE),
        ),
    ),
    *within(
        "csv",
        "src/data/csv_reader.cpp",
        ("text_behind_a_quote", "      behind == separator_ || ends_record(behind),\n", "      behind >= -1,\n", CSV),
    ),
    *within(
        "gzip",
        "src/data/gzip_reader.cpp",
        ("crc_not_compared", '  if (crc != crc_) damaged("the data must match the CRC of the file");\n', "", GZIP),
        (
            "size_not_compared",
            '  if (size != static_cast<uint32_t>(member_size_)) damaged("the data must be as long as the file states");\n',
            "",
            GZIP,
        ),
        (
            "match_before_the_data",
            "distance > member_size_ + (out_end_ - step_begin_))",
            "distance > member_size_ + (out_end_ - step_begin_) + 1)",
            py("test_row_files.py", "match_begins_within", PROBE),
        ),
    ),
]
