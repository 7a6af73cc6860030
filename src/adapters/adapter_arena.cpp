// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/adapters/adapter_arena.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

#include "core/check.hpp"
#include "core/nearest_name.hpp"

namespace qlorapp {

AdapterArena::AdapterArena(std::vector<std::pair<std::string, std::vector<int64_t>>> names_and_shapes, at::Device device,
                           std::vector<size_t> layout) {
  std::unordered_set<std::string> names;
  for (auto& [name, shape] : names_and_shapes) {
    QLORAPP_CHECK_VALUE(!name.empty(), "[adapter] every parameter must have a name; got an empty one.");
    QLORAPP_CHECK_VALUE(names.insert(name).second, "[adapter] every parameter must have a name of its own; got '{}' twice.", name);
    int64_t numel = 1;
    for (const int64_t extent : shape) {
      QLORAPP_CHECK_VALUE(extent >= 0, "[adapter] '{}' must have sizes >= 0; got {}.", name, joined(shape));
      numel *= extent;
    }
    entries_.push_back({std::move(name), std::move(shape), /*offset=*/-1, numel});
  }
  if (layout.empty()) {
    for (size_t i = 0; i < entries_.size(); ++i) layout.push_back(i);
  }
  QLORAPP_CHECK_VALUE(layout.size() == entries_.size(), "[adapter] a layout must name each of {} parameters once; got {}.",
                      entries_.size(), layout.size());
  int64_t end = 0;
  for (const size_t i : layout) {
    QLORAPP_CHECK_VALUE(i < entries_.size() && entries_[i].offset < 0,
                        "[adapter] a layout must name each parameter once; got {} again.", i);
    entries_[i].offset = end;
    end += (entries_[i].numel + kAlignment - 1) / kAlignment * kAlignment;
  }
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  values_ = at::zeros({end}, options);
  gradients_ = at::zeros({end}, options);
  for (const Entry& entry : entries_) {
    at::Tensor parameter = values_.narrow(0, entry.offset, entry.numel).view(entry.shape).detach();
    parameter.set_requires_grad(true);
    parameters_.push_back(parameter);
  }
  for (const Entry& entry : entries_) gradient_views_.push_back(gradients_.narrow(0, entry.offset, entry.numel).view(entry.shape));
  zero_grad();
}

int64_t AdapterArena::numel() const {
  int64_t total = 0;
  for (const Entry& entry : entries_) total += entry.numel;
  return total;
}

int64_t AdapterArena::index_of(std::string_view name) const {
  std::vector<std::string_view> known;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].name == name) return static_cast<int64_t>(i);
    known.push_back(entries_[i].name);
  }
  throw ValueError(message("[adapter] there is no parameter '{}'.{}", name, did_you_mean(name, known)));
}

void AdapterArena::zero_grad() {
  gradients_.zero_();
  for (int64_t i = 0; i < size(); ++i) {
    at::Tensor slice = gradient(i);
    at::Tensor& bound = parameters_[static_cast<size_t>(i)].mutable_grad();
    if (!bound.defined() || !bound.is_alias_of(slice)) bound = slice;
  }
}

void AdapterArena::bind_gradients() {
  for (int64_t i = 0; i < size(); ++i) {
    at::Tensor slice = gradient(i);
    at::Tensor& bound = parameters_[static_cast<size_t>(i)].mutable_grad();
    if (bound.defined() && bound.is_alias_of(slice)) continue;
    if (bound.defined()) {
      slice.copy_(bound);
    } else {
      slice.zero_();
    }
    bound = slice;
  }
}

void AdapterArena::bind_values() {
  for (int64_t i = 0; i < size(); ++i) {
    const Entry& entry = entries_[static_cast<size_t>(i)];
    at::Tensor& parameter = parameters_[static_cast<size_t>(i)];
    at::Tensor slice = values_.narrow(0, entry.offset, entry.numel).view(entry.shape);
    if (parameter.data_ptr() == slice.data_ptr() && parameter.scalar_type() == at::kFloat) continue;
    QLORAPP_CHECK_VALUE(
        parameter.sizes() == slice.sizes() && parameter.scalar_type() == at::kFloat && parameter.device() == slice.device(),
        "[adapter] '{}' must stay a float32 tensor of shape {} on the model's device; it was replaced by another kind. Copy values "
        "into it in place.",
        entry.name, joined(entry.shape));
    slice.copy_(parameter.detach());
    parameter.set_data(slice);
  }
}

void AdapterArena::adopt_parameter(int64_t i, const at::Tensor& parameter) {
  const at::Tensor& mine = parameters_[static_cast<size_t>(i)];
  QLORAPP_CHECK_VALUE(parameter.data_ptr() == mine.data_ptr() && parameter.sizes() == mine.sizes() &&
                          parameter.scalar_type() == at::kFloat && parameter.is_contiguous(),
                      "[adapter] a parameter must keep the memory of the arena; '{}' has other memory, shape or dtype. Copy values "
                      "into it in place instead of replacing it.",
                      entries_[static_cast<size_t>(i)].name);
  at::Tensor adopted = parameter, slice = gradient(i);
  if (adopted.grad().defined()) slice.copy_(adopted.grad());  // of earlier backward passes
  adopted.mutable_grad() = slice;
  parameters_[static_cast<size_t>(i)] = adopted;
}

}  // namespace qlorapp
