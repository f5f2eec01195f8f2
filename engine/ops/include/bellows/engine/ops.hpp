// SPDX-License-Identifier: MIT
#pragma once

// The dense tensor ops, a header for each family. Each op checks its tensors, chooses a kernel
// variant and records one or a few dispatches. Nothing runs before the recording is submitted. The
// thread that owns the recording calls them.
//
// Common to all: "act" is the storage of activations, f32 or bf16, the same for all tensors of a
// call that are marked so; sums and arithmetic are f32. The last dimension of a tensor has stride
// 1; tensors are contiguous unless "strided" is said, where outer strides are free. Rows (columns,
// heads' sizes, row strides) are multiples of 4 elements and begin at addresses that are multiples
// of 4 elements. A default-constructed view stands for an optional tensor left out. Where
// a tensor's `row_count` is named, only that many of its rows exist, and the others are neither
// read nor written. Results do not depend on timing, the grid or the subgroup size; no float is
// added atomically. Every function throws Error{InvalidArgument} with names and shapes when
// tensors do not fit together, Error{Unsupported} when the device cannot run it.
//
// "accumulate": false overwrites the result, true adds to it.

#include <bellows/engine/attention.hpp>
#include <bellows/engine/elementwise.hpp>
#include <bellows/engine/embedding.hpp>
#include <bellows/engine/gemm.hpp>
#include <bellows/engine/loss.hpp>
#include <bellows/engine/moe.hpp>
#include <bellows/engine/norm.hpp>
#include <bellows/engine/optimizer.hpp>
#include <bellows/engine/router.hpp>
