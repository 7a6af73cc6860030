// SPDX-License-Identifier: Apache-2.0
// QuantizedTensor and Quantizer.
#include "bind.hpp"
#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "io/linear_weight.hpp"
#include "qlorapp/quant/quantized_tensor.hpp"
#include "qlorapp/quant/quantizer.hpp"
#include "quant/linear.hpp"
#include "quantizer_options.hpp"

namespace qlorapp::python {
namespace {

constexpr const char* kQuantizedTensorDoc = R"(A weight in four bits, as Quantizer.quantize returns it: bitsandbytes' bytes.

With n elements in blocks of block_size, and b = ceil(n / block_size) blocks:

    packed         (ceil(n / 2), 1) uint8; two codes a byte, the even element in the high nibble
    absmax         (b) float32 scales; with double quantization (b) uint8 codes of them
    nested_absmax  (ceil(b / nested_block_size)) float32, or None without double quantization
    nested_offset  () float32, the mean of the scales, or None without double quantization

Its tensors are on one device. A block is a run of the weight flattened row by row.)";

constexpr const char* kQuantizerDoc = R"(Quantizes weights to four bits, and back.

    q = Quantizer().quantize(weight)      # NF4, blocks of 64, double quantization: 4.127 bits per element
    back = Quantizer().dequantize(q)

quant_type: "nf4" or "fp4".
block_size: elements per scale: 32, 64, 128, 256, 512, 1024, 2048 or 4096.
double_quant: store the scales in eight bits, too.
nested_block_size: scales per second-level scale, > 0.
compat: "none": nested codes are exactly nearest, a block of zeros has code 7, and a weight that is not finite is refused.
    "bnb": bitsandbytes' nested codes, and its course with such weights.

Codes and scales equal those of bitsandbytes on the same kind of device. A Quantizer has no state: threads may share one.
Raises ValueError for an option outside its range.)";

constexpr const char* kQuantizeDoc = R"(Returns the codes and scales of a weight, on its device.

weight: any shape and strides; float32, float16 or bfloat16; not changed.
Raises ValueError that names the first element that is not finite (compat="none"); synchronizes for that check.)";

constexpr const char* kDequantizeDoc =
    R"(Returns a dense tensor of q.shape on q's device. Looks at q alone, not at this Quantizer's options.

dtype: float32, float16, bfloat16 or float64; None: the dtype of the weight. Does not synchronize.)";

std::optional<at::Tensor> if_defined(const at::Tensor& tensor) { return tensor.defined() ? std::optional(tensor) : std::nullopt; }

}  // namespace

Quantizer::Options quantizer_options(const std::string& quant_type, int64_t block_size, bool double_quant,
                                     int64_t nested_block_size, const std::string& compat) {
  QLORAPP_CHECK_VALUE(compat == "none" || compat == "bnb", "[quantizer] compat must be 'none' or 'bnb'; got '{}'.", compat);
  return {parse_quant_type(quant_type, "quantizer"), block_size, double_quant, nested_block_size,
          compat == "bnb" ? Compat::kBnb : Compat::kNone};
}

void bind_quant(py::module_& m) {
  py::class_<QuantizedTensor>(m, "QuantizedTensor", kQuantizedTensorDoc)
      .def_readonly("packed", &QuantizedTensor::packed)
      .def_readonly("absmax", &QuantizedTensor::absmax)
      .def_property_readonly("nested_absmax", [](const QuantizedTensor& q) { return if_defined(q.nested_absmax); })
      .def_property_readonly("nested_offset", [](const QuantizedTensor& q) { return if_defined(q.nested_offset); })
      .def_property_readonly("shape", [](const QuantizedTensor& q) { return py::tuple(py::cast(q.shape)); })
      .def_readonly("dtype", &QuantizedTensor::dtype)
      .def_property_readonly("device", [](const QuantizedTensor& q) { return q.packed.device(); })
      .def_readonly("block_size", &QuantizedTensor::block_size)
      .def_readonly("nested_block_size", &QuantizedTensor::nested_block_size)
      .def_property_readonly("quant_type", [](const QuantizedTensor& q) { return std::string(to_string(q.quant_type)); })
      .def_property_readonly("double_quant", &QuantizedTensor::double_quantized)
      .def_property_readonly(
          "nbytes", [](const QuantizedTensor& q) { return q.nbytes().count; }, "Bytes of all tensors together.")
      .def("numel", &QuantizedTensor::numel)
      .def("to", &QuantizedTensor::to, py::arg("device"), NoGil())
      .def("clone", &QuantizedTensor::clone, NoGil(), "The same weight in memory of its own.")
      .def(
          "linear", [](const QuantizedTensor& q, const at::Tensor& x) { return linear_4bit(x, q); }, py::arg("x"), NoGil(),
          "x · Wᵀ, differentiable in x.")
      .def(
          "named_tensors", [](const QuantizedTensor& q, const std::string& name) { return quantized_tensors(name, q); },
          py::arg("name"), NoGil(), "[(key, tensor)] that bitsandbytes stores for this weight.")
      .def_static("of_tensors", &quantized_of_tensors, py::arg("tensors"), py::arg("name"), py::arg("where"), NoGil(),
                  "The weight whose named_tensors(name) these are, in memory of its own. where: for messages.\n\n"
                  "Raises FormatError where they do not fit together.")
      .def("__repr__", [](const QuantizedTensor& q) {
        return message("QuantizedTensor(shape={}, {}, block_size={}, double_quant={}, {})", joined(q.shape),
                       to_string(q.quant_type), q.block_size, q.double_quantized() ? "True" : "False", to_string(q.nbytes()));
      });

  py::class_<Quantizer>(m, "Quantizer", kQuantizerDoc)
      .def(py::init([](const std::string& quant_type, int64_t block_size, bool double_quant, int64_t nested_block_size,
                       const std::string& compat) {
             return Quantizer(quantizer_options(quant_type, block_size, double_quant, nested_block_size, compat));
           }),
           py::arg("quant_type") = "nf4", py::arg("block_size") = 64, py::arg("double_quant") = true,
           py::arg("nested_block_size") = 256, py::arg("compat") = "none")
      .def("quantize", &Quantizer::quantize, py::arg("weight"), NoGil(), kQuantizeDoc)
      .def("dequantize", &Quantizer::dequantize, py::arg("q"), py::arg("dtype") = std::nullopt, NoGil(), kDequantizeDoc);
}

}  // namespace qlorapp::python
