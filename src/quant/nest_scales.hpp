// SPDX-License-Identifier: Apache-2.0
/// The second half of quantizing: scales in float32 become eight-bit codes of them. Of a whole weight, as it takes their mean.
#pragma once

#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {

/// Does nothing unless options.double_quant.
void nest_scales(QuantizedTensor& weight, const Quantizer::Options& options);

}  // namespace qlorapp
