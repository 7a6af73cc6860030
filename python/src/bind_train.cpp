// SPDX-License-Identifier: Apache-2.0
// GradScaler and Accumulator.
#include "bind.hpp"
#include "qlorapp/train/accumulator.hpp"
#include "qlorapp/train/grad_scaler.hpp"

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

}  // namespace

void bind_train(py::module_& m) {
  py::class_<GradScaler>(m, "GradScaler", "include/qlorapp/train/grad_scaler.hpp")
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
      .def("load_state_dict", &load_state_dict, py::arg("state_dict"));

  py::class_<Accumulator>(m, "Accumulator", "The denominator of a window of micro-batches; include/qlorapp/train/accumulator.hpp.")
      .def(py::init([](const std::vector<int64_t>& target_counts, std::optional<std::function<int64_t(int64_t)>> sum_over_ranks) {
             return Accumulator(target_counts, {.sum_over_ranks = sum_over_ranks.value_or(nullptr)});
           }),
           py::arg("target_counts"), py::kw_only(), py::arg("sum_over_ranks") = std::nullopt)
      .def_property_readonly("weight", &Accumulator::weight, "1 / tokens, or 0 without targets.")
      .def_property_readonly("tokens", &Accumulator::tokens, "Targets in the window.")
      .def("weigh", &Accumulator::weigh, py::arg("loss_sum"), "loss_sum / tokens on the same graph.")
      .def("add", &Accumulator::add, py::arg("loss_sum"), "Notes a micro-batch's summed loss for mean_loss().")
      .def("mean_loss", &Accumulator::mean_loss, "() float64.");
}

}  // namespace qlorapp::python
