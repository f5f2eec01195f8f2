// SPDX-License-Identifier: MIT
#include "job_folder.hpp"

#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <string_view>
#include <sys/file.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

namespace bellows {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "bellows-job-";
constexpr int kTries = 3;

FileDescriptor open_folder(const std::string& path) {
    return FileDescriptor(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

/// Held until the descriptor is closed, which the end of its process does, too.
bool lock(const FileDescriptor& folder) {
    return ::flock(folder.get(), LOCK_EX | LOCK_NB) == 0;
}

bool is_own(const FileDescriptor& folder) {
    struct stat status{};
    return ::fstat(folder.get(), &status) == 0 && status.st_uid == ::geteuid();
}

void remove(const std::string& path) {
    std::error_code ignored; // what cannot be removed is somebody else's next try
    fs::remove_all(path, ignored);
}

void remove_abandoned(const std::string& base) {
    std::error_code none;
    for (const fs::directory_entry& entry : fs::directory_iterator(base, none)) {
        if (!entry.path().filename().string().starts_with(kPrefix))
            continue;
        const FileDescriptor folder = open_folder(entry.path().string());
        if (folder && is_own(folder) && lock(folder))
            remove(entry.path().string());
    }
}

} // namespace

JobFolder::JobFolder() noexcept {
    try {
        std::error_code none;
        const std::string base = ::access("/dev/shm", W_OK | X_OK) == 0
                                     ? "/dev/shm"
                                     : fs::temp_directory_path(none).string();
        if (base.empty())
            return;
        remove_abandoned(base);
        // Another launcher may take a folder without a lock for an abandoned one.
        for (int attempt = 0; attempt < kTries && path_.empty(); ++attempt) {
            std::string name = base + "/" + std::string(kPrefix) + "XXXXXX";
            if (!::mkdtemp(name.data()))
                return;
            FileDescriptor folder = open_folder(name);
            if (folder && lock(folder) && ::access(name.c_str(), F_OK) == 0) {
                path_ = name;
                lock_ = std::move(folder);
            }
        }
    } catch (const std::exception&) {
        path_.clear();
    }
}

JobFolder::~JobFolder() {
    if (!path_.empty())
        remove(path_);
}

} // namespace bellows
