// SPDX-License-Identifier: Apache-2.0
#include "adapters/adapter_init.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "adapters/adapter_set.hpp"
#include "core/check.hpp"
#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {
namespace {

/// FNV-1a over the name, from the seed.
uint64_t stream_of(const std::string& module, std::string_view part, uint64_t seed) {
  uint64_t stream = seed;
  for (const std::string_view text : {std::string_view(kPeftPrefix), std::string_view(module), part}) {
    for (const char c : text) stream = (stream ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  }
  return stream;
}

at::Tensor uniform(at::IntArrayRef sizes, double bound, uint64_t stream) {
  return at::empty(sizes, at::TensorOptions().dtype(at::kFloat)).uniform_(-bound, bound, at::detail::createCPUGenerator(stream));
}

at::Tensor normal(at::IntArrayRef sizes, double deviation, at::Generator& generator) {
  return at::empty(sizes, at::TensorOptions().dtype(at::kFloat)).normal_(0.0, deviation, generator);
}

/// Two halves of the rows of an orthogonal matrix, mixed by random ones: A's and B's ranks do not meet.
void initialize_orthogonally(const LoraAdapter& adapter, uint64_t stream) {
  at::Generator generator = at::detail::createCPUGenerator(stream);
  const int64_t r = adapter.a.size(0), half = r / 2;
  const at::Tensor q = std::get<0>(at::linalg_qr(normal({r, r}, 1.0, generator)));
  const at::Tensor first = q.slice(0, 0, r, 2), second = q.slice(0, 1, r, 2);
  adapter.a.detach().copy_(at::mm(normal({adapter.a.size(1), half}, 0.1, generator), first).t());
  adapter.b.detach().copy_(at::mm(normal({adapter.b.size(0), half}, 0.1, generator), second));
}

/// The largest `rank` singular values and vectors of `weight`: (U, S, Vᵀ). Exact, or by `iterations` power iterations on a
/// random subspace (Halko et al. 2009, arXiv:0909.4061, algorithm 4.4).
std::tuple<at::Tensor, at::Tensor, at::Tensor> largest_part(const at::Tensor& weight, int64_t rank,
                                                            std::optional<int64_t> iterations, uint64_t stream) {
  if (!iterations) {
    const auto [u, s, v] = at::linalg_svd(weight, /*full_matrices=*/false);
    return {u.narrow(1, 0, rank), s.narrow(0, 0, rank), v.narrow(0, 0, rank)};
  }
  at::Generator generator = at::detail::createCPUGenerator(stream);
  const auto basis = [](const at::Tensor& matrix) { return std::get<0>(at::linalg_qr(matrix)); };
  at::Tensor q = basis(at::mm(weight, normal({weight.size(1), rank}, 1.0, generator).to(weight.device())));
  for (int64_t i = 0; i < *iterations; ++i) q = basis(at::mm(weight, basis(at::mm(weight.t(), q))));
  const auto [u, s, v] = at::linalg_svd(at::mm(q.t(), weight), /*full_matrices=*/false);
  return {at::mm(q, u), s, v};
}

}  // namespace

void initialize_lora_a(const at::Tensor& a, bool gaussian, uint64_t seed) {
  if (a.is_meta()) return;  // a plan: there are no values
  const at::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(seed);
  at::Tensor values = at::empty(a.sizes(), at::TensorOptions().dtype(at::kFloat));
  if (gaussian) {
    values.normal_(0.0, 1.0 / static_cast<double>(a.size(0)), generator);
  } else {
    const double bound = 1.0 / std::sqrt(static_cast<double>(a.size(1)));
    values.uniform_(-bound, bound, generator);
  }
  a.detach().copy_(values);
}

void initialize_adapter(const LoraAdapter& adapter, const LoraConfig& config, const std::string& module, uint64_t seed) {
  const at::NoGradGuard no_grad;
  const uint64_t of_a = stream_of(module, ".lora_A.weight", seed);
  switch (config.init()) {
    case LoraInit::kOrthogonal:
      initialize_orthogonally(adapter, of_a);
      return;
    case LoraInit::kRandom:
      adapter.b.detach().copy_(uniform(adapter.b.sizes(), 1.0 / std::sqrt(static_cast<double>(adapter.b.size(1))),
                                       stream_of(module, ".lora_B.weight", seed)));
      [[fallthrough]];
    default:
      initialize_lora_a(adapter.a, config.init() == LoraInit::kGaussian, of_a);
  }
}

FrozenWeight initialize_adapter_from_weight(const LoraAdapter& adapter, const LoraConfig& config, const std::string& module,
                                            const FrozenWeight& base, const at::Tensor& weight, uint64_t seed) {
  const at::NoGradGuard no_grad;
  const bool packed = base.quantized.defined();
  const Quantizer quantizer = packed ? Quantizer::like(base.quantized) : Quantizer();
  const at::ScalarType dtype = packed ? base.quantized.dtype : base.dense.scalar_type();
  const at::Device device = adapter.a.device();
  const int64_t rank = adapter.a.size(0);
  QLORAPP_CHECK_VALUE(rank <= std::min(base.in_features(), base.out_features()),
                      "[lora] a decomposition of {} has at most {} ranks; r is {}. Use a smaller r.", module,
                      std::min(base.in_features(), base.out_features()), rank);
  const auto in_form = [&](const at::Tensor& dense) {
    return packed ? FrozenWeight(quantizer.quantize(dense.to(dtype))) : FrozenWeight(dense.to(dtype));
  };
  const auto dense_of = [&](const FrozenWeight& frozen) {
    return frozen.quantized.defined() ? quantizer.dequantize(frozen.quantized, at::kFloat) : frozen.dense.to(at::kFloat);
  };
  const at::Tensor whole = weight.defined() ? weight.to(device, at::kFloat) : dense_of(base);
  const auto set = [&](const at::Tensor& a, const at::Tensor& b) {
    adapter.a.detach().copy_(a);
    adapter.b.detach().copy_(b);
  };
  const uint64_t stream = stream_of(module, ".lora_A.weight", seed);

  if (config.init() == LoraInit::kLoftq) {
    QLORAPP_CHECK_VALUE(packed && weight.defined(),
                        "[lora] init_lora_weights='loftq' needs the weight of {} as it was before it was quantized, and that in "
                        "four bits. Load a 16-bit or 32-bit checkpoint with load_in_4bit.",
                        module);
    FrozenWeight kept = base;
    for (int64_t round = 0; round < config.loftq_rounds(); ++round) {
      if (round > 0) kept = in_form(whole - at::mm(adapter.b, adapter.a) * adapter.scaling);
      const auto [u, s, v] = largest_part(whole - dense_of(kept), rank, std::nullopt, stream);
      const at::Tensor root = (s / adapter.scaling).sqrt();
      set(root.unsqueeze(1) * v, u * root);
    }
    return kept;
  }
  if (config.init() == LoraInit::kOlora) {
    const auto [q, upper] = at::linalg_qr(whole);
    set(upper.narrow(0, 0, rank), q.narrow(1, 0, rank));
  } else {
    const auto [u, s, v] = largest_part(whole, rank, config.pissa_iterations(), stream);
    const at::Tensor root = (s / adapter.scaling).sqrt();
    set(root.unsqueeze(1) * v, u * root);
  }
  return in_form(whole - at::mm(adapter.b, adapter.a) * adapter.scaling);
}

}  // namespace qlorapp
