// SPDX-License-Identifier: Apache-2.0
// Plays a script of GradScaler calls from standard input and prints what each did: "<outcome> <scale> <growth tracker>".
// tests/python/test_grad_scaler.py plays the same script to torch.amp.GradScaler and compares the lines.
#include <cinttypes>
#include <cstdio>
#include <iostream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "core/check.hpp"
#include "qlorapp/train/grad_scaler.hpp"

namespace {

using qlorapp::GradScaler;

/// f finite, i infinite, n NaN, b infinite in a second tensor of bf16, u an undefined one beside a finite one, e none, h fp16.
std::vector<at::Tensor> gradients(char kind) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  switch (kind) {
    case 'f':
      return {at::tensor({1.5F, -3.0F})};
    case 'i':
      return {at::tensor({1.5F, kInf})};
    case 'n':
      return {at::tensor({std::numeric_limits<float>::quiet_NaN(), 1.0F})};
    case 'b':
      return {at::tensor({1.0F}), at::tensor({-kInf}).to(at::kBFloat16)};
    case 'u':
      return {at::Tensor(), at::tensor({0.1F})};
    case 'h':
      return {at::tensor({1.0F}).to(at::kHalf)};
    default:
      return {};
  }
}

std::string number(double value) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%.17g", value);
  return buffer;
}

std::string play(std::istringstream& words, const std::string& verb, GradScaler& scaler, std::optional<GradScaler::State>& saved) {
  if (verb == "scale") return number(scaler.scale(at::tensor(0.5F).squeeze()).item<double>());
  if (verb == "unscale" || verb == "step") {
    uint64_t optimizer = 0;
    char kind = 'f';
    words >> optimizer >> kind;
    const std::vector<at::Tensor> grads = gradients(kind);
    if (verb == "step") return scaler.step([] {}, grads, optimizer) ? "stepped" : "skipped";
    scaler.unscale_(grads, optimizer);
    return grads.empty() || !grads.back().defined() ? "none" : number(grads.back()[0].item<double>());
  }
  if (verb == "update") return scaler.update(), "ok";
  if (verb == "save") return saved = scaler.state_dict(), "ok";
  if (verb == "load") return scaler.load_state_dict(saved), "ok";
  if (verb == "load_empty") return scaler.load_state_dict(std::nullopt), "ok";
  double value = 0;
  words >> value;
  if (verb == "set") return scaler.update(value), "ok";
  if (verb == "set_tensor") return scaler.update(at::full({}, value)), "ok";
  if (verb == "growth") return scaler.set_growth_factor(value), "ok";
  if (verb == "backoff") return scaler.set_backoff_factor(value), "ok";
  if (verb == "interval") return scaler.set_growth_interval(static_cast<int64_t>(value)), "ok";
  return "unknown verb " + verb;
}

}  // namespace

int main() {
  std::ios::sync_with_stdio(false);
  at::set_num_threads(1);
  std::optional<GradScaler> scaler;
  std::optional<GradScaler::State> saved;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    std::string outcome;
    try {
      if (verb == "new") {
        GradScaler::Options options;
        options.device = at::kCPU;
        words >> options.init_scale >> options.growth_factor >> options.backoff_factor >> options.growth_interval >>
            options.enabled;
        saved.reset();
        scaler.reset();
        scaler.emplace(options);
        outcome = "ok";
      } else if (!scaler) {
        outcome = "no scaler";
      } else {
        outcome = play(words, verb, *scaler, saved);
      }
    } catch (const qlorapp::GradScalerAssertion& error) {
      outcome = std::string("AssertionError ") + error.what();
    } catch (const qlorapp::GradScalerOrder& error) {
      outcome = std::string("RuntimeError ") + error.what();
    } catch (const qlorapp::ValueError& error) { outcome = std::string("ValueError ") + error.what(); }
    if (!scaler) {
      std::cout << outcome << " - -\n";
      continue;
    }
    const auto state = scaler->state_dict();
    std::cout << outcome << ' ' << number(scaler->get_scale()) << ' ' << (state ? state->growth_tracker : 0) << '\n';
  }
  return 0;
}
