// SPDX-License-Identifier: MIT
#pragma once

// How the kernels of ops::sample are started. The results' bits are the same in every form.

#include <bellows/engine/sampling.hpp>

#include <cstdint>

namespace bellows::ops {

struct SampleForm {
    std::uint32_t chunk_invocations, row_invocations; ///< of a workgroup
    std::uint64_t most_groups;                        ///< fewer than the work: they loop
};

/// What the device does best with.
SampleForm sample_form(const Recording& recording, std::uint64_t vocabulary);
void sample(Recording& recording, const SampleBatch& batch, BufferView workspace,
            const SampleForm& form);

} // namespace bellows::ops
