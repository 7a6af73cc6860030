// SPDX-License-Identifier: Apache-2.0
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "../gated_activation_entry.hpp"
#include "rows.hpp"

namespace qlorapp::ops {
namespace {

using simd::accumulate_t;
using simd::narrow;
using simd::rounded;
using simd::widen;

/// Both activations are g·σ(v): v = g for silu; 2·√(2/π)·(g + 0.044715·g³) for GELU, because 1 + tanh(u) = 2·σ(2·u).
template <Activation act, class A>
A argument(A g) {
  return act == Activation::kSilu ? g : static_cast<A>(1.5957691216057308) * g * (A{1} + static_cast<A>(0.044715) * g * g);
}
/// dv / dg.
template <Activation act, class A>
A argument_slope(A g) {
  return act == Activation::kSilu ? A{1} : static_cast<A>(1.5957691216057308) * (A{1} + static_cast<A>(3 * 0.044715) * g * g);
}

template <Activation act, class T>
void activate_row(const T* gate, const T* up, T* h, int64_t n) {
  using A = accumulate_t<T>;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const A g = widen(gate[i]);
    h[i] = narrow<T>(rounded<T>(g / (A{1} + simd::exp(-argument<act>(g)))) * widen(up[i]));
  }
}

/// d_gate and d_up may lie over gate and up; with `keep_h`, dh is replaced by h.
template <Activation act, bool keep_h, class T>
void activate_row_backward(std::conditional_t<keep_h, T, const T>* dh, const T* gate, const T* up, T* d_gate, T* d_up, int64_t n) {
  using A = accumulate_t<T>;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const A g = widen(gate[i]), u = widen(up[i]), d = widen(dh[i]);
    const A exponential = simd::exp(-argument<act>(g)), sigmoid = A{1} / (A{1} + exponential);
    const A active = rounded<T>(g / (A{1} + exponential));
    const A curve = act == Activation::kSilu ? g * (A{1} - sigmoid) : g * (A{1} - sigmoid) * argument_slope<act>(g);
    d_gate[i] = narrow<T>(rounded<T>(d * u) * sigmoid * (A{1} + curve));
    d_up[i] = narrow<T>(d * active);
    if constexpr (keep_h) dh[i] = narrow<T>(active * u);
  }
}

template <class F>
void with_activation(Activation act, const F& f) {
  act == Activation::kSilu ? f.template operator()<Activation::kSilu>() : f.template operator()<Activation::kGeluTanh>();
}

struct GatedActivation {
  static void activate(const at::Tensor& gate_up, Activation act, const at::Tensor& h) {
    if (h.numel() == 0) return;
    const at::Tensor in = cpu::as_rows(gate_up), out = cpu::as_written_rows("gated_activation", "h", h);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, h.scalar_type(), "gated_activation", [&] {
      const auto* p = in.const_data_ptr<scalar_t>();
      auto* ph = out.mutable_data_ptr<scalar_t>();
      const int64_t n = in.size(1) / 2, stride = in.stride(0), h_stride = out.stride(0);
      with_activation(act, [&]<Activation known>() {
        cpu::for_rows(in.size(0), n,
                      [=](int64_t row) { activate_row<known>(p + row * stride, p + row * stride + n, ph + row * h_stride, n); });
      });
    });
  }

  template <bool keep_h>
  static void backward_into(const at::Tensor& dh, const at::Tensor& gate_up, Activation act, const at::Tensor& d_gate_up) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dh.scalar_type(), "gated_activation_backward", [&] {
      auto* pd = [&] {
        if constexpr (keep_h) return dh.mutable_data_ptr<scalar_t>();
        else return dh.const_data_ptr<scalar_t>();
      }();
      const auto* p = gate_up.const_data_ptr<scalar_t>();
      auto* po = d_gate_up.mutable_data_ptr<scalar_t>();
      const int64_t n = dh.size(1), d_stride = dh.stride(0), stride = gate_up.stride(0), o_stride = d_gate_up.stride(0);
      with_activation(act, [&]<Activation known>() {
        cpu::for_rows(dh.size(0), n, [=](int64_t row) {
          const scalar_t* gate = p + row * stride;
          scalar_t* out = po + row * o_stride;
          activate_row_backward<known, keep_h, scalar_t>(pd + row * d_stride, gate, gate + n, out, out + n, n);
        });
      });
    });
  }

  static void backward(const at::Tensor& dh, const at::Tensor& gate_up, Activation act, const at::Tensor& d_gate_up, bool keep_h) {
    if (keep_h) backward_into<true>(dh, gate_up, act, d_gate_up);
    else backward_into<false>(dh, gate_up, act, d_gate_up);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) { GatedActivationEntry<GatedActivation>::implement(m); }

}  // namespace qlorapp::ops
