// SPDX-License-Identifier: MIT
#pragma once

// The embedding table. The contract that all ops share stands in ops.hpp.

#include <bellows/engine/recording.hpp>
#include <bellows/engine/sizes.hpp>
#include <bellows/engine/tensor.hpp>

#include <cstdint>

namespace bellows::ops {

/// embedded[t] = table[ids[t]]. ids: [tokens] u32; table: [vocab, columns] f32 or bf16; embedded:
/// [tokens, columns] of the table's type, or bf16. Ids outside the vocabulary give zeros.
void embedding_forward(Recording& recording, const TensorView& ids, const TensorView& table,
                       const TensorView& embedded);

/// d_table[id] = sum over the tokens of this id, ascending. d_embedded: [tokens, columns] act,
/// d_table: [vocab, columns] f32. ids begin at a multiple of 16 bytes.
void embedding_wgrad(Recording& recording, const TensorView& ids, const TensorView& d_embedded,
                     const TensorView& d_table, bool accumulate, BufferView workspace);

} // namespace bellows::ops
