// SPDX-License-Identifier: MIT
#pragma once

// The shader manifest as data. Reading it checks everything that can be checked without compiling;
// a mistake is a std::runtime_error that names the kernel.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace shader_bank {

enum class Access { Read, Write, ReadWrite };

struct Operand {
    std::string name;
    Access access = Access::Read;
    std::string element; ///< GLSL type or macro of one array element
};

struct PushField {
    std::string name;
    std::string type; ///< "uint", "int" or "float"
};

struct Constant {
    std::string name;
    std::uint32_t default_value = 0;
    std::string doc;
};

struct Variant {
    std::string name;
    std::vector<std::string> features;
    std::string module; ///< of a native kernel: its PTX file in shaders/
    std::string entry;  ///< and the name of the kernel there
};

/// How a kernel of a GPU's own instruction set is launched.
struct Native {
    std::uint32_t threads = 0, shared_bytes = 0, scratch_bytes = 0;
};

struct Kernel {
    std::string name;     ///< snake_case
    std::string source;   ///< file in shaders/
    std::string fallback; ///< kernel that serves where no variant does; "" if one always does
    bool optimize = true; ///< false: embedded as the GLSL compiler leaves it
    std::vector<Operand> operands;
    std::vector<PushField> push;
    std::vector<Constant> constants;
    std::vector<Variant> variants;
    std::optional<Native> native; ///< its variants are PTX, not SPIR-V
};

std::vector<Kernel> read_manifest(const std::filesystem::path& file);

/// "rmsnorm_forward" -> "RmsnormForward"
std::string pascal_case(const std::string& snake_case);

std::string read_file(const std::filesystem::path& file);
/// Leaves the file alone when it holds `content` already, so that nothing is built again.
void write_if_different(const std::filesystem::path& file, const std::string& content);

/// <output>/glsl/<kernel>.kernel.glsl and <output>/include/bellows/kernels/*.hpp
void write_bindings(const std::vector<Kernel>& kernels, const std::filesystem::path& output);
/// <output>/bank.cpp and bank.S from <output>/spirv/*.spv, or *.raw.spv where a kernel is not to be
/// optimized, <output>/unbuilt.txt, and the modules of native kernels in `shaders`
void write_bank(const std::vector<Kernel>& kernels, const std::filesystem::path& shaders,
                const std::filesystem::path& output);
/// Throws when the SPIR-V does not keep the accesses that the manifest declares.
void check_accesses(const Kernel& kernel, const std::string& variant,
                    const std::vector<std::uint32_t>& spirv);

} // namespace shader_bank
