// SPDX-License-Identifier: Apache-2.0
/// Backward passes under torch.autocast. Ours choose their dtypes themselves, and autograd runs them in the caller's mode.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace qlorapp::ops {

/// While it lives, autocast changes no operator of this thread, on any device.
class NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::autocast_dispatch_keyset};
};

}  // namespace qlorapp::ops
