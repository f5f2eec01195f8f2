// SPDX-License-Identifier: MIT
#include "manifest.hpp"

#include <sstream>

namespace shader_bank {
namespace {

const char* glsl_qualifier(Access access) {
    switch (access) {
    case Access::Read:
        return "readonly ";
    case Access::Write:
        return "writeonly ";
    case Access::ReadWrite:
        break;
    }
    return "";
}

std::string glsl_header(const Kernel& kernel) {
    std::ostringstream out;
    out << "// Generated from shaders/manifest.json: operands, constants and push block of\n// "
        << kernel.source << ", kernel " << kernel.name << ".\n";
    for (const Operand& operand : kernel.operands)
        out << "layout(buffer_reference, scalar) " << glsl_qualifier(operand.access) << "buffer "
            << pascal_case(operand.name) << "Operand { " << operand.element << " v[]; };\n";
    out << "layout(buffer_reference, scalar) readonly buffer Operands {\n";
    for (const Operand& operand : kernel.operands)
        out << "    " << pascal_case(operand.name) << "Operand " << operand.name << ";\n";
    out << "};\n";
    for (std::size_t i = 0; i < kernel.constants.size(); ++i) {
        const Constant& constant = kernel.constants[i];
        out << "layout(constant_id = " << i << ") const uint " << constant.name << " = "
            << constant.default_value << "u;\n";
        if (constant.name == "local_size")
            out << "layout(local_size_x_id = " << i << ") in;\n";
    }
    out << "layout(push_constant, scalar) uniform Push {\n    Operands operands;\n";
    for (const PushField& field : kernel.push)
        out << "    " << field.type << " " << field.name << ";\n";
    out << "} push;\n";
    return out.str();
}

const char* cpp_type(const std::string& glsl_type) {
    if (glsl_type == "float")
        return "float";
    return glsl_type == "int" ? "std::int32_t" : "std::uint32_t";
}

void write_array(std::ostringstream& out, const std::string& type, std::size_t size,
                 const std::string& function, const std::vector<std::string>& values) {
    out << "    std::array<" << type << ", " << size << "> " << function << "() const {\n"
        << "        return {";
    for (std::size_t i = 0; i < values.size(); ++i)
        out << (i == 0 ? "" : ", ") << values[i];
    out << "};\n    }\n";
}

std::string cpp_header(const Kernel& kernel) {
    std::ostringstream out;
    out << "// SPDX-License-Identifier: MIT\n// Generated from shaders/manifest.json.\n"
           "#pragma once\n\n#include <bellows/engine/kernel_info.hpp>\n"
           "#include <bellows/engine/tensor.hpp>\n\n#include <array>\n#include <bit>\n"
           "#include <cstdint>\n\nnamespace bellows::kernels {\n\n/// shaders/"
        << kernel.source << "\nstruct " << pascal_case(kernel.name) << " {\n"
        << "    enum class Variant : std::uint32_t {\n";
    for (const Variant& variant : kernel.variants)
        out << "        " << variant.name << ",\n";
    out << "    };\n    struct Constants {\n";
    for (const Constant& constant : kernel.constants)
        out << "        std::uint32_t " << constant.name << " = " << constant.default_value << ";"
            << (constant.doc.empty() ? "" : " ///< " + constant.doc) << "\n";
    out << "    };\n\n    Variant variant{};\n    Constants constants{};\n";

    std::vector<std::string> operands, words, constants;
    static constexpr const char* kAccess[] = {"read", "written", "read and written"};
    for (const Operand& operand : kernel.operands) {
        out << "    BufferView " << operand.name << "{}; ///< "
            << kAccess[static_cast<int>(operand.access)] << "\n";
        operands.push_back(operand.name);
    }
    for (const PushField& field : kernel.push) {
        out << "    " << cpp_type(field.type) << " " << field.name << " = 0;\n";
        words.push_back(field.type == "uint" ? field.name
                                             : "std::bit_cast<std::uint32_t>(" + field.name + ")");
    }
    for (const Constant& constant : kernel.constants)
        constants.push_back("constants." + constant.name);

    out << "\n    static const KernelInfo& info();\n    std::uint32_t variant_index() const { "
           "return static_cast<std::uint32_t>(variant); }\n";
    write_array(out, "BufferView", operands.size(), "operands", operands);
    write_array(out, "std::uint32_t", words.size(), "push_words", words);
    write_array(out, "std::uint32_t", constants.size(), "constant_values", constants);
    out << "};\n\n} // namespace bellows::kernels\n";
    return out.str();
}

std::string all_kernels_header(const std::vector<Kernel>& kernels) {
    std::ostringstream out;
    out << "// SPDX-License-Identifier: MIT\n// Generated from shaders/manifest.json.\n"
           "#pragma once\n\n// All compute kernels as typed structs, for Recording::dispatch.\n\n"
           "#include <bellows/engine/kernel_info.hpp>\n";
    for (const Kernel& kernel : kernels)
        out << "#include <bellows/kernels/" << kernel.name << ".hpp>\n";
    out << "\n#include <span>\n\nnamespace bellows::kernels {\n\n"
           "/// Every kernel of this build, in the manifest's order.\n"
           "std::span<const KernelInfo* const> all();\n\n} // namespace bellows::kernels\n";
    return out.str();
}

} // namespace

void write_bindings(const std::vector<Kernel>& kernels, const std::filesystem::path& output) {
    for (const Kernel& kernel : kernels) {
        if (!kernel.native)
            write_if_different(output / "glsl" / (kernel.name + ".kernel.glsl"),
                               glsl_header(kernel));
        write_if_different(output / "include/bellows/kernels" / (kernel.name + ".hpp"),
                           cpp_header(kernel));
    }
    write_if_different(output / "include/bellows/kernels/kernels.hpp", all_kernels_header(kernels));
}

} // namespace shader_bank
