// SPDX-License-Identifier: MIT
#pragma once

// A product of two tensors of any library that knows DLPack.

#include <dlpack/dlpack.h>

extern "C" {

/// a times the transpose of b. a: [M, K], b: [N, K], both f32 or both bf16, in host memory or in
/// CUDA's; they are taken over. The result, [M, N], is in the same kind of memory; whoever gets it
/// calls its deleter. Null where it failed: matmul_error() says why, and a and b are still the
/// caller's.
DLManagedTensor* matmul(DLManagedTensor* a, DLManagedTensor* b);

/// Why this thread's last matmul() failed; valid until its next one.
const char* matmul_error();
}
