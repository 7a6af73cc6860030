// SPDX-License-Identifier: Apache-2.0
// GradScaler, Accumulator and the pages of an optimizer's state.
#include <ATen/core/LegacyTypeDispatch.h>

#include "bind.hpp"
#include "core/check.hpp"
#include "qlorapp/train/accumulator.hpp"
#include "qlorapp/train/grad_scaler.hpp"
#include "train/paged_state.hpp"

namespace qlorapp::python {
namespace {

py::dict state_dict(const GradScaler& scaler) {
  py::dict result;
  const std::optional<GradScaler::State> state = scaler.state_dict();
  if (!state) return result;
  for_each_field<GradScaler::State>([&](const auto& field) { result[py::str(std::string(field.name))] = (*state).*field.member; });
  return result;
}

void load_state_dict(GradScaler& scaler, const py::dict& dict) {
  if (dict.empty()) return scaler.load_state_dict(std::nullopt);
  GradScaler::State state;
  for_each_field<GradScaler::State>([&](const auto& field) {
    using Member = std::remove_cvref_t<decltype(state.*field.member)>;
    state.*field.member = dict[py::str(std::string(field.name))].template cast<Member>();
  });
  scaler.load_state_dict(state);
}

/// The state of a copy in another process. The factors are beside the state because a disabled scaler has no state.
py::tuple to_pickle(const GradScaler& scaler) {
  scaler.check_serializable();
  const GradScaler::Options& options = scaler.options();
  return py::make_tuple(at::Device(options.device), options.enabled, options.growth_factor, options.backoff_factor,
                        options.growth_interval, options.min_scale, options.max_consecutive_skips, scaler.consecutive_skips(),
                        state_dict(scaler));
}

GradScaler from_pickle(const py::tuple& saved) {
  QLORAPP_CHECK_VALUE(saved.size() == 9, "[GradScaler] a pickled state must have 9 entries; got {}.", saved.size());
  GradScaler::Options options;
  options.device = saved[0].cast<at::Device>().type();
  options.enabled = saved[1].cast<bool>();
  options.min_scale = saved[5].cast<double>();
  options.max_consecutive_skips = saved[6].cast<int64_t>();
  GradScaler scaler(options);
  scaler.set_growth_factor(saved[2].cast<double>());
  scaler.set_backoff_factor(saved[3].cast<double>());
  scaler.set_growth_interval(saved[4].cast<int64_t>());
  scaler.set_consecutive_skips(saved[7].cast<int64_t>());
  load_state_dict(scaler, saved[8].cast<py::dict>());
  return scaler;
}

constexpr const char* kAccumulatorDoc = R"(The denominator of a window of micro-batches.

The mean loss over a big batch is the sum of its targets' losses divided by the number of its targets. Count the targets of the whole
window first and weigh each micro-batch's summed loss by 1 / tokens: k micro-batches then give the loss and the gradients of one big
batch, on rows of any length and on a last, partial window. A window without a target weighs 0. An Accumulator lives for one window:

