// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "qlorapp/format/model_config.hpp"

namespace qlorapp::format {
namespace {

// Llama 2, 3, 3.1, 3.2, 3.3, and the many models published under its architecture.
constexpr std::array<Family, 1> kFamilies{{{.architecture = "LlamaForCausalLM",
                                            .model_type = "llama",
                                            .tie_word_embeddings = false,
                                            .rms_norm_eps = 1e-6,
                                            .rope_theta = 10000.0,
                                            .max_position_embeddings = 2048,
                                            .ignored_keys = {},
                                            .refused_keys = {}}}};

}  // namespace

std::span<const Family> families() { return kFamilies; }

}  // namespace qlorapp::format
