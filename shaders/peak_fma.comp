// SPDX-License-Identifier: MIT
// The device's rate of f32 fused multiply-adds on registers: the ceiling that other figures are
// shown as a share of. Each invocation runs 16 independent chains of `steps` FMAs,
//   s = s * factor + addend, s starts at the chain's number,
// and writes the sum of its chains, so that nothing can be left out.
//   sums [invocations] f32
// Dispatch: any number of workgroups. 32 * steps floating-point operations per invocation.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "include/common.glsl"
#include "peak_fma.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint kChains = 16u;

void main() {
    float chain[kChains];
    [[unroll]] for (uint i = 0u; i < kChains; ++i) {
        chain[i] = float(i);
    }
    for (uint step = 0u; step < push.steps; ++step) {
        [[unroll]] for (uint i = 0u; i < kChains; ++i) {
            chain[i] = fma(chain[i], push.factor, push.addend);
        }
    }
    float sum = 0.0;
    [[unroll]] for (uint i = 0u; i < kChains; ++i) {
        sum += chain[i];
    }
    push.operands.sums.v[gl_GlobalInvocationID.x] = sum;
}
