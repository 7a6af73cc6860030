// SPDX-License-Identifier: Apache-2.0
/// Code points and the classes that tokenizers ask about, as the regex engines of Hugging Face's tokenizers know them.
///
/// The table is asked from those engines by scripts/make_unicode_tables.py; the Unicode version of the C++ library or of
/// Python would differ in a few thousand letters. Torch-free.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace qlorapp::unicode {

/// Bits of classes_of().
enum Class : uint8_t {
  kLetter = 1,    ///< \p{L}
  kNumber = 2,    ///< \p{N}
  kSpace = 4,     ///< \s, which is the White_Space property
  kWord = 8,      ///< \w of Rust's regex crate
  kNumeric = 16,  ///< Rust's char::is_numeric: \p{N} of a newer Unicode version than the regex engine's
};

struct ClassRange {
  uint32_t first, last;
  uint8_t classes;
};
extern const ClassRange kClassRanges[];  ///< Sorted, disjoint.
extern const std::size_t kClassRangeCount;
extern const ClassRange kCategoryRanges[];  ///< The same of general categories.
extern const std::size_t kCategoryRangeCount;

/// @returns the classes of a code point below 0x110000; constant time.
[[nodiscard]] uint8_t classes_of(uint32_t code_point);

/// The general categories, in the order of category_of().
inline constexpr std::array<std::string_view, 29> kCategories{"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl",
                                                              "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc",
                                                              "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Co", "Cn"};
/// @returns the general category of a code point below 0x110000, an index into kCategories; constant time.
[[nodiscard]] uint8_t category_of(uint32_t code_point);

/// One code point of a text and where its first byte is.
struct CodePoint {
  uint32_t value;
  uint32_t offset;
  uint8_t classes;
};

/// @returns the offset of the first byte that is not part of well-formed UTF-8 (overlong forms, surrogates and values above
///          U+10FFFF are not), or npos.
[[nodiscard]] std::size_t first_invalid_utf8(std::string_view text);

/// Decodes well-formed UTF-8 of less than 4 GiB; the caller has checked.
[[nodiscard]] std::vector<CodePoint> decode(std::string_view text);

/// Appends `bytes` with each maximal ill-formed part replaced by U+FFFD (Unicode 16, table 3-8), as Rust's from_utf8_lossy
/// does.
void append_lossy(std::string& out, std::string_view bytes);

/// @returns the bytes of the first code point of well-formed, non-empty text.
[[nodiscard]] std::size_t length_at(std::string_view text);
/// @returns the offset of the last code point of well-formed, non-empty text.
[[nodiscard]] std::size_t last_code_point(std::string_view text);

/// Appends one code point as UTF-8.
void append_utf8(std::string& out, uint32_t code_point);

/// Without white space at both ends, as Python's str.strip() and Jinja's trim do (White_Space and U+001C … U+001F).
[[nodiscard]] std::string_view strip(std::string_view text);

}  // namespace qlorapp::unicode
