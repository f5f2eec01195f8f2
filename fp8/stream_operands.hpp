// SPDX-License-Identifier: MIT
#pragma once

// Which operands the kernels of streamed products take, and how they get them: the same names and
// strides in all of them.

#include "operands.hpp"
#include "slots.hpp"

#include <string>

namespace bellows::fp8 {

/// Codes and scales of a quantised operand.
struct StreamSource {
    const Matrix codes;
    const Scales scales;

    StreamSource(const Operands& operands, const char* name, const Quantized& q)
        : codes(operands.codes((std::string(name) + "'s codes").c_str(), q, true)),
          scales(operands.scales((std::string(name) + "'s scales").c_str(), q, codes)) {
        operands.u32(("the number of words of a matrix of " + std::string(name)).c_str(),
                     2 * codes.rows * codes.stride8);
    }
};

/// A kernel's fields of a quantised A.
template <class K>
struct StreamA {
    BufferView K::* codes;
    std::uint32_t K::* ld;
    std::uint32_t K::* batch;
};

template <class K>
void bind_a(K& kernel, const Operands& operands, const Quantized& q, const StreamA<K>& to) {
    const StreamSource a(operands, "a", q);
    kernel.*to.codes = a.codes.memory;
    kernel.*to.ld = a.codes.stride8 / 2;
    kernel.*to.batch = a.codes.batch8 / 2;
    kernel.a_scales = a.scales.memory;
    kernel.a_scale_ld = a.scales.stride;
    kernel.a_scale_batch = a.scales.batch;
    kernel.a_shift = scale_shift(q);
}

/// B, D, their sizes and the slots.
template <class K>
void bind_others(K& kernel, const Operands& operands, const Product& p) {
    const Extents d = extents_of(p.d);
    const StreamSource b(operands, "b", *p.b.quantized);
    kernel.b_codes = b.codes.memory;
    kernel.b_scales = b.scales.memory;
    kernel.d = p.d.buffer;
    kernel.m = operands.u32("M", d.rows);
    kernel.n = operands.u32("N", d.columns);
    kernel.k = operands.u32("K", extents_of(p.a.values).columns);
    kernel.ldb16 = b.codes.stride8 / 2;
    kernel.b_batch16 = b.codes.batch8 / 2;
    kernel.b_scale_ld = b.scales.stride;
    kernel.b_scale_batch = b.scales.batch;
    const Destination to = operands.destination(p.d);
    kernel.ldd = to.ld;
    kernel.stride_d = to.batch;
    kernel.constants.aligned = to.aligned ? 1 : 0;
    kernel.accumulate = p.accumulate ? 1 : 0;
    kernel.slots = b.codes.memory;
    if (by_slots(p)) {
        if (p.rows->slots.buffer)
            kernel.slots = p.rows->slots.buffer;
        kernel.slots_per_a_row = p.rows->slots_per_a_row;
        kernel.constants.a_by_slot = p.rows->slots_per_a_row != 0 ? 1 : 0;
        kernel.constants.d_by_slot = p.rows->d_by_slot ? 1 : 0;
    }
}

} // namespace bellows::fp8
