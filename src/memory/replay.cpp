// SPDX-License-Identifier: Apache-2.0
#include "replay.hpp"

#include <algorithm>

#include "memory/caching_allocator.hpp"

namespace qlorapp {
namespace {

/// Of expandable segments, below a cap: steps of 8B on H100 and H200 held 20 to 60 MiB more than their replay, and 24 rows that the replay got
/// into 24 GiB with 160 MiB to spare ran out of memory in one step of twenty (benchmarks/reserved_memory_cuda.py). Streams beside
/// the main one have pages of their own, and later steps find other holes than the one that is replayed.
constexpr Bytes unseen_pages(Bytes room) { return {(int64_t{64} << 20) + room.count / 100}; }

/// Parts that change by little need not all be drawn.
constexpr size_t kMostPoints = 240;

}  // namespace

MemoryPlan replay(const ops::MemoryTape& tape, size_t loaded_events, size_t events, const ops::PlannedDevice& device,
                  std::optional<Bytes> room) {
  using ops::MemoryTape;
  MemoryPlan plan;
  const bool rounds = device.type == at::kCUDA;
  const auto segments = device.expandable_segments ? CachingAllocator::Segments::kExpandable : CachingAllocator::Segments::kFixed;
  int64_t limit = CachingAllocator::kNoLimit;
  if (room) limit = room->count - (device.expandable_segments ? unseen_pages(*room).count : 0);
  CachingAllocator allocator(limit, segments);
  MemoryParts parts{};
  Bytes tensors;
  // The timeline is cut into stretches of equal numbers of events; of each its fullest moment is kept.
  const size_t stretch = std::max<size_t>(1, (events - loaded_events) / kMostPoints);
  Bytes fullest_of_stretch;
  for (size_t i = 0; i < events; ++i) {
    const MemoryTape::Event& event = tape.events()[i];
    const MemoryTape::Allocation& allocation = tape.allocations()[static_cast<size_t>(event.allocation)];
    const Bytes change{event.begins ? allocation.bytes : -allocation.bytes};
    parts[static_cast<size_t>(allocation.use)] += change;
    tensors += change;
    if (rounds && event.begins && !allocator.request(event.allocation, allocation.bytes)) plan.fits = false;
    if (!plan.fits) break;
    if (rounds && !event.begins) allocator.release(event.allocation);
    if (!rounds && room && tensors > *room) {
      plan.fits = false;
      break;
    }
    PhasePlan& phase = plan.phases[static_cast<size_t>(event.phase)];
    const Bytes allocated = rounds ? Bytes{allocator.allocated()} : tensors,
                reserved = rounds ? Bytes{allocator.reserved()} : tensors;
    if (!phase.planned || allocated > phase.allocated) {
      phase.allocated = allocated;
      phase.tensors = tensors;
      phase.parts = parts;
    }
    phase.reserved = std::max(phase.reserved, reserved);
    phase.planned = true;
    if (i < loaded_events) continue;
    const bool begins = (i - loaded_events) % stretch == 0 || plan.timeline.empty() || plan.timeline.back().phase != event.phase;
    if (begins) {
      plan.timeline.push_back({event.phase, parts});
      fullest_of_stretch = tensors;
    } else if (tensors > fullest_of_stretch) {
      plan.timeline.back().parts = parts;
      fullest_of_stretch = tensors;
    }
  }
  return plan;
}

}  // namespace qlorapp