    window = Accumulator([count_of(batch) for batch in batches])
    for batch in batches:
        loss_sum = torch.nn.functional.cross_entropy(logits_of(batch), batch.targets, reduction="sum")
        window.share_of(loss_sum).backward()
    print(window.mean_loss().item())

target_counts: the number of targets of each micro-batch, integers >= 0.
sum_over_ranks: a function that turns this process's count into the count of all processes; it is called once. None: one process.

Raises ValueError if a count is negative, or the count of all processes is below this one's.)";

}  // namespace

/// Tensors of their own over the same memory. A tracked view keeps its base, and a tensor that Python has seen keeps a second owner. PagedState
/// counts both as users of the memory, which then cannot leave the GPU.
std::vector<at::Tensor> flat_aliases(const std::vector<at::Tensor>& moments) {
  const at::AutoDispatchBelowADInplaceOrView untracked;
  std::vector<at::Tensor> flat;
  for (const at::Tensor& moment : moments) flat.push_back(moment.view({-1}));
  return flat;
}

void bind_train(py::module_& m) {
  py::class_<GradScaler>(m, "GradScaler", "The state machine of qlorapp.GradScaler, over gradients instead of an optimizer.")
      .def(py::init([](at::Device device, double init_scale, double growth_factor, double backoff_factor, int64_t growth_interval,
                       bool enabled, double min_scale, int64_t max_consecutive_skips) {
             return GradScaler({device.type(), init_scale, growth_factor, backoff_factor, growth_interval, enabled, min_scale,
                                max_consecutive_skips});
           }),
           py::arg("device"), py::arg("init_scale"), py::arg("growth_factor"), py::arg("backoff_factor"),
           py::arg("growth_interval"), py::arg("enabled"), py::arg("min_scale"), py::arg("max_consecutive_skips"))
      .def(
          "scale", [](GradScaler& self, const at::Tensor& outputs) { return self.scale(outputs); }, py::arg("outputs"))
      .def(
          "unscale_",
          [](GradScaler& self, const MaybeTensors& grads, uint64_t optimizer, bool allow_fp16) {
            self.unscale_(undefined_for_none(grads), optimizer, allow_fp16);
          },
          py::arg("grads"), py::arg("optimizer"), py::arg("allow_fp16"))
      .def(
          "step",
          [](GradScaler& self, const std::function<void()>& take_step, const MaybeTensors& grads, uint64_t optimizer) {
            return self.step(take_step, undefined_for_none(grads), optimizer);
          },
          py::arg("take_step"), py::arg("grads"), py::arg("optimizer"))
      .def(
          "update", [](GradScaler& self, std::optional<double> new_scale) { self.update(new_scale); },
          py::arg("new_scale") = std::nullopt)
      .def(
          "update_from", [](GradScaler& self, const at::Tensor& new_scale) { self.update(new_scale); }, py::arg("new_scale"))
      .def("get_scale", &GradScaler::get_scale)
      .def("get_growth_factor", &GradScaler::get_growth_factor)
      .def("get_backoff_factor", &GradScaler::get_backoff_factor)
      .def("get_growth_interval", &GradScaler::get_growth_interval)
      .def("set_growth_factor", &GradScaler::set_growth_factor, py::arg("new_factor"))
      .def("set_backoff_factor", &GradScaler::set_backoff_factor, py::arg("new_factor"))
      .def("set_growth_interval", &GradScaler::set_growth_interval, py::arg("new_interval"))
      .def("is_enabled", &GradScaler::is_enabled)
      .def("abandon_step", &GradScaler::abandon_step)
      .def("state_dict", &state_dict)
      .def("load_state_dict", &load_state_dict, py::arg("state_dict"))
      .def(py::pickle(&to_pickle, &from_pickle));

  py::class_<PagedState>(m, "PagedState",
                         "Moments of `elements` parameters that leave a full GPU for the host: src/train/paged_state.hpp")
      .def(py::init([](const std::vector<at::Tensor>& moments, int64_t elements) {
             return std::make_unique<PagedState>(flat_aliases(moments), elements);
           }),
           py::arg("moments"), py::arg("elements"))
      .def(
          "step",
          [](PagedState& self, const py::function& update) {
            self.step([&](std::vector<at::Tensor>& moments, int64_t begin, int64_t count) {
              update(flat_aliases(moments), begin, count);
            });
          },
          py::arg("update"), "Calls update(moments, begin, count) with moments on the GPU, which it changes in place.")
      .def("tensors", [](PagedState& self) { return flat_aliases(self.tensors()); })
      .def("move_to_host", &PagedState::move_to_host)
      .def_property_readonly("on_host", &PagedState::on_host);

  py::class_<Accumulator>(m, "Accumulator", kAccumulatorDoc)
      .def(py::init([](const std::vector<int64_t>& target_counts, std::optional<std::function<int64_t(int64_t)>> sum_over_ranks) {
             return Accumulator(target_counts, {.sum_over_ranks = sum_over_ranks.value_or(nullptr)});
           }),
           py::arg("target_counts"), py::kw_only(), py::arg("sum_over_ranks") = std::nullopt)
      .def_property_readonly("weight", &Accumulator::weight, "1 / tokens as a float, or 0.0 without targets.")
      .def_property_readonly("tokens", &Accumulator::tokens, "Targets in the window, over all processes.")
      .def("share_of", &Accumulator::share_of, py::arg("loss_sum"),
           "Returns loss_sum / tokens, on the same graph and device, and counts the loss in mean_loss().\n\n"
           "loss_sum: (), floating: a micro-batch's loss, summed over its targets. Does not synchronize.\n\n"
           "Raises ValueError if the loss of every micro-batch of the window is counted already.")
      .def("add", &Accumulator::add, py::arg("loss_sum"),
           "Counts a micro-batch's summed loss in mean_loss(), for a model that scales its gradients by weight itself.\n\n"
           "loss_sum: (), floating, detached here; summed in float64 on its device. Does not synchronize.")
      .def("mean_loss", &Accumulator::mean_loss,
           "Returns the losses / tokens: () float64, 0 without targets.\n\nThis process's share: sum it over all processes. "
           "Does not synchronize. Raises ValueError if the loss of a micro-batch of the window is missing.");
}

}  // namespace qlorapp::python
