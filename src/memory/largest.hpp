// SPDX-License-Identifier: Apache-2.0
/// The largest number that fits, by trying.
#pragma once

#include <cstdint>

namespace qlorapp {

/// @param fits  of a number; if one does not fit, no larger one does.
/// @returns from 1 to `most`; 0: not even 1 fits.
template <class Fits>
int64_t largest_that(int64_t most, const Fits& fits) {
  if (!fits(int64_t{1})) return 0;
  int64_t good = 1, bad = most + 1;
  for (int64_t tried = 2; tried <= most && bad == most + 1; tried *= 2) (fits(tried) ? good : bad) = tried;
  while (bad - good > 1) {
    const int64_t middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

}  // namespace qlorapp
