// SPDX-License-Identifier: MIT
// The device's rate of f32 fused multiply-adds on registers: the ceiling that other figures are
// shown as a share of. Each invocation runs 8 independent chains (which fit into a CPU's registers,
// too) of `steps` FMAs, a multiple of 8,
//   s = s * factor + addend, s starts at the chain's number,
// and writes the sum of its chains, so that nothing can be left out.
//   sums [invocations] f32
// Dispatch: any number of workgroups. 16 * steps floating-point operations per invocation.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "include/common.glsl"
#include "peak_fma.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint kChains = 8u;

void main() {
    float chain[kChains];
    [[unroll]] for (uint i = 0u; i < kChains; ++i) {
        chain[i] = float(i);
    }
    float factor = push.factor, addend = push.addend;
    for (uint step = 0u; step < push.steps; step += 8u) {
        [[unroll]] for (uint inner = 0u; inner < 8u; ++inner) {
            [[unroll]] for (uint i = 0u; i < kChains; ++i) {
                chain[i] = fma(chain[i], factor, addend);
            }
        }
    }
    float sum = 0.0;
    [[unroll]] for (uint i = 0u; i < kChains; ++i) {
        sum += chain[i];
    }
    push.operands.sums.v[gl_GlobalInvocationID.x] = sum;
}
