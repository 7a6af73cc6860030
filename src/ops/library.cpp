// SPDX-License-Identifier: Apache-2.0
// Every operator of the library, on one screen. Implementations register per device in ops/cpu, ops/cuda and ops/meta;
// derivatives in ops/autograd. Shapes: M tokens, D hidden, H heads, R rank, V vocabulary. n elements, b blocks.
#include <torch/library.h>

TORCH_LIBRARY(qlorapp, m) {
  m.def("gpu_architecture(int device) -> int");  // 75 for a T4, 90 for an H200; -1 is the current one
  m.def("gpu_name(int device) -> str");          // as the driver has it: "Tesla T4"

  // Four-bit weights (format/nf4.hpp, format/double_quant.hpp). packed uint8 (ceil(n/2), 1); absmax float32 (b).
  m.def("quantize_4bit(Tensor weight, int block_size=64, str quant_type=\"nf4\") -> (Tensor packed, Tensor absmax)");
  // With bitsandbytes' behavior on the same kind of device, for NaN, infinity and blocks of zeros too, which the former refuses or
  // defines; on a GPU its codes near midpoints are those of an approximate reciprocal (cuda/quantize_4bit.hpp).
  m.def("quantize_4bit_bnb(Tensor weight, int block_size=64, str quant_type=\"nf4\") -> (Tensor packed, Tensor absmax)");
  m.def("dequantize_4bit(Tensor packed, Tensor absmax, int[] shape, int block_size, str quant_type, ScalarType dtype) -> Tensor");
  // absmax uint8 (b); nested_absmax float32; nested_offset float32 ().
  m.def(
      "dequantize_4bit_nested(Tensor packed, Tensor absmax, Tensor nested_absmax, Tensor nested_offset, int[] shape, "
      "int block_size, int nested_block_size, str quant_type, ScalarType dtype) -> Tensor");
  // Weights of as many columns, stacked by rows into out (rows, columns), whose rows may be apart; one launch on a GPU. The nested
  // lists are empty where absmax is float32.
  m.def(
      "dequantize_4bit_stack_(Tensor(a!) out, Tensor[] packed, Tensor[] absmax, Tensor[] nested_absmax, Tensor[] nested_offset, "
      "int[] rows, int block_size, int nested_block_size, str quant_type) -> ()");
  // Eight bits through the 256-entry dynamic map (format/dynamic_map.hpp), exactly nearest. Codes uint8, shape of x.
  m.def("quantize_blockwise(Tensor x, int block_size=256, bool signed=True) -> (Tensor codes, Tensor absmax)");
  // With the codes of bitsandbytes' library for the device, which are a neighbor's near zero and near midpoints.
  m.def("quantize_blockwise_bnb(Tensor x, int block_size=256, bool signed=True) -> (Tensor codes, Tensor absmax)");
  m.def(
      "dequantize_blockwise(Tensor codes, Tensor absmax, int block_size=256, bool signed=True, ScalarType dtype=float) -> Tensor");

  // y = x · dequantize(W)ᵀ; gradient to x only; saves the packed weight, never a dense one. x (…, in) → (…, out).
  // absmax is float32, or uint8 with nested_absmax and nested_offset. `transpose` gives x · dequantize(W): x (…, out) → (…, in).
  m.def(
      "linear_4bit(Tensor x, Tensor packed, Tensor absmax, Tensor? nested_absmax, Tensor? nested_offset, int[] shape, "
      "int block_size, int nested_block_size, str quant_type, bool transpose=False) -> Tensor");
  // The same into y, or added to it; not differentiable.
  m.def(
      "linear_4bit_out(Tensor(a!) y, Tensor x, Tensor packed, Tensor absmax, Tensor? nested_absmax, Tensor? nested_offset, "
      "int[] shape, int block_size, int nested_block_size, str quant_type, bool transpose=False, bool accumulate=False) -> ()");
  // The adapters of stacked projections, beside and under their weights in workspace (N + P, K + P): s·B at the right, A below.
  m.def("lora_augment_(Tensor(a!) workspace, Tensor[] a, Tensor[] b, float[] scaling) -> ()");
  // dequantize_4bit_stack_ into the first N rows and K columns, and lora_augment_ around them: one launch on a GPU.
  m.def(
      "dequantize_4bit_augmented_(Tensor(a!) workspace, Tensor[] packed, Tensor[] absmax, Tensor[] nested_absmax, "
      "Tensor[] nested_offset, int[] rows, int block_size, int nested_block_size, str quant_type, Tensor[] a, Tensor[] b, "
      "float[] scaling) -> ()");

  // The borders alone: s·B in right (N, P), A in below (P, K).
  m.def("lora_borders_(Tensor(a!) right, Tensor(b!) below, Tensor[] a, Tensor[] b, float[] scaling) -> ()");

  // On a GPU, few rows of x: y (M, Σ heights) = x · dequantize(W)ᵀ + scaling · (x · Aᵀ) · Bᵀ + bias, weights stacked by rows as above. A (Σ r, K) of
  // all, B (height, r) of each, in the dtype of x; r of 0 where a weight has no adapter. Ask has_linear_4bit_group.
  m.def(
      "linear_4bit_group_(Tensor(a!) y, Tensor x, Tensor[] packed, Tensor[] absmax, Tensor[] nested_absmax, Tensor[] "
      "nested_offset, "
      "int[] heights, int block_size, int nested_block_size, str quant_type, Tensor? bias, Tensor? a, Tensor[] b, float[] scaling) "
      "-> ()");
  m.def(
      "has_linear_4bit_group(ScalarType dtype, int rows, int columns, int block_size, int nested_block_size, int device) -> bool");

  // Operands of products in e4m3. Four-bit weights stacked by rows, over weight_scale (): (rows, columns), or transposed.
  m.def(
      "dequantize_4bit_float8(Tensor[] packed, Tensor[] absmax, Tensor[] nested_absmax, Tensor[] nested_offset, int[] rows, "
      "int columns, int block_size, int nested_block_size, str quant_type, Tensor weight_scale, bool transpose=False) -> Tensor");
  // x (M, K), rows may be apart → e4m3 (M, K) and float32 (M, 1): x is about values · scale, scale times weight_scale if there is one.
  m.def("quantize_rows_float8(Tensor x, Tensor? weight_scale=None) -> (Tensor values, Tensor scale)");
  // y (M, N) = scale ∘ (x · wᵀ), x (M, K) and w (N, K) in e4m3, scale (M, 1); ones float32 (1, >= N), all 1, read on a GPU.
  m.def("float8_product_out(Tensor(a!) y, Tensor x, Tensor scale, Tensor w, Tensor ones) -> ()");

  // Llama's pieces, with transformers' rounding points. rstd float32 (M). All gradients are to activations: weights are frozen.
  // A trailing underscore writes its marked arguments and returns nothing; autograd refuses those, hand-written blocks call them.
  // rule: 0 rounds before and after the product with the weight, 1 only after it, 2 too and multiplies by 1 + weight (format::NormRule).
  m.def("rms_norm(Tensor x, Tensor weight, float eps, int rule=0) -> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm.out(Tensor x, Tensor weight, float eps, int rule=0, *, Tensor(a!) y, Tensor(b!) rstd) -> ()");  // rows of y may lie apart
  m.def("rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, int rule=0) -> Tensor");
  // dx += gradient; dy becomes y, which the gradients of the adapters behind the norm read.
  m.def("rms_norm_backward_(Tensor(a!) dx, Tensor(b!) dy, Tensor x, Tensor weight, Tensor rstd, int rule=0) -> ()");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, int rule=0) -> (Tensor sum, Tensor y, Tensor rstd)");
  m.def(
      "add_rms_norm.out(Tensor x, Tensor residual, Tensor weight, float eps, int rule=0, *, Tensor(a!) sum, Tensor(b!) y, "
      "Tensor(c!) rstd) "
      "-> ()");
  // x (M, H, head_dim); cos, sin float32 (positions, width / 2), of the elements that turn: the first `width` of a head, in pairs from its
  // two halves, or of neighbors (interleaved); positions int64 (M). `inverse` turns the other way (backward).
  m.def("rope(Tensor x, Tensor cos, Tensor sin, Tensor positions, bool inverse=False, bool interleaved=False) -> Tensor");
  m.def("rope_(Tensor(a!) x, Tensor cos, Tensor sin, Tensor positions, bool inverse=False, bool interleaved=False) -> ()");
  // dqkv (M, (H + 2·H_kv)·d), rows any distance apart, becomes [dq turned back | dk turned back | dv].
  m.def(
      "rope_backward_qkv_(Tensor(a!) dqkv, Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, Tensor positions, "
      "bool interleaved=False) -> ()");
  // The first q_heads heads of x normed by q_weight, the others by k_weight, both (d), then turned as a whole by their halves: (M, H, d),
  // contiguous.
  m.def(
      "rms_norm_rope(Tensor x, Tensor q_weight, Tensor k_weight, int q_heads, float eps, Tensor cos, Tensor sin, Tensor positions, "
      "int rule=0) -> Tensor");
  // rope_backward_qkv_ and, behind it, the norms' backward pass at x, (M, H + H_kv, d), the input of rms_norm_rope.
  m.def(
      "rms_norm_rope_backward_qkv_(Tensor(a!) dqkv, Tensor dq, Tensor dk, Tensor dv, Tensor x, Tensor q_weight, Tensor k_weight, "
      "float eps, Tensor cos, Tensor sin, Tensor positions, int rule=0) -> ()");
  // gate_up (M, 2·I), gate first → (M, I); act 0 is silu, 1 GELU with tanh (format::Activation). gated_activation_backward_: gate_up
  // becomes its gradient, dh becomes gated_activation(gate_up).
  m.def("gated_activation(Tensor gate_up, int act=0) -> Tensor");
  m.def("gated_activation.out(Tensor gate_up, int act=0, *, Tensor(a!) h) -> ()");
  m.def("gated_activation_backward(Tensor dh, Tensor gate_up, int act=0) -> Tensor");
  m.def("gated_activation_backward_(Tensor(a!) dh, Tensor(b!) gate_up, int act=0) -> ()");
  // Causal attention within each row [row_starts[r], row_starts[r+1]); q (M, H, d), k and v (M, H_kv, d); lse float32 (H, M).
  // deterministic: gradients with the same bits in every run, on a GPU too. window: a query sees the last so many keys, its own among
  // them; 0: all. Both the same for both passes.
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, int[] row_starts, float scale, bool deterministic=False, "
      "int window=0) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int[] row_starts, float scale, "
      "bool deterministic=False, int window=0) -> (Tensor dq, Tensor dk, Tensor dv)");
  // Queries of row r are the last of its cache_lengths[r] keys. Key p is in slot cache_starts[r] + p of k and v, or, of the first
  // shared_lengths[r] (none: no row shares keys), in slot shared_starts[r] + p. No gradient.
  m.def(
      "attention_with_cache(Tensor q, Tensor k, Tensor v, int[] row_starts, int[] cache_starts, int[] cache_lengths, float scale, "
      "int window=0, int[] shared_starts=[], int[] shared_lengths=[]) -> Tensor");
  // The same of one query a row; where its keys are, int64 (R) each, is on the device, and no length is above `longest`.
  m.def(
      "decode_attention(Tensor q, Tensor k, Tensor v, Tensor cache_starts, Tensor cache_lengths, int longest, float scale, "
      "int window=0, Tensor? shared_starts=None, Tensor? shared_lengths=None) -> Tensor");
  m.def("has_decode_attention(ScalarType dtype, int head_dim, int device) -> bool");  // on a GPU
  // weight (V, D), tokens int64 (M) → (M, D): rows of the frozen table.
  m.def("embedding(Tensor weight, Tensor tokens) -> Tensor");
  // Summed loss over rows with a target >= 0, float32 (); gradient of that sum times grad_scale (float32 (), default 1), shape and
  // dtype of hidden, formed chunk_rows rows at a time so that the logits never exist as a whole. Empty unless need_gradient.
  // target_count: how many targets are >= 0, if the caller knows; a GPU then leaves the other rows out without asking.
  // Logits are z = logit_factor · product, then cap · tanh(z / cap) if there is a logit_cap.
  // statistics, float32 (2), is added to: the sum of the rows' entropies; the rows whose target is the first highest logit.
  m.def(
      "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, Tensor? grad_scale=None, bool need_gradient=True, "
      "int chunk_rows=512, int target_count=-1, float logit_factor=1.0, float logit_cap=0.0, Tensor(a!)? statistics=None) "
      "-> (Tensor loss_sum, Tensor grad_hidden)");

  // On a GPU: scores float32 (R, V) that top_k (0: off), then top_p (1), then min_p (0) exclude become -inf; the token of each row by inverse
  // cumulative probability of draws, float64 (R) → int64 (R).
  m.def("keep_likely_tokens_(Tensor(a!) scores, int top_k=0, float top_p=1.0, float min_p=0.0) -> ()");
  m.def("draw_tokens(Tensor scores, Tensor draws) -> Tensor");

  // x · mask / (1 - p); the mask is a pure function of (seed, micro_step, site, element index): core/philox.hpp.
  m.def("seeded_dropout(Tensor x, float p, int seed, int micro_step, int site, int first=0) -> Tensor");

  // Of a flat float32 arena, for the step below, without reading anything back: norm of round(gradient · inverse_scale); found_inf 1
  // if an element of that is not finite, else 0; multiplier inverse_scale · min(1, max_norm / (norm + 1e-6)), 0 does not clip.
  m.def(
      "gradient_norm(Tensor gradient, Tensor? inverse_scale=None, float max_norm=0.0) "
      "-> (Tensor norm, Tensor found_inf, Tensor multiplier)");
  // One step over a flat arena, all float32 (n), in torch.optim.AdamW's order of roundings; `step` counts from 1. multiplier and
  // skip, float32 () on the device: the gradient is multiplied first; nothing changes unless skip is 0.
  m.def(
      "adamw_(Tensor(a!) parameter, Tensor gradient, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, int step, float lr, float beta1, "
      "float beta2, float eps, float weight_decay, Tensor? multiplier=None, Tensor? skip=None) -> ()");
  // The same with both moments in eight bits, blocks of 256: state1, state2 uint8 (n); absmax1, absmax2 float32 (n / 256).
  m.def(
      "adamw_8bit_(Tensor(a!) parameter, Tensor gradient, Tensor(b!) state1, Tensor(c!) state2, Tensor(d!) absmax1, "
      "Tensor(e!) absmax2, int step, float lr, float beta1, float beta2, float eps, float weight_decay, Tensor? multiplier=None, "
      "Tensor? skip=None) -> ()");
}
