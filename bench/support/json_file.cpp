// SPDX-License-Identifier: MIT
#include "support/json_file.hpp"

#include <bellows/base/version.hpp>

#include <cctype>
#include <sstream>

namespace bellows::bench {

std::string build_type() {
    const std::string type = BELLOWS_BUILD_TYPE;
    return type.empty() ? "None" : type;
}

bool JsonFile::ReportContext(const Context& context) {
    std::ostream& file = GetOutputStream();
    std::ostringstream text;
    SetOutputStream(&text);
    const bool goes_on = JSONReporter::ReportContext(context);
    SetOutputStream(&file);
    std::string head = text.str(), type = build_type();
    for (char& c : type)
        c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    const std::string key = "\"library_build_type\": \"";
    if (const std::size_t at = head.find(key); at != std::string::npos) {
        const std::size_t begin = at + key.size();
        head.replace(begin, head.find('"', begin) - begin, type);
    }
    file << head;
    return goes_on;
}

void add_build_context() {
    benchmark::AddCustomContext("bellows", kVersion);
    benchmark::AddCustomContext("compiler", __VERSION__);
    benchmark::AddCustomContext("build", build_type());
}

} // namespace bellows::bench
