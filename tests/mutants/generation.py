# SPDX-License-Identifier: Apache-2.0
"""Mistakes in what ends an answer, in its positions, and in the plan of its memory."""

from mutant import cpp, within

CUT = cpp("text", "a stop string ends a row wherever tokens cut it")
POSITIONS = cpp("nn", "a prompt above the model's positions")
PLAN = cpp("memory", "as many rows are planned as the room holds")

MUTANTS = [
    *within(
        "stop",
        "src/text/stop_strings.cpp",
        ("across", "same >= wanted.size() ? same - wanted.size() + 1 : 0", "same", CUT),
        ("behind", "now.find(wanted, from)", "now.find(wanted)", cpp("text", "a stop string that the prompt holds")),
        ("empty", "!one.empty()", "true", cpp("text", "an empty stop string")),
    ),
    *within(
        "generate",
        "src/nn/generate.cpp",
        ("positions", "options.max_new_tokens <= left)", "options.max_new_tokens <= left + 1)", POSITIONS),
        (
            "alone",
            "options.deterministic ? generate_alone(model, prompts, options) : ",
            "",
            cpp("nn", "a deterministic row has the bits of the row alone"),
        ),
    ),
    *within(
        "plan_answers",
        "src/memory/generation_plan.cpp",
        ("fewer", "std::max<int64_t>(together, 1)", "std::max<int64_t>(together - 1, 1)", PLAN),
        ("cache", "tape.label(block.values, MemoryUse::kCache);", "", cpp("memory", "keys and values are counted")),
    ),
]
