// SPDX-License-Identifier: MIT

// Reads just enough SPIR-V to find the operand block behind the push constants and the access
// decorations of its operands, and compares them, and the accesses that the code really makes, with
// the manifest.

#include "manifest.hpp"
#include "spirv_flow.hpp"

#include <map>
#include <set>
#include <span>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace shader_bank {
namespace {

using Id = std::uint32_t;

constexpr std::uint32_t kMagic = 0x07230203;
constexpr std::uint32_t kOpTypeStruct = 30, kOpTypePointer = 32, kOpVariable = 59,
                        kOpMemberDecorate = 72;
constexpr std::uint32_t kStoragePushConstant = 9, kStoragePhysicalBuffer = 5349;
constexpr std::uint32_t kNonWritable = 24, kNonReadable = 25;

struct Pointer {
    std::uint32_t storage = 0;
    Id pointee = 0;
};

struct Module {
    std::map<Id, std::vector<Id>> structs;
    std::map<Id, Pointer> pointers;
    std::set<std::pair<Id, std::uint32_t>> non_writable, non_readable; // (struct, member)
    std::vector<Id> push_constant_types;                               // pointer types
};

Module read_module(std::span<const std::uint32_t> words) {
    if (words[0] != kMagic)
        throw std::runtime_error("not SPIR-V of this machine's byte order");
    Module module;
    for (std::size_t at = 5; at < words.size();) {
        const std::uint32_t size = words[at] >> 16, op = words[at] & 0xffff;
        if (size == 0 || at + size > words.size())
            throw std::runtime_error("SPIR-V breaks off inside an instruction");
        const auto operands = words.subspan(at + 1, size - 1);
        if (op == kOpTypeStruct)
            module.structs[operands[0]].assign(operands.begin() + 1, operands.end());
        else if (op == kOpTypePointer)
            module.pointers[operands[0]] = {operands[1], operands[2]};
        else if (op == kOpVariable && operands[2] == kStoragePushConstant)
            module.push_constant_types.push_back(operands[0]);
        else if (op == kOpMemberDecorate && operands[2] == kNonWritable)
            module.non_writable.insert({operands[0], operands[1]});
        else if (op == kOpMemberDecorate && operands[2] == kNonReadable)
            module.non_readable.insert({operands[0], operands[1]});
        at += size;
    }
    return module;
}

// The struct that `pointer_type` points to, with its id.
const std::pair<const Id, std::vector<Id>>& pointed_struct(const Module& module, Id pointer_type,
                                                           std::uint32_t storage,
                                                           std::string_view what) {
    const auto pointer = module.pointers.find(pointer_type);
    if (pointer == module.pointers.end() || pointer->second.storage != storage)
        throw std::runtime_error(std::string(what) +
                                 " is no pointer of the expected storage class");
    const auto found = module.structs.find(pointer->second.pointee);
    if (found == module.structs.end())
        throw std::runtime_error(std::string(what) + " does not point to a block");
    return *found;
}

} // namespace

void check_accesses(const Kernel& kernel, const std::string& variant,
                    const std::vector<std::uint32_t>& spirv) {
    const std::string where = "kernel '" + kernel.name + "', variant '" + variant + "': ";
    try {
        const Module module = read_module(spirv);
        if (module.push_constant_types.size() != 1)
            throw std::runtime_error("expected one push-constant block, found " +
                                     std::to_string(module.push_constant_types.size()));
        const auto& push = pointed_struct(module, module.push_constant_types[0],
                                          kStoragePushConstant, "the push-constant block");
        if (push.second.size() != kernel.push.size() + 1)
            throw std::runtime_error("the push-constant block has " +
                                     std::to_string(push.second.size()) + " members");
        const auto& block = pointed_struct(module, push.second[0], kStoragePhysicalBuffer,
                                           "the first push constant");
        if (block.second.size() != kernel.operands.size())
            throw std::runtime_error("the operand block has " +
                                     std::to_string(block.second.size()) + " members");
        const Accesses accesses = trace_accesses(spirv, block.first, kernel.operands.size());
        for (std::size_t i = 0; i < kernel.operands.size(); ++i) {
            const Operand& operand = kernel.operands[i];
            const std::string what = "operand '" + operand.name + "'";
            const auto& type =
                pointed_struct(module, block.second[i], kStoragePhysicalBuffer, what);
            const bool may_write = !module.non_writable.contains({type.first, 0});
            const bool may_read = !module.non_readable.contains({type.first, 0});
            if (may_write && operand.access == Access::Read)
                throw std::runtime_error("operand '" + operand.name +
                                         "' is declared read but lacks NonWritable");
            if (may_read && operand.access == Access::Write)
                throw std::runtime_error("operand '" + operand.name +
                                         "' is declared write but lacks NonReadable");
            if ((accesses.written >> i & 1) != 0 && operand.access == Access::Read)
                throw std::runtime_error("operand '" + operand.name +
                                         "' is declared read, and a store can reach it");
            if ((accesses.read >> i & 1) != 0 && operand.access == Access::Write)
                throw std::runtime_error("operand '" + operand.name +
                                         "' is declared write, and a load can reach it");
        }
    } catch (const std::exception& error) {
        throw std::runtime_error(where + error.what());
    }
}

} // namespace shader_bank
