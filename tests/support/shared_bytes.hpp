// SPDX-License-Identifier: MIT
#pragma once

// What a kernel declares of workgroup memory, read from its SPIR-V for the constants of a tile, to
// set a host's formula against. No device is needed.

#include <bellows/engine/device.hpp>

#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace bellows::testing {

/// Bytes of all workgroup variables of a module whose specialisation constants have `values`.
/// Knows the types and operations that array sizes are made of; throws where one needs another.
class SharedBytes {
public:
    SharedBytes(std::span<const std::uint32_t> words, std::vector<std::uint32_t> values)
        : values_(std::move(values)) {
        for (std::size_t at = 5; at < words.size(); at += words[at] >> 16)
            visit(words[at] & 0xffff, words.subspan(at + 1, (words[at] >> 16) - 1));
    }
    std::uint64_t bytes = 0;
    int variables = 0;

private:
    using Id = std::uint32_t;
    using Words = std::span<const std::uint32_t>;

    void visit(std::uint32_t op, Words w) {
        switch (op) {
        case 71: // OpDecorate, SpecId
            if (w[1] == 1)
                spec_ids_[w[0]] = w[2];
            break;
        case 21: // OpTypeInt
        case 22: // OpTypeFloat
            sizes_[w[0]] = w[1] / 8;
            break;
        case 23:                       // OpTypeVector
            if (sizes_.contains(w[1])) // not so for vectors of booleans
                sizes_[w[0]] = sizes_.at(w[1]) * w[2];
            break;
        case 28: // OpTypeArray
            if (sizes_.contains(w[1]) && constants_.contains(w[2]))
                sizes_[w[0]] = sizes_.at(w[1]) * constants_.at(w[2]);
            break;
        case 32: // OpTypePointer, Workgroup
            if (w[1] == 4)
                pointees_[w[0]] = w[2];
            break;
        case 41: // OpConstantTrue
        case 42: // OpConstantFalse
            constants_[w[1]] = op == 41;
            break;
        case 43: // OpConstant
            constants_[w[1]] = w[2];
            break;
        case 50: // OpSpecConstant
            constants_[w[1]] = values_.at(spec_ids_.at(w[1]));
            break;
        case 52: // OpSpecConstantOp
            if (known(w))
                evaluate(w);
            break;
        case 59: // OpVariable, Workgroup
            if (w[2] == 4) {
                bytes += sizes_.at(pointees_.at(w[0]));
                ++variables;
            }
            break;
        default:
            break;
        }
    }
    bool known(Words w) const {
        for (std::size_t i = 3; i < w.size(); ++i)
            if (!constants_.contains(w[i]))
                return false;
        return true;
    }
    void evaluate(Words w) {
        const auto x = [&](std::size_t i) { return constants_.at(w[3 + i]); };
        std::uint32_t& result = constants_[w[1]];
        switch (w[2]) {
        case 128: // OpIAdd
            result = x(0) + x(1);
            break;
        case 132: // OpIMul
            result = x(0) * x(1);
            break;
        case 134: // OpUDiv
            result = x(0) / x(1);
            break;
        case 169: // OpSelect
            result = x(0) ? x(1) : x(2);
            break;
        case 171: // OpINotEqual
            result = x(0) != x(1);
            break;
        case 172: // OpUGreaterThan
            result = x(0) > x(1);
            break;
        default:
            constants_.erase(w[1]);
        }
    }

    std::vector<std::uint32_t> values_;
    std::map<Id, std::uint32_t> spec_ids_, constants_;
    std::map<Id, std::uint64_t> sizes_;
    std::map<Id, Id> pointees_;
};

inline DeviceInfo device_of(std::uint32_t subgroup_size, std::uint32_t shared_memory_bytes) {
    DeviceInfo info;
    info.is_cpu = subgroup_size == 8;
    info.subgroup_size = subgroup_size;
    info.shared_memory_bytes = shared_memory_bytes;
    info.max_workgroup_invocations = 1024;
    return info;
}

} // namespace bellows::testing
