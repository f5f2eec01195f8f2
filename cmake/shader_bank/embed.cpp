// SPDX-License-Identifier: MIT
#include "manifest.hpp"

#include <cstring>
#include <map>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace shader_bank {
namespace {

std::vector<std::uint32_t> read_spirv(const std::filesystem::path& file) {
    const std::string bytes = read_file(file);
    std::vector<std::uint32_t> words(bytes.size() / 4);
    if (bytes.size() % 4 != 0 || words.size() < 5)
        throw std::runtime_error(file.string() + " is no SPIR-V module");
    std::memcpy(words.data(), bytes.data(), bytes.size());
    return words;
}

// Lines "<kernel>.<variant> <reason>".
std::map<std::string, std::string> read_unbuilt(const std::filesystem::path& file) {
    std::map<std::string, std::string> reasons;
    std::istringstream lines(read_file(file));
    for (std::string line; std::getline(lines, line);)
        if (const auto space = line.find(' '); space != std::string::npos)
            reasons[line.substr(0, space)] = line.substr(space + 1);
    return reasons;
}

class BankWriter {
public:
    BankWriter(const std::filesystem::path& shaders, const std::filesystem::path& output)
        : shaders_(shaders), output_(output), unbuilt_(read_unbuilt(output / "unbuilt.txt")) {
        assembly_ << "/* Generated from shaders/manifest.json. */\n    .section .rodata\n";
        declarations_ << "extern \"C\" {\n";
    }

    void add(const Kernel& kernel) {
        const std::string& name = kernel.name;
        static constexpr const char* kAccess[] = {"Read", "Write", "ReadWrite"};
        tables_ << "\nconstexpr KernelOperand " << name << "_operands[] = {\n";
        for (const Operand& operand : kernel.operands)
            tables_ << "    {\"" << operand.name
                    << "\", Access::" << kAccess[static_cast<int>(operand.access)] << "},\n";
        tables_ << "};\n";
        if (!kernel.constants.empty()) {
            tables_ << "constexpr KernelConstant " << name << "_constants[] = {\n";
            for (const Constant& constant : kernel.constants)
                tables_ << "    {\"" << constant.name << "\", " << constant.default_value << "},\n";
            tables_ << "};\n";
        }
        std::ostringstream variants;
        for (const Variant& variant : kernel.variants)
            variants << add_variant(kernel, variant);
        tables_ << "const KernelVariant " << name << "_variants[] = {\n"
                << variants.str() << "};\nconst KernelInfo " << name << "_info = {\n    \"" << name
                << "\", " << name << "_operands, "
                << (kernel.constants.empty() ? "{}" : name + "_constants") << ", " << name
                << "_variants, " << kernel.push.size() << "};\n";
        list_ << "    &" << name << "_info,\n";
        functions_ << "const KernelInfo& " << pascal_case(name) << "::info() { return " << name
                   << "_info; }\n";
    }

    /// Throws what was found wrong with all kernels.
    void write() {
        if (!errors_.empty())
            throw std::runtime_error(errors_);
        assembly_ << "    .section .note.GNU-stack,\"\",%progbits\n";
        std::ostringstream source;
        source << "// SPDX-License-Identifier: MIT\n// Generated from shaders/manifest.json.\n"
                  "#include <bellows/kernels/kernels.hpp>\n\n#include <string_view>\n\n"
               << declarations_.str() << "}\n\nnamespace bellows::kernels {\n\nnamespace {\n"
               << tables_.str() << "\nconst KernelInfo* const kernel_list[] = {\n"
               << list_.str() << "};\n\n} // namespace\n\n"
               << functions_.str()
               << "\nstd::span<const KernelInfo* const> all() { return kernel_list; }\n\n"
                  "} // namespace bellows::kernels\n";
        write_if_different(output_ / "bank.cpp", source.str());
        write_if_different(output_ / "bank.S", assembly_.str());
    }

private:
    /// The symbol and the bytes, without the null byte, of a variant's module.
    std::pair<std::string, std::size_t> module(const Kernel& kernel, const Variant& variant) {
        const std::filesystem::path file = shaders_ / variant.module;
        const std::string text = read_file(file);
        if (text.find(".entry " + variant.entry + "(") == std::string::npos)
            throw std::runtime_error("kernel '" + kernel.name + "': " + variant.module +
                                     " has no entry '" + variant.entry + "'");
        std::string& symbol = module_symbols_[variant.module];
        if (symbol.empty()) {
            symbol = "bellows_native_" + std::to_string(module_symbols_.size());
            declarations_ << "extern const char " << symbol << "[" << text.size() + 1 << "];\n";
            assembly_ << "    .balign 16\n    .globl " << symbol << "\n    .hidden " << symbol
                      << "\n    .type " << symbol << ", %object\n    .size " << symbol << ", "
                      << text.size() + 1 << "\n"
                      << symbol << ":\n    .incbin \"" << file.string() << "\"\n    .byte 0\n";
        }
        return {symbol, text.size()};
    }

