# SPDX-License-Identifier: Apache-2.0
"""Mistakes in what is printed, in manifests of outputs, and in bounds of memory."""

from mutant import cpp, py, within

ESCAPED = cpp("core", "a control character of any kind")
OUTPUT = cpp("files", "an output's manifest has")
WINDOWS = cpp("text", "a text has the same pieces")
BASES = py("test_output_manifests.py", "another_base or linear_layers or any_form")

MUTANTS = [
    *within(
        "escaped",
        "src/core/escaped.cpp",
        ("c1", "(c >= 0x7F && c < 0xA0)", "c == 0x7F", ESCAPED),
        ("direction", "(c >= 0x202A && c <= 0x202E)", "(c >= 0x202A && c < 0x202E)", ESCAPED),
        ("overlong", "value < kLeast[bytes] || ", "", ESCAPED),
    ),
    *within(
        "log",
        "src/core/log.cpp",
        (
            "lines",
            "level == LogLevel::kWarning ? escaped_line(line) : escaped(line)",
            "escaped(line)",
            cpp("core", "a sink receives"),
        ),
    ),
    *within(
        "output",
        "src/files/manifest.cpp",
        ("forgets_others", "manifest.files = std::move(old.files);", "", OUTPUT),
        ("of_a_checkpoint", "if (old.kind != kOutputKind) return std::nullopt;", "", OUTPUT),
    ),
    *within(
        "names",
        "src/files/folder.cpp",
        ("lines", "text += name + '\\0';", "text += name + '\\n';", cpp("files", "names with line ends")),
    ),
    *within(
        "window",
        "src/text/pretokenize.cpp",
        ("run", "end + kAhead > text.size() || end >= words", "end + kAhead > text.size()", WINDOWS),
        ("letters", "is_end || !has_pattern ? text.size() : last_end_of_letters(text)", "text.size()", WINDOWS),
        ("last_piece", "  out.pop_back();\n", "", WINDOWS),
    ),
    *within(
        "bomb",
        "src/data/gzip_reader.cpp",
        ("times", "kMostTimes = 200", "kMostTimes = 2000", py("test_large_rows.py", "tiny_rows", "tests/fuzz/judge")),
    ),
    *within(
        "base",
        "src/io/adapter_base.cpp",
        ("tolerant", "kRelative = 0x1p-7", "kRelative = 0x1p-3", BASES),
        ("exact", "kRelative = 0x1p-7", "kRelative = 0x1p-20", BASES),
        ("any_storage", "base->storage != storage_of(model) || ", "", BASES),
    ),
]
