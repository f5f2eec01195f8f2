// SPDX-License-Identifier: MIT
#include "app/launch_folder.hpp"

#include "app/file_io.hpp"

#include <bellows/engine/error.hpp>

#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

#include <unistd.h>

namespace bellows {

namespace fs = std::filesystem;

namespace {

struct ProcessStatus {
    char state = 0;
    unsigned long long start_time = 0;
};

std::optional<ProcessStatus> status_of(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string text;
    std::getline(file, text);
    // "pid (name) state …": the name may hold blanks and brackets, the start time is field 22.
    const std::size_t bracket = text.rfind(')');
    if (bracket == std::string::npos) {
        return std::nullopt;
    }
    std::istringstream fields(text.substr(bracket + 1));
    ProcessStatus status;
    std::string skipped;
    fields >> status.state;
    for (int field = 4; field < 22; ++field) {
        fields >> skipped;
    }
    fields >> status.start_time;
    return fields ? std::optional(status) : std::nullopt;
}

void write_at_once(const fs::path& path, const std::string& content) {
    fs::path temporary = path;
    temporary += ".tmp";
    std::ofstream file(temporary);
    file << content << std::flush;
    std::error_code error;
    fs::rename(temporary, path, error);
    if (!file || error) {
        throw Error(ErrorCode::Io, "cannot write " + in_quotes(path.string()));
    }
}

} // namespace

ProcessId ProcessId::self() {
    const pid_t pid = ::getpid();
    const std::optional<ProcessStatus> status = status_of(pid);
    return {pid, status ? status->start_time : 0};
}

bool ProcessId::is_alive() const {
    const std::optional<ProcessStatus> status = status_of(pid);
    const bool ended = !status || status->state == 'Z' || status->state == 'X';
    return !ended && status->start_time == start_time;
}

void report_start(const fs::path& folder, int rank) {
    const ProcessId self = ProcessId::self();
    write_at_once(folder / (std::to_string(rank) + ".start"),
                  std::to_string(self.pid) + " " + std::to_string(self.start_time) + "\n");
}

void report_exit(const fs::path& folder, int rank, int exit_code) {
    write_at_once(folder / (std::to_string(rank) + ".exit"), std::to_string(exit_code) + "\n");
}

std::vector<RankReport> read_reports(const fs::path& folder, int ranks) {
    std::vector<RankReport> reports(static_cast<std::size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
        RankReport& report = reports[static_cast<std::size_t>(rank)];
        ProcessId process;
        int code = 0;
        if (std::ifstream file(folder / (std::to_string(rank) + ".start"));
            file >> process.pid >> process.start_time) {
            report.process = process;
        }
        // Alive first, exit code second: in this order a rank that ends meanwhile is not "lost".
        if (report.process && report.process->is_alive()) {
            continue;
        }
        if (std::ifstream file(folder / (std::to_string(rank) + ".exit")); file >> code) {
            report.exit_code = code;
        }
    }
    return reports;
}

} // namespace bellows
