# SPDX-License-Identifier: Apache-2.0
"""Mistakes of the quantizer."""

from mutant import cpp, py, within

SAME_BITS = py("test_four_bit_rule.py", "instruction_set")
NEAREST = cpp("ops", "codes are nearest in double precision")
MIDPOINT = py("test_four_bit_rule.py", "a_tie_goes")
NESTED = cpp("quant", "double quantization stores")
PEER_SHAPES = py("test_four_bit_rule.py", "codes_and_scales and lengths")
KERNELS = tuple(f"src/ops/cpu/quantize_4bit_{each}.cpp" for each in ("scalar", "avx2", "avx512"))

MUTANTS = [
    *within(
        "quantizer",
        "src/ops/cpu/quantize_4bit_loop.hpp",
        ("tie_goes_up", "thresholds[i] >= scaled ? 0U : 1U", "thresholds[i] > scaled ? 0U : 1U", MIDPOINT),
        (
            "infinity_accepted",
            "largest >= kInfinityBits && !",
            "largest > kInfinityBits && !",
            cpp("quant", "what is not finite is named"),
        ),
        (
            "short_zero_block_scale",
            "full || (absmax == 0.0F && !work.bnb_edges) ? absmax : divisor;",
            "full ? absmax : divisor;",
            cpp("quant", "zero blocks"),
        ),
        (
            "short_block_nibbles_swapped",
            "static_cast<uint8_t>((encode_one(encoder, to_float(x[i]) / divisor) << 4U) | low);",
            "static_cast<uint8_t>((low << 4U) | encode_one(encoder, to_float(x[i]) / divisor));",
            NEAREST,
        ),
        ("odd_end_has_code_0", ": encode_one(encoder, 0.0F);", ": uint8_t{0};", PEER_SHAPES),
        ("short_block_rest_forgotten", "largest = rest > largest ? rest : largest;", "static_cast<void>(rest);", NEAREST),
        units=KERNELS,
    ),
    *within(
        "quantizer_scalar",
        "src/ops/cpu/quantize_4bit_scalar.cpp",
        (
            "nibbles_swapped",
            """(encode_one(encoder, to_float(x[i]) * factor) << 4U) |
                                           encode_one(encoder, to_float(x[i + 1]) * factor));""",
            """(encode_one(encoder, to_float(x[i + 1]) * factor) << 4U) |
                                           encode_one(encoder, to_float(x[i]) * factor));""",
            SAME_BITS,
        ),
        ("types_swapped", "type == QuantType::kNf4 ? nf4 : fp4", "type == QuantType::kNf4 ? fp4 : nf4", NEAREST),
        ("last_threshold_lost", "thresholds[i < 15 ? i : 14]", "thresholds[i < 14 ? i : 13]", MIDPOINT),
    ),
    *within(
        "quantizer_avx2",
        "src/ops/cpu/quantize_4bit_avx2.cpp",
        ("threshold_beside", "_mm256_set1_ps(t[11])", "_mm256_set1_ps(t[10])", SAME_BITS),
        ("nibbles_swapped", "_mm256_set1_epi16(0x0110)", "_mm256_set1_epi16(0x1001)", SAME_BITS),
        ("half_of_the_maximum", "    a = _mm256_max_epi32(a, b);\n", "", SAME_BITS),
    ),
    *within(
        "quantizer_op",
        "src/ops/cpu/quantize.cpp",
        (
            "index_within_block",
            '" at flat index ", begin + (bad - data)',
            '" at flat index ", bad - data',
            cpp("quant", "what is not finite is named"),
        ),
        (
            "rounding_of_the_peer",
            'quantize_eight_bits("quantize_blockwise", x, block_size, is_signed, DynamicRounding::kNearest)',
            'quantize_eight_bits("quantize_blockwise", x, block_size, is_signed, DynamicRounding::kBnbCpu)',
            py("test_nf4_blockwise.py", "ties or zero_is_zero"),
        ),
    ),
    *within(
        "double_quant",
        "src/format/double_quant.cpp",
        (
            "zero_block_divided_by_0",
            "largest == 0.0F ? 1.0 : static_cast<double>(largest)",
            "static_cast<double>(largest)",
            cpp("format", "eight-bit codes of a range"),
        ),
        (
            "zero_block_code_of_the_peer",
            "std::fill(codes, codes + n, uint8_t{0})",
            "std::fill(codes, codes + n, uint8_t{127})",
            cpp("format", "eight-bit codes of a range"),
        ),
        (
            "scale_of_block_0",
            "codes + begin, absmax + block);\n  }",
            "codes + begin, absmax);\n  }",
            cpp("format", "eight-bit codes of a range"),
        ),
        (
            "grid_cut_off",
            "0.5F, 65535.0F, 0.5F)",
            "0.5F, 65535.0F, 0.0F)",
            py("test_nf4_blockwise.py", "compat_codes_equal_the_peers"),
        ),
    ),
    *within(
        "quantizer_class",
        "src/quant/quantizer.cpp",
        ("offset_not_subtracted", "weight.absmax - weight.nested_offset;", "weight.absmax.clone();", NESTED),
        (
            "compat_inverted",
            "compat == Compat::kBnb;",
            "compat != Compat::kBnb;",
            cpp("quant", "the default refuses what is not finite"),
        ),
        (
            "like_always_nests",
            "q.block_size, q.double_quantized(), q.nested_block_size",
            "q.block_size, true, q.nested_block_size",
            cpp("quant", "like() makes"),
        ),
    ),
    *within(
        "quantizer_pieces",
        "src/quant/piece_quantizer.cpp",
        ("part_of_a_block", "first % block == 0 && (", "(", cpp("quant", "pieces that are no whole blocks")),
        ("index_in_the_piece", "first + index));", "index));", cpp("quant", "what is not finite is named")),
        (
            "scales_at_codes",
            "absmax.narrow(0, first / block, absmax.numel())",
            "absmax.narrow(0, 0, absmax.numel())",
            cpp("quant", "pieces give the very codes"),
        ),
    ),
    *within(
        "dequantizer",
        "src/ops/cpu/dequantize.cpp",
        ("offset_dropped", "    work.nested_offset = *weight.nested_offset->const_data_ptr<float>();\n", "", NESTED),
        (
            "maps_swapped",
            "is_signed ? signed_dynamic_map() : unsigned_dynamic_map()",
            "is_signed ? unsigned_dynamic_map() : signed_dynamic_map()",
            py("test_nf4_blockwise.py", "values_come_back"),
        ),
    ),
]
