// SPDX-License-Identifier: MIT
// The two products that causal attention is made of, without a score matrix in memory. An
// invocation owns `per_invocation` columns (queries, or keys in the key pass) of one head; a block
// of kBlock rows (keys, or queries) is the same for a whole workgroup, so its loads are uniform:
//   dot_block    block[b][c]  = sum over d of row_b[d] * column_c[d]     (d ascending)
//   outer_block  sum[d][c]   += row_b[d] * weight[b][c]                  (b ascending)
// No shared memory, no barrier. Storage is f32, or bf16 with STORAGE_BF16 = 1.
// The kernel declares the constants: local_size, aligned, share_rows, per_invocation, parts.
#ifndef BELLOWS_ATTENTION_TILE_GLSL
#define BELLOWS_ATTENTION_TILE_GLSL

#include "storage.glsl"

const uint kBlock = 8u;
const float kLog2E = 1.4426950408889634;
const float kLn2 = 0.6931471805599453;
const float kLowest = -3.0e38;

#if STORAGE_BF16
#define LOG2_BYTES 1u
vec4 load4(uvec2 base, uint index) {
    return bf16_unpack(ReadUvec2(base).v[index >> 2]);
}
float load1(uvec2 base, uint index) {
    return bf16_load(base, index);
}
void store4(uvec2 base, uint index, vec4 x) {
    WriteUvec2(base).v[index >> 2] = bf16_pack(x);
}
// The first `count` (1..4) of four elements, index even; the rest stays as it was.
void store_part(uvec2 base, uint index, vec4 x, uint count) {
    uvec2 packed = bf16_pack(x);
    uint word = index >> 1;
    uint keep = 0xFFFF0000u;
    WriteUint(base).v[word] =
        count > 1u ? packed.x : (packed.x & ~keep) | (WriteUint(base).v[word] & keep);
    if (count > 2u) {
        ++word;
        WriteUint(base).v[word] =
            count > 3u ? packed.y : (packed.y & ~keep) | (WriteUint(base).v[word] & keep);
    }
}
#else
#define LOG2_BYTES 2u
vec4 load4(uvec2 base, uint index) {
    return ReadVec4(base).v[index >> 2];
}
float load1(uvec2 base, uint index) {
    return ReadFloat(base).v[index];
}
void store4(uvec2 base, uint index, vec4 x) {
    WriteVec4(base).v[index >> 2] = x;
}
void store_part(uvec2 base, uint index, vec4 x, uint count) {
    [[unroll]] for (uint e = 0u; e < 4u; ++e) {
        if (e < count) {
            WriteFloat(base).v[index + e] = x[e];
        }
    }
}
#endif

// One head of one sequence of a tensor [tokens, heads, dim] with strides in elements.
struct HeadView {
    uvec2 base;        // address of the sequence's first token, this head
    uint token_stride; // elements from token to token
    uint dim;
};

HeadView head_view(uvec2 tensor, uint sequence, uint length, uint head, uint token_stride,
                   uint head_stride, uint dim) {
    uvec2 base = address_add(tensor, sequence * length, token_stride, LOG2_BYTES);
    return HeadView(address_add(base, head, head_stride, LOG2_BYTES), token_stride, dim);
}

// Elements d .. d+3 of a token; beyond dim they are 0.
vec4 load_quad(HeadView view, uint token, uint d) {
    uint index = token * view.token_stride + d;
    if (aligned != 0u) {
        return load4(view.base, index);
    }
    vec4 x;
    [[unroll]] for (uint e = 0u; e < 4u; ++e) {
        float value = load1(view.base, token * view.token_stride + min(d + e, view.dim - 1u));
        x[e] = d + e < view.dim ? value : 0.0;
    }
    return x;
}

void store_quad(HeadView view, uint token, uint d, vec4 x) {
    uint index = token * view.token_stride + d;
    if (aligned != 0u) {
        store4(view.base, index, x);
    } else {
        store_part(view.base, index, x, min(view.dim - d, 4u));
    }
}

