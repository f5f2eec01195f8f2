// SPDX-License-Identifier: MIT
// Operand element types of the attention kernels.
#if STORAGE_BF16
#define ELEMENT uint
#else
#define ELEMENT float
#endif
