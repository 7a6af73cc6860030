// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/gpu_table.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <vector>

#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "ops/device_memory.hpp"

namespace qlorapp {
namespace {

using namespace literals;

constexpr double kGiga = 1e9, kTera = 1e12;
/// Of 989 TFLOP/s a step on an H200 sustains about 665 under its power limit.
constexpr double kMeasuredPart = 0.67;

/// Of an unknown card: as many as the largest known has.
constexpr int64_t kMostMultiprocessors = 170;

constexpr Gpu card(std::string_view name, Bytes memory, int64_t architecture, int64_t multiprocessors, double gigabytes,
                   double teraflops, double float32_teraflops, double sustained = kMeasuredPart,
                   Evidence evidence = Evidence::kExtrapolated) {
  return {name,      memory,   architecture,    gigabytes * kGiga,        teraflops * kTera,
          sustained, evidence, multiprocessors, float32_teraflops * kTera};
}

/// Of memory, the source: what torch printed there as "total capacity" or total_memory, both of which are CUDA's.
constexpr std::array<Gpu, 14> kGpus{
    // 14.56 GiB: facebookresearch/tribev2#28; 14.74: zai-org/CogVideo#741.
    card("T4", 14909_MiB, 75, 40, 320, 65, 8.1, 24.0 / 65.0, Evidence::kReported),
    // total_memory=11931MB, in logs of torch 2.4; 11,938 to 12,044 under other drivers.
    card("RTX 3060", 11931_MiB, 86, 28, 360, 25.3, 12.7),
    // 23.68 GiB and total_memory=24259MB: the smaller one.
    card("RTX 3090", 24248_MiB, 86, 82, 936, 71, 35.6),
    // 23.52 GiB: Soul-AILab/SoulX-FlashTalk#5; 23.61: pinokiofactory/flux-webui#11; 23.68: zai-org/CogVideo#36.
    card("RTX 4090", 24084_MiB, 89, 128, 1008, 165, 82.6),
    // total_memory=32109MB: huggingface.co/datasets/dnakov/consumer-mamf; 31.37 GiB: Wan-Video/Wan2.1#465.
    card("RTX 5090", 32109_MiB, 120, 170, 1792, 209.5, 104.8),
    // An A10G's, as nvidia-smi lists the same 23,028 MiB for both (modal-labs/modal-client#2797).
    card("A10", 22587_MiB, 86, 72, 600, 125, 31.2, 60.0 / 125.0, Evidence::kReported),
    // total_memory=22587MB; 22.06 GiB.
    card("A10G", 22587_MiB, 86, 80, 600, 70, 35),
    // 22.03 GiB: ArcInstitute/evo2#190.
    card("L4", 22558_MiB, 89, 58, 300, 121, 30.3),
    // 44.40 GiB: QwenLM/Qwen3-VL#2097, an L40, of which nvidia-smi lists the same 46,068 MiB; 44.52 under an older driver.
    card("L40S", 45465_MiB, 89, 142, 864, 362, 91.6),
    // 39.50 GiB: TianheWu/CoSeR#10.
    card("A100-40GB", 40448_MiB, 80, 108, 1555, 312, 19.5),
    // 79.25 GiB: levihsu/OOTDiffusion#235.
    card("A100-80GB", 81152_MiB, 80, 108, 2039, 312, 19.5),
    // total_memory=81082MB, in a log of torch 2.0.
    card("H100", 81082_MiB, 90, 132, 3350, 989, 67),
    // 139.72 GiB, and 139.80 under other drivers.
    card("H200", 143073_MiB, 90, 132, 4800, 989, 67, kMeasuredPart, Evidence::kMeasured),
    // 178.35 GiB.
    card("B200", 182630_MiB, 100, 148, 8000, 2250, 75),
};

/// Letters and digits alone, in lower case.
std::string folded(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) result += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return result;
}

std::vector<std::string> words(std::string_view name) {
  std::vector<std::string> result{""};
  for (const char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0)
      result.back() += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    else if (!result.back().empty()) result.emplace_back();
  }
  return result;
}

/// The card of the table all of whose words are in a driver's name for it ("NVIDIA A100-SXM4-80GB"); null: none.
const Gpu* named_in(std::string_view text) {
  const std::vector<std::string> there = words(text);
  const Gpu* found = nullptr;
  for (const Gpu& gpu : kGpus) {
    const std::vector<std::string> wanted = words(gpu.name);
    const bool all = std::all_of(wanted.begin(), wanted.end(), [&](const std::string& word) {
      return std::find(there.begin(), there.end(), word) != there.end();
    });
    if (all && (found == nullptr || gpu.name.size() > found->name.size())) found = &gpu;
  }
  return found;
}

}  // namespace

std::string_view to_string(Evidence evidence) {
  return evidence == Evidence::kMeasured   ? "measured on this card"
         : evidence == Evidence::kReported ? "from reported rates"
                                           : "extrapolated";
}