    std::string add_variant(const Kernel& kernel, const Variant& variant) {
        const std::string id = kernel.name + "." + variant.name;
        const std::string symbol = "bellows_spirv_" + kernel.name + "__" + variant.name;
        std::string features = "{}";
        if (!variant.features.empty()) {
            features = kernel.name + "__" + variant.name + "_features";
            tables_ << "constexpr std::string_view " << features << "[] = {";
            for (std::size_t i = 0; i < variant.features.size(); ++i)
                tables_ << (i == 0 ? "\"" : ", \"") << variant.features[i] << "\"";
            tables_ << "};\n";
        }
        std::ostringstream line;
        if (kernel.native) {
            const auto [symbol_of_module, bytes] = module(kernel, variant);
            line << "    {\"" << variant.name << "\", {}, " << features << ", \"\", {{"
                 << symbol_of_module << ", " << bytes << "}, \"" << variant.entry << "\", "
                 << kernel.native->threads << ", " << kernel.native->shared_bytes << ", "
                 << kernel.native->scratch_bytes << "}},\n";
            return line.str();
        }
        if (const auto reason = unbuilt_.find(id); reason != unbuilt_.end()) {
            line << "    {\"" << variant.name << "\", {}, " << features << ", \"" << reason->second
                 << "\"},\n";
            return line.str();
        }
        // Accesses can be traced through optimized code only.
        const std::filesystem::path optimized = output_ / "spirv" / (id + ".spv");
        const std::filesystem::path file =
            kernel.optimize ? optimized : output_ / "spirv" / (id + ".raw.spv");
        const std::vector<std::uint32_t> words = read_spirv(file);
        try {
            check_accesses(kernel, variant.name, kernel.optimize ? words : read_spirv(optimized));
        } catch (const std::exception& error) {
            errors_ += std::string(errors_.empty() ? "" : "\n") + error.what();
        }
        declarations_ << "extern const std::uint32_t " << symbol << "[" << words.size() << "];\n";
        assembly_ << "    .balign 16\n    .globl " << symbol << "\n    .hidden " << symbol
                  << "\n    .type " << symbol << ", %object\n    .size " << symbol << ", "
                  << words.size() * 4 << "\n"
                  << symbol << ":\n    .incbin \"" << file.string() << "\"\n";
        line << "    {\"" << variant.name << "\", " << symbol << ", " << features
             << ", \"\", {}},\n";
        return line.str();
    }

    std::filesystem::path shaders_, output_;
    std::map<std::string, std::string> module_symbols_; ///< by file
    std::map<std::string, std::string> unbuilt_;
    std::string errors_;
    std::ostringstream assembly_, declarations_, tables_, list_, functions_;
};

} // namespace

void write_bank(const std::vector<Kernel>& kernels, const std::filesystem::path& shaders,
                const std::filesystem::path& output) {
    BankWriter writer(shaders, output);
    for (const Kernel& kernel : kernels)
        writer.add(kernel);
    writer.write();
}

} // namespace shader_bank
