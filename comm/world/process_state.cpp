// SPDX-License-Identifier: MIT
#include "process_state.hpp"

#include <charconv>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <string_view>

namespace bellows {
namespace {

/// Empty where there is no such process. A process may end between the opening of the file and
/// the reading of it. The read fails then, and an iterator over the stream would throw; `<<` does
/// not.
std::string content_of(pid_t process, const std::string& file) {
    const std::ifstream in("/proc/" + std::to_string(process) + "/" + file);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
}

/// '\0' where there is no such process.
char state_of(pid_t process) {
    const std::string text = content_of(process, "stat");
    const std::size_t name_end = text.rfind(") ");
    return name_end != std::string::npos && name_end + 2 < text.size() ? text[name_end + 2] : '\0';
}

} // namespace

bool is_stopped(pid_t process) {
    return state_of(process) == 'T';
}

bool is_alive(pid_t process) {
    const char state = state_of(process);
    return state != '\0' && state != 'Z' && state != 'X';
}

std::vector<pid_t> children_of(pid_t process) {
    std::ifstream in("/proc/" + std::to_string(process) + "/task/" + std::to_string(process) +
                     "/children");
    return {std::istream_iterator<pid_t>(in), {}};
}

int rank_of_process(pid_t process) {
    const std::string text = '\0' + content_of(process, "environ");
    for (const std::string_view name : {"OMPI_COMM_WORLD_RANK=", "PMIX_RANK="}) {
        const std::size_t at = text.find('\0' + std::string(name));
        int rank = -1;
        if (at == std::string::npos)
            continue;
        const char* begin = text.data() + at + 1 + name.size();
        if (std::from_chars(begin, text.data() + text.size(), rank).ec == std::errc{})
            return rank;
    }
    return -1;
}

} // namespace bellows
