// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "qlorapp/memory/budget.hpp"
#include "qlorapp/memory/plan_report.hpp"
#include "report_text.hpp"

namespace qlorapp {

using namespace report;

namespace {

/// One of the ways that are compared, worked out.
struct Compared {
  Contender contender;
  PlanSettings settings;
  MemoryPlan plan;
  StepTime time;
  Bytes room;

  [[nodiscard]] int64_t rows() const { return settings.batch * settings.accumulation; }
  [[nodiscard]] double step() const { return time.micro_batch() * static_cast<double>(settings.accumulation) + time.optimizer; }
  [[nodiscard]] double seconds_a_row() const { return step() / static_cast<double>(rows()); }
  [[nodiscard]] std::string name() const {
    return message("{}, {} x {}", name_of(contender.gpu), contender.batch, contender.accumulation);
  }
};

Compared compared(const PlanSettings& settings, const Contender& contender, const DeviceAllowance& allowance) {
  Compared result{contender, settings, {}, {}, room_on(contender.gpu, allowance)};
  result.settings.batch = contender.batch;
  result.settings.accumulation = contender.accumulation;
  result.settings.device = contender.gpu.device();
  if (settings.compute_dtype == at::kBFloat16 && !contender.gpu.has_bf16()) result.settings.compute_dtype = at::kHalf;
  result.plan = plan_memory_in(result.settings, result.room);
  result.time = step_time(result.settings, contender.gpu, static_cast<double>(settings.length));
  return result;
}

std::string speed_text(const Compared& fast, const Compared& slow) {
  const Gpu &a = fast.contender.gpu, &b = slow.contender.gpu;
  const double factor = slow.seconds_a_row() / fast.seconds_a_row();
  if (a.name == b.name && a.tensor_rate == b.tensor_rate && a.bandwidth == b.bandwidth) {
    return message(
        "Speed: {} is faster by an estimated {} %. Both use the same card and compute the same products over the same tokens. A "
        "larger batch dequantizes the weights less often.\n",
        fast.name(), fixed(100 * (factor - 1), 1));
  }
  return message(
      "Speed: {} is faster by a factor of about {}. This comes from the cards, not the batch: both compute the same products over "
      "the same tokens, and the tensor rate bounds a step ({} against {} TFLOP/s sustained, of {} and {} published).{}",
      fast.name(), fixed(factor, 1), fixed(a.tensor_rate * a.sustained * 1e-12, 0), fixed(b.tensor_rate * b.sustained * 1e-12, 0),
      fixed(a.tensor_rate * 1e-12, 0), fixed(b.tensor_rate * 1e-12, 0),
      fast.contender.batch != slow.contender.batch ? " The larger batch only dequantizes the weights less often.\n" : "\n");
}

std::string memory_difference(const Compared& most, const Compared& least) {
  const Bytes base = parts_of(least.plan.of(least.plan.fullest_of_training()).parts,
                              {MemoryUse::kCodes, MemoryUse::kScales, MemoryUse::kDense, MemoryUse::kAdapters,
                               MemoryUse::kGradients, MemoryUse::kOptimizer});
  const Bytes more = most.plan.peak_reserved() - least.plan.peak_reserved();
  std::string text = message("Memory: {} needs {}, {} needs {}. ", most.name(), gib(most.plan.peak_reserved()), least.name(),
                             gib(least.plan.peak_reserved()));
  text += more.count == 0 ? std::string("There is no difference. ")
          : most.contender.batch == least.contender.batch
              ? message("The difference, {}, comes from the cards' kernels. ", gib(more))
              : message("The difference, {}, is activations and logits of more rows at a time. ", gib(more));
  return text + message("Base, adapters and optimizer are {} in both. Accumulation itself needs no memory.\n", gib(base));
}

/// The fastest way to the same update on each card, and what it gains.
std::string chosen_text(const std::vector<Compared>& all, std::optional<Bytes> budget) {
  Table table;
  table.row({"card", "chosen", "reserved", "optimizer step", "gain"});
  const Compared* fastest = nullptr;
  double least = 0;
  std::string way;
  for (const Compared& one : all) {
    const Bytes room = budget ? std::min(*budget, one.room) : one.room;
    try {
      const BudgetChoice choice = fit_budget(one.settings, one.contender.gpu, {room, one.rows(), 0, "compare"});
      table.row({name_of(one.contender.gpu), choice.way, gib(choice.plan.peak_reserved()), duration(choice.seconds),
                 message("{} %", fixed(100 * (one.step() / choice.seconds - 1), 0))});
      const double seconds = choice.seconds / static_cast<double>(one.rows());
      if (fastest == nullptr || seconds < least) {
        fastest = &one;
        least = seconds;
        way = choice.way;
      }
    } catch (const ValueError&) { table.row({name_of(one.contender.gpu), message("nothing fits {}", gib(room)), "-", "-", "-"}); }
  }
  return message("The same rows per update, with the settings that memory_budget chooses{}:\n\n{}{}\n",
                 budget ? message(" in {}", gib(*budget)) : std::string(), table.text(),
                 fastest == nullptr ? std::string() : message("  Recommended: {}, {}.\n", name_of(fastest->contender.gpu), way));
}

}  // namespace

std::string compare(const PlanSettings& settings, const std::vector<Contender>& contenders, const DeviceAllowance& allowance,
                    std::optional<Bytes> budget) {
  QLORAPP_CHECK_VALUE(contenders.size() >= 2, "[compare] needs at least two of GPU:BATCHxACCUMULATION; got {}.", contenders.size());
  Table table;
  table.row({"card", "effective batch", "reserved", "of", "fits", "micro-batch", "optimizer step", "tokens/s", "computes in",
             "time estimate"});
  std::vector<Compared> all;
  for (const Contender& contender : contenders) {
    const Compared& one = all.emplace_back(compared(settings, contender, allowance));
    table.row({one.name(), message("{}", one.rows()), gib(one.plan.peak_reserved()), gib(one.room), one.plan.fits ? "yes" : "no",
               duration(one.time.micro_batch()), duration(one.step()),
               fixed(static_cast<double>(one.rows() * settings.length) / one.step(), 0), dtype_name(one.settings.compute_dtype),
               evidence_text(one.time.evidence)});
  }
  const auto [fast, slow] = std::minmax_element(
      all.begin(), all.end(), [](const Compared& a, const Compared& b) { return a.seconds_a_row() < b.seconds_a_row(); });
  const auto [least, most] = std::minmax_element(
      all.begin(), all.end(), [](const Compared& a, const Compared& b) { return a.plan.peak_reserved() < b.plan.peak_reserved(); });
  std::string text = message("As requested:\n\n{}\n{}As requested, in words:\n", table.text(), chosen_text(all, budget)) +
                     speed_text(*fast, *slow) + memory_difference(*most, *least);
  for (const Compared& one : all) {
    if (!one.plan.fits)
      text += message("Does not fit: {}, by {}. A smaller batch with proportionally more accumulation computes the same update.\n",
                      one.name(), gib(one.plan.peak_reserved() - one.room));
  }
  const bool same = std::all_of(all.begin(), all.end(), [&](const Compared& one) { return one.rows() == all.front().rows(); });
  text +=
      same ? message(
                 "Quality: the same. Each update sums the gradients of {} rows, weighted by their target tokens; only the order of "
                 "summation differs. (Older trainers average the means of micro-batches, which differ on rows of unequal length.)",
                 all.front().rows())
           : "Quality: the effective batches differ, so the runs are not equivalent. Scale the learning rate, or make the batches "
             "equal.";
  if (fast->settings.compute_dtype != slow->settings.compute_dtype) {
    const Gpu& old = fast->contender.gpu.has_bf16() ? slow->contender.gpu : fast->contender.gpu;
    text += message(
        " One difference remains: {} has no bfloat16. It computes in float16 with loss scaling, which occasionally skips a step.",
        name_of(old));
  }
  return text + "\n";
}

}  // namespace qlorapp
