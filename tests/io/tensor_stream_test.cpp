// SPDX-License-Identifier: Apache-2.0
// Tensors from files to each device there is. Without a GPU its part says so and passes over.
#include "io/tensor_stream.hpp"

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"
#include "io/linear_weight.hpp"
#include "io/tensor_file.hpp"
#include "qlorapp/io/device.hpp"

using namespace qlorapp;

namespace {

constexpr int64_t kStep = int64_t{16} << 10;

std::vector<at::Device> devices() {
  if (has_gpu()) return {at::kCPU, at::Device(at::kCUDA, 0)};
  WARN("no GPU here: only the CPU is tested");
  return {at::kCPU};
}

/// One file with a few weights: larger than several buffers, smaller than one, empty, of other dtypes.
struct Files {
  TemporaryFolder folder;
  NamedTensors tensors;

  Files() {
    at::manual_seed(1);
    tensors = {{"large.weight", at::randn({300, 704}).mul_(0.02).to(at::kBFloat16)},
               {"half.weight", at::randn({33, 1024}).mul_(0.02).to(at::kHalf)},
               {"float.weight", at::randn({65, 640}).mul_(0.02)},
               {"norm.weight", at::randn({77}).to(at::kBFloat16)},
               {"empty", at::empty({0, 3}, at::kByte)},
               {"bytes", at::randint(256, {100'003}, at::kByte)}};
    write_tensors(folder / "model.safetensors", tensors);
  }
};

const StreamBuffers kGeometries[] = {{1, 1, kStep}, {2, 3, kStep}, {8, 12, 5 * kStep}, {3, 2, 1 << 20}};

}  // namespace

TEST_CASE("tensors arrive with the bytes of their file, whole or in pieces, on every device", "[io][cpu][cuda]") {
  const Files files;
  const format::TensorFiles stored(files.folder.path());
  for (const at::Device device : devices()) {
    for (const StreamBuffers& buffers : kGeometries) {
      std::map<std::string, at::Tensor> whole, pieced;
      std::map<std::string, int> done;
      std::vector<StreamedTensor> streamed;
      for (const auto& [name, tensor] : files.tensors) {
        whole[name] = at::full(tensor.sizes(), 3, tensor.options().device(device));
        pieced[name] = at::full({tensor.numel()}, 3, at::TensorOptions().dtype(at::kFloat).device(device));
        const auto count = [&done, key = name] { ++done[key]; };
        const auto take = [to = pieced[name]](int64_t first, const at::Tensor& piece) {
          to.narrow(0, first, piece.numel()).copy_(piece);
        };
        streamed.push_back({stored.at(name), whole[name], {}, count});
        streamed.push_back({stored.at(name), {}, take, count});
      }
      stream_tensors(std::move(streamed), device, buffers);
      for (const auto& [name, tensor] : files.tensors) {
        REQUIRE(at::equal(whole[name].cpu(), tensor));
        REQUIRE(at::equal(pieced[name].cpu().view_as(tensor), tensor.to(at::kFloat)));
        REQUIRE(done[name] == 2);
      }
    }
  }
}

TEST_CASE("weights quantized as they stream have the codes of those quantized whole, the same on every device", "[io][cpu][cuda]") {
  const Files files;
  const format::TensorFiles stored(files.folder.path());
  for (const at::Device device : devices()) {
    for (const StreamBuffers& buffers : kGeometries) {
      const Quantizer quantizer;
      std::map<std::string, QuantizedTensor> quantized;
      std::vector<StreamedTensor> streamed;
      for (const auto& [name, tensor] : files.tensors) {
        if (tensor.dim() != 2 || tensor.numel() == 0) continue;
        stream_and_quantize(streamed, stored, name, tensor.sizes().vec(), quantizer,
                            [&quantized, key = name](QuantizedTensor weight) { quantized[key] = std::move(weight); });
      }
      stream_tensors(std::move(streamed), device, buffers);
      REQUIRE(quantized.size() == 3);
      for (const auto& [name, tensor] : files.tensors) {
        if (!quantized.contains(name)) continue;
        const QuantizedTensor& got = quantized[name];
        REQUIRE(got.packed.device() == device);
        REQUIRE(at::equal(got.packed.cpu(), quantizer.quantize(tensor).packed));
        const QuantizedTensor whole = quantizer.quantize(tensor.to(device));
        REQUIRE(at::equal(got.absmax, whole.absmax));
        REQUIRE(at::equal(got.nested_absmax, whole.nested_absmax));
        REQUIRE(at::equal(got.nested_offset, whole.nested_offset));
      }
    }
  }
}

TEST_CASE("what goes wrong while streaming reaches the caller, and nothing hangs", "[io][cpu][cuda]") {
  const Files files;
  at::Tensor poisoned = files.tensors[0].second.clone();
  poisoned[299][1] = std::numeric_limits<float>::quiet_NaN();
  const TemporaryFolder damaged;
  write_tensors(damaged / "model.safetensors", {{"large.weight", poisoned}, {"other", at::zeros({100'000})}});
  const format::TensorFiles stored(files.folder.path()), bad(damaged.path());
  for (const at::Device device : devices()) {
    for (const StreamBuffers& buffers : kGeometries) {
      std::vector<StreamedTensor> streamed;
      for (const auto& [name, tensor] : files.tensors) {
        streamed.push_back({stored.at(name),
                            {},
                            [](int64_t first, const at::Tensor& piece) {
                              if (first + piece.numel() > 100'000) throw std::runtime_error("no more");
                            },
                            {}});
      }
      REQUIRE_THROWS_WITH(stream_tensors(std::move(streamed), device, buffers), "no more");
      std::vector<StreamedTensor> weights;
      stream_and_quantize(weights, bad, "large.weight", {300, 704}, Quantizer(), [](const QuantizedTensor&) {});
      weights.push_back({bad.at("other"), at::zeros({100'000}, device), {}, {}});
      const std::string message = thrown<FormatError>([&] { stream_tensors(std::move(weights), device, buffers); });
      REQUIRE(has(message, "tensor 'large.weight' cannot be quantized"));
      REQUIRE(has(message, qlorapp::message("flat index {}", 299 * 704 + 1)));
      REQUIRE_FALSE(has(message, "Exception raised from"));
    }
  }
}

TEST_CASE("a GPU holds no more than the weights, two buffers and the scales of one weight", "[io][cuda]") {
  if (!has_gpu()) {
    WARN("no GPU here: not tested");
    return;
  }
  const at::Device device(at::kCUDA, 0);
  const TemporaryFolder folder;
  NamedTensors tensors;
  for (int i = 0; i < 4; ++i) tensors.emplace_back(message("w{}", i), at::randn({4096, 4096}).to(at::kBFloat16));
  write_tensors(folder / "model.safetensors", tensors);
  const format::TensorFiles stored(folder.path());
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(at::kCUDA));
  REQUIRE(allocator != nullptr);
  const auto allocated = [&] { return allocator->getDeviceStats(0).allocated_bytes[0]; };
  std::vector<QuantizedTensor> quantized;
  std::vector<StreamedTensor> streamed;
  for (const auto& [name, tensor] : tensors) {
    stream_and_quantize(streamed, stored, name, {4096, 4096}, Quantizer(),
                        [&](QuantizedTensor weight) { quantized.push_back(weight); });
  }
  const StreamBuffers buffers{4, 4, 1 << 20};
  (void)at::empty({1}, device);
  allocator->resetPeakStats(0);
  const int64_t before = allocated().current;
  stream_tensors(std::move(streamed), device, buffers);
  int64_t kept = 0;
  for (const QuantizedTensor& weight : quantized) kept += weight.nbytes().count;
  const int64_t scales = int64_t{4096} * 4096 / 64 * 4;
  REQUIRE(allocated().current - before <= kept + (64 << 10));
  // The scales of one weight, less their mean, and their codes; what one buffer is quantized to.
  REQUIRE(allocated().peak - before <= kept + 2 * buffers.buffer_bytes + 3 * scales + buffers.buffer_bytes / 2);
}