double uncertainty(Evidence evidence) {
  return evidence == Evidence::kMeasured ? 0.15 : evidence == Evidence::kReported ? 0.30 : 0.40;
}

Bytes Gpu::context() const { return evidence == Evidence::kMeasured ? 801_MiB : 512_MiB; }

double Gpu::peer_rate() const { return architecture == 90 ? 200e9 : host_rate(); }

double Gpu::host_rate() const {
  // Generation 3, 4 and 5: the share of 64 GB/s that was measured on an H100 (benchmarks/base_on_host_cuda.py: 54 GB/s), of 16, 32 and 64.
  return architecture < 80 ? 13.5e9 : architecture < 90 ? 27e9 : 54e9;
}

ops::PlannedDevice Gpu::device() const { return {at::kCUDA, architecture, 1, multiprocessors, ops::uses_expandable_segments()}; }

Gpu find_gpu(std::string_view text, int64_t architecture, double bandwidth, double tensor_rate) {
  const std::string wanted = folded(text);
  std::vector<std::string_view> names;
  for (const Gpu& gpu : kGpus) {
    if (folded(gpu.name) == wanted) return gpu;
    names.push_back(gpu.name);
  }
  if (const Gpu* const found = named_in(text); found != nullptr) return *found;
  std::string sizes;  // a name that stands for several
  for (const std::string_view name : names) {
    if (!wanted.empty() && folded(name).starts_with(wanted) &&
        std::isdigit(static_cast<unsigned char>(folded(name)[wanted.size()])) != 0)
      sizes += message("{}{}", sizes.empty() ? " Which one: " : ", ", name);
  }
  const bool amount = !text.empty() && (std::isdigit(static_cast<unsigned char>(text.front())) != 0 || text.front() == '-');
  QLORAPP_CHECK_VALUE(amount, "[gpu] must be one of {}, or an amount of memory such as 16GiB; got '{}'.{}", joined(names), text,
                      sizes.empty() ? did_you_mean(text, names) : sizes + "?");
  QLORAPP_CHECK_VALUE(architecture == 0 || (architecture >= 75 && architecture <= 200),
                      "[gpu_architecture] must be from 75 to 200, such as 86; got {}.", architecture);
  const auto rate = [](const char* name, double value, double unit) {
    QLORAPP_CHECK_VALUE(std::isfinite(value) && value >= 0, "[{}] must be finite and >= 0; got {}.", name, value / unit);
  };
  rate("gpu_bandwidth", bandwidth, kGiga);
  rate("gpu_tflops", tensor_rate, kTera);
  const Bytes memory = parse_bytes("gpu", text);
  QLORAPP_CHECK_VALUE(memory.count > 0, "[gpu] its memory must be above 0; got '{}'.", text);
  return {"",
          memory,
          architecture == 0 ? 80 : architecture,
          bandwidth,
          tensor_rate,
          kMeasuredPart,
          Evidence::kExtrapolated,
          kMostMultiprocessors};
}

Gpu rates_of(std::string_view name, int64_t architecture, Bytes memory) {
  if (name.empty()) return {"", memory, 0, 20 * kGiga, 0.3 * kTera, 1.0, Evidence::kExtrapolated};
  const Gpu* const found = named_in(name);
  if (found != nullptr) return *found;
  // The first is the smallest of its architecture.
  const auto* const same =
      std::find_if(kGpus.begin(), kGpus.end(), [&](const Gpu& gpu) { return gpu.architecture == architecture; });
  Gpu other = same != kGpus.end() ? *same : kGpus.back();
  other.name = "";
  other.memory = memory;
  other.multiprocessors = kMostMultiprocessors;
  other.evidence = Evidence::kExtrapolated;
  return other;
}

Bytes parse_bytes(std::string_view what, std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string_view unit = text.substr(static_cast<size_t>(end - text.data()));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  double scale = 0;
  for (const auto& [name, value] : {std::pair{std::string_view(""), 1.0},
                                    {"B", 1.0},
                                    {"KiB", 0x1p10},
                                    {"K", 0x1p10},
                                    {"KB", 1e3},
                                    {"MiB", 0x1p20},
                                    {"M", 0x1p20},
                                    {"MB", 1e6},
                                    {"GiB", 0x1p30},
                                    {"G", 0x1p30},
                                    {"GB", 1e9},
                                    {"TiB", 0x1p40},
                                    {"T", 0x1p40},
                                    {"TB", 1e12}}) {
    if (name.empty() ? unit.empty() : folded(unit) == folded(name)) scale = value;
  }
  QLORAPP_CHECK_VALUE(error == std::errc{} && scale > 0,
                      "[{}] must be an amount of memory such as 14GiB, 14.5GB or 800MiB; got '{}'.", what, text);
  QLORAPP_CHECK_VALUE(number >= 0 && number * scale < 0x1p62, "[{}] must be from 0 to 2^62 bytes; got '{}'.", what, text);
  return {static_cast<int64_t>(number * scale)};
}

}  // namespace qlorapp
