// SPDX-License-Identifier: MIT
#include "manifest.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <set>
#include <stdexcept>
#include <utility>

namespace shader_bank {
namespace {

using nlohmann::json;

// A push-constant block has at least 128 bytes, 8 of which are the operand block's address.
constexpr std::size_t kMaxPushFields = (128 - 8) / 4;

// Words that are fine in one of GLSL and C++ and break the other.
constexpr std::array kReserved = {
    "buffer",    "case",     "char",     "class",  "const",     "default",  "delete",    "discard",
    "do",        "double",   "else",     "enum",   "filter",    "fixed",    "flat",      "float",
    "for",       "half",     "if",       "in",     "info",      "inout",    "input",     "int",
    "long",      "main",     "new",      "out",    "output",    "packed",   "partition", "push",
    "readonly",  "register", "return",   "sample", "shared",    "short",    "signed",    "static",
    "struct",    "switch",   "template", "this",   "union",     "unsigned", "using",     "variant",
    "constants", "void",     "volatile", "while",  "writeonly", "operands",
};

void check_identifier(const std::string& where, const std::string& name) {
    const bool well_formed =
        !name.empty() && std::islower(static_cast<unsigned char>(name[0])) != 0 &&
        name.find("__") == std::string::npos && std::all_of(name.begin(), name.end(), [](char c) {
            return std::islower(static_cast<unsigned char>(c)) != 0 ||
                   std::isdigit(static_cast<unsigned char>(c)) != 0 || c == '_';
        });
    if (!well_formed)
        throw std::runtime_error(where + ": '" + name + "' is not a snake_case name");
    if (std::find(kReserved.begin(), kReserved.end(), name) != kReserved.end())
        throw std::runtime_error(where + ": '" + name + "' is a word of GLSL, C++ or the bindings");
}

void check_keys(const std::string& where, const json& object,
                std::initializer_list<const char*> known) {
    for (const auto& item : object.items())
        if (std::none_of(known.begin(), known.end(),
                         [&](const char* key) { return item.key() == key; }))
            throw std::runtime_error(where + ": unknown key '" + item.key() + "'");
}

Access read_access(const std::string& where, const std::string& text) {
    if (text == "read")
        return Access::Read;
    if (text == "write")
        return Access::Write;
    if (text == "readwrite")
        return Access::ReadWrite;
    throw std::runtime_error(where + ": access '" + text + "' is none of read, write, readwrite");
}

Kernel read_kernel(const json& object) {
    Kernel kernel;
    kernel.name = object.at("name").get<std::string>();
    const std::string where = "kernel '" + kernel.name + "'";
    check_identifier(where, kernel.name);
    check_keys(where, object,
               {"name", "source", "operands", "push", "constants", "variants", "fallback",
                "optimize", "doc", "native"});
    kernel.source = object.at("source").get<std::string>();
    kernel.fallback = object.value("fallback", std::string());
    kernel.optimize = object.value("optimize", true);
    if (object.contains("native")) {
        const json& native = object.at("native");
        check_keys(where + " native", native, {"threads", "shared_bytes", "scratch_bytes"});
        kernel.native = Native{native.at("threads").get<std::uint32_t>(),
                               native.at("shared_bytes").get<std::uint32_t>(),
                               native.at("scratch_bytes").get<std::uint32_t>()};
    }

    std::set<std::string> members;
    const auto add_member = [&](const std::string& name) {
        check_identifier(where, name);
        if (!members.insert(name).second)
            throw std::runtime_error(where + ": the name '" + name + "' stands twice");
    };
    for (const json& item : object.at("operands")) {
        check_keys(where + " operand", item, {"name", "access", "element", "doc"});
        kernel.operands.push_back({item.at("name").get<std::string>(),
                                   read_access(where, item.at("access").get<std::string>()),
                                   item.at("element").get<std::string>()});
        add_member(kernel.operands.back().name);
    }
    for (const json& item : object.value("push", json::array())) {
        check_keys(where + " push field", item, {"name", "type", "doc"});
        kernel.push.push_back(
            {item.at("name").get<std::string>(), item.at("type").get<std::string>()});
        add_member(kernel.push.back().name);
        const std::string& type = kernel.push.back().type;
        if (type != "uint" && type != "int" && type != "float")
            throw std::runtime_error(where + ": push type '" + type +
                                     "' is none of uint, int, float");
    }
    if (kernel.push.size() > kMaxPushFields)
        throw std::runtime_error(where + ": " + std::to_string(kernel.push.size()) +
                                 " push fields; at most " + std::to_string(kMaxPushFields));
    std::set<std::string> names;
    for (const json& item : object.value("constants", json::array())) {
        check_keys(where + " constant", item, {"name", "default", "doc"});
        kernel.constants.push_back({item.at("name").get<std::string>(),
                                    item.at("default").get<std::uint32_t>(),
                                    item.value("doc", std::string())});
        check_identifier(where, kernel.constants.back().name);
        if (!names.insert(kernel.constants.back().name).second)
            throw std::runtime_error(where + ": two constants '" + kernel.constants.back().name +
                                     "'");
    }
    names.clear();
    for (const json& item : object.at("variants")) {
        Variant variant{item.at("name").get<std::string>(),
                        item.value("features", std::vector<std::string>()), "", ""};
        if (kernel.native) {
            check_keys(where + " variant", item, {"name", "module", "entry", "features", "doc"});
            variant.module = item.at("module").get<std::string>();
            variant.entry = item.at("entry").get<std::string>();
        } else {
            check_keys(where + " variant", item,
                       {"name", "defines", "extensions", "features", "doc"});
        }
        kernel.variants.push_back(std::move(variant));
        check_identifier(where, kernel.variants.back().name);
        if (!names.insert(kernel.variants.back().name).second)
            throw std::runtime_error(where + ": two variants '" + kernel.variants.back().name +
                                     "'");
    }
    if (kernel.variants.empty())
        throw std::runtime_error(where + ": no variants");
    if (kernel.operands.empty())
        throw std::runtime_error(where + ": no operands");
    return kernel;
}

bool is_portable(const Kernel& kernel) {
    return std::any_of(kernel.variants.begin(), kernel.variants.end(),
                       [](const Variant& variant) { return variant.features.empty(); });
}

// Every device can compute what a kernel computes: by a variant of it or by another kernel.
void check_fallbacks(const std::vector<Kernel>& kernels) {
    for (const Kernel& kernel : kernels) {
        const bool served = is_portable(kernel) ||
                            std::any_of(kernels.begin(), kernels.end(), [&](const Kernel& other) {
                                return other.name == kernel.fallback && is_portable(other);
                            });
        if (!served)
            throw std::runtime_error(
                "kernel '" + kernel.name +
                "': every variant needs a device feature, so \"fallback\" must "
                "name a kernel that needs none and computes the same");
    }
}

} // namespace

std::vector<Kernel> read_manifest(const std::filesystem::path& file) {
    try {
        const json manifest = json::parse(read_file(file));
        check_keys("manifest", manifest, {"kernels", "doc"});
        std::vector<Kernel> kernels;
        std::set<std::string> names;
        for (const json& item : manifest.at("kernels")) {
            kernels.push_back(read_kernel(item));
            if (!names.insert(kernels.back().name).second)
                throw std::runtime_error("two kernels '" + kernels.back().name + "'");
        }
        check_fallbacks(kernels);
        return kernels;
    } catch (const std::exception& error) {
        throw std::runtime_error(file.string() + ": " + error.what());
    }
}

std::string pascal_case(const std::string& snake_case) {
    std::string result;
    bool upper = true;
    for (const char c : snake_case) {
        if (c == '_') {
            upper = true;
            continue;
        }
        result += upper ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
        upper = false;
    }
    return result;
}

std::string read_file(const std::filesystem::path& file) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream)
        throw std::runtime_error("cannot read " + file.string());
    return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

void write_if_different(const std::filesystem::path& file, const std::string& content) {
    if (std::filesystem::exists(file) && read_file(file) == content)
        return;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream stream(file, std::ios::binary);
    stream << content;
    stream.close();
    if (!stream)
        throw std::runtime_error("cannot write " + file.string());
}

} // namespace shader_bank