// The quads d .. d+3 of the block's rows first .. first + kBlock - 1, clamped to the last token.
// With share_rows each of eight invocations loads one row and passes it round.
void load_rows(HeadView view, uint first, uint last, uint d, out vec4 rows[kBlock]) {
    if (share_rows != 0u) {
        vec4 mine = load_quad(view, min(first + gl_LocalInvocationIndex % kBlock, last), d);
        [[unroll]] for (uint b = 0u; b < kBlock; ++b) {
            rows[b] = subgroupBroadcast(mine, b);
        }
    } else {
        [[unroll]] for (uint b = 0u; b < kBlock; ++b) {
            rows[b] = load_quad(view, min(first + b, last), d);
        }
    }
}

#define BLOCK_SIZE (kBlock * per_invocation)

// Products are macros because GLSL tells array types by the expression of their size. `block` is an
// array of [kBlock][per_invocation]. Loops test at their end, see gemm_tile.glsl.
#define DOT_BLOCK(rows_of, first, last, columns_of, column, block)                                 \
    {                                                                                              \
        [[unroll]] for (uint i_ = 0u; i_ < BLOCK_SIZE; ++i_) {                                     \
            block[i_] = 0.0;                                                                       \
        }                                                                                          \
        uint d_ = 0u;                                                                              \
        do {                                                                                       \
            vec4 rows_[kBlock];                                                                    \
            load_rows(rows_of, first, last, d_, rows_);                                            \
            [[unroll]] for (uint c_ = 0u; c_ < per_invocation; ++c_) {                             \
                vec4 x_ = load_quad(columns_of, column[c_], d_);                                   \
                [[unroll]] for (uint b_ = 0u; b_ < kBlock; ++b_) {                                 \
                    uint i_ = b_ * per_invocation + c_;                                            \
                    [[unroll]] for (uint e_ = 0u; e_ < 4u; ++e_) {                                 \
                        block[i_] = fma(rows_[b_][e_], x_[e_], block[i_]);                         \
                    }                                                                              \
                }                                                                                  \
            }                                                                                      \
            d_ += 4u;                                                                              \
        } while (d_ < rows_of.dim);                                                                \
    }

// An invocation sums one of `parts` parts of a head's outputs, begin .. begin + PART(dim) - 1, and
// the workgroups of the other parts compute the same weights again: wide heads would need more
// registers than there are. What lies beyond dim repeats the last quad and is never stored.
#define PART(dim) ((dim + 4u * parts - 1u) / (4u * parts) * 4u)

// `sum` is an array of [PART(dim)][per_invocation].
#define OUTER_BLOCK(rows_of, first, last, begin, dim_, weight, sum)                                \
    [[unroll]] for (uint d_ = 0u; d_ < PART(dim_); d_ += 4u) {                                     \
        vec4 rows_[kBlock];                                                                        \
        load_rows(rows_of, first, last, min(begin + d_, (dim_ - 1u) / 4u * 4u), rows_);            \
        [[unroll]] for (uint b_ = 0u; b_ < kBlock; ++b_) {                                         \
            [[unroll]] for (uint e_ = 0u; e_ < 4u; ++e_) {                                         \
                [[unroll]] for (uint c_ = 0u; c_ < per_invocation; ++c_) {                         \
                    uint i_ = (d_ + e_) * per_invocation + c_;                                     \
                    sum[i_] = fma(rows_[b_][e_], weight[b_ * per_invocation + c_], sum[i_]);       \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

// Stores factor * sum for the columns below `tokens`.
#define STORE_COLUMNS(view, begin, dim_, column, tokens, factor, sum)                              \
    [[unroll]] for (uint c_ = 0u; c_ < per_invocation; ++c_) {                                     \
        if (column[c_] < tokens) {                                                                 \
            [[unroll]] for (uint d_ = 0u; d_ < PART(dim_); d_ += 4u) {                             \
                vec4 x_;                                                                           \
                [[unroll]] for (uint e_ = 0u; e_ < 4u; ++e_) {                                     \
                    x_[e_] = factor * sum[(d_ + e_) * per_invocation + c_];                        \
                }                                                                                  \
                if (begin + d_ < dim_) {                                                           \
                    store_quad(view, column[c_], begin + d_, x_);                                  \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

#endif
