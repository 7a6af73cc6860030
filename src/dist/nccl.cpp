// SPDX-License-Identifier: Apache-2.0
#include "dist/nccl.hpp"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#ifdef QLORAPP_HAS_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include "core/check.hpp"

namespace qlorapp {

c10::intrusive_ptr<c10d::Backend> nccl_backend([[maybe_unused]] const MeetingPlace& place, [[maybe_unused]] int64_t rank) {
#ifdef QLORAPP_HAS_NCCL
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = place.timeout();
  const auto store = c10::make_intrusive<c10d::PrefixStore>(place.prefix() + "nccl", place.store());
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, static_cast<int>(rank), static_cast<int>(place.numbers().size()),
                                                     std::move(options));
#else
  throw ValueError(
      "[ranks] this build has no NCCL, which several GPUs need. Build with a CUDA build of torch from PyPI, which brings nccl.h, "
      "or run "
      "with --device cpu.");
#endif
}

}  // namespace qlorapp
