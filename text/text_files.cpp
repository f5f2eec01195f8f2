// SPDX-License-Identifier: MIT
#include <bellows/text/text_files.hpp>

#include "text_errors.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <set>
#include <system_error>

namespace bellows {

namespace fs = std::filesystem;

namespace {

void check_io(const fs::path& path, const std::error_code& error) {
    if (error) {
        throw Error(ErrorCode::Io,
                    "cannot read " + in_quotes(path.string()) + ": " + error.message());
    }
}

/// The regular files below a folder, sorted by path; others go to `skipped`.
std::vector<fs::path> files_below(const fs::path& folder, std::vector<SkippedFile>& skipped) {
    std::vector<fs::path> files;
    std::error_code error;
    fs::recursive_directory_iterator at(folder, error);
    while (!error && at != fs::recursive_directory_iterator()) {
        const fs::path path = at->path();
        const fs::file_status status = at->symlink_status(error);
        check_io(path, error);
        if (path.filename().string().starts_with('.')) {
            at.disable_recursion_pending();
            skipped.push_back({path, "hidden"});
        } else if (fs::is_symlink(status)) {
            skipped.push_back({path, "symbolic link"});
        } else if (fs::is_regular_file(status)) {
            files.push_back(path);
        } else if (!fs::is_directory(status)) {
            skipped.push_back({path, "not a regular file"});
        }
        at.increment(error);
    }
    check_io(folder, error);
    std::sort(files.begin(), files.end(), [](const fs::path& a, const fs::path& b) {
        return a.native() < b.native(); // bytes, whatever the locale
    });
    return files;
}

class Finder {
public:
    void add(const fs::path& file, bool named) {
        std::error_code error;
        const fs::path real = fs::canonical(file, error);
        if (!error && !seen_.insert(real).second) {
            found.skipped.push_back({file, "already read"});
            return;
        }
        const std::uint64_t bytes = fs::file_size(file, error);
        check_io(file, error);
        if (bytes == 0) {
            found.skipped.push_back({file, "empty"});
            return;
        }
        const auto modified = fs::last_write_time(file, error);
        check_io(file, error);
        const auto since = std::chrono::nanoseconds(modified.time_since_epoch());
        found.files.push_back({file, bytes, since.count(), named});
    }

    TextFiles found;

private:
    std::set<fs::path> seen_;
};

} // namespace

std::uint64_t TextFiles::bytes() const noexcept {
    std::uint64_t sum = 0;
    for (const TextFile& file : files) {
        sum += file.bytes;
    }
    return sum;
}

TextFiles find_text(std::span<const fs::path> paths) {
    if (paths.empty()) {
        throw Error(ErrorCode::InvalidArgument, "no data: name at least one text file or folder");
    }
    Finder finder;
    for (const fs::path& path : paths) {
        std::string& named = finder.found.named;
        named += (named.empty() ? "" : ", ") + in_quotes(path.string());
        std::error_code error;
        const fs::file_status status = fs::status(path, error);
        if (status.type() == fs::file_type::not_found) {
            throw Error(ErrorCode::InvalidArgument,
                        "data " + in_quotes(path.string()) + " does not exist");
        }
        check_io(path, error);
        if (fs::is_directory(status)) {
            for (const fs::path& file : files_below(path, finder.found.skipped)) {
                finder.add(file, false);
            }
        } else if (fs::is_regular_file(status)) {
            finder.add(path, true);
        } else {
            throw Error(ErrorCode::Io, in_quotes(path.string()) + " is not a regular file");
        }
    }
    if (finder.found.files.empty()) {
        text::throw_no_text(finder.found, finder.found.skipped.size());
    }
    return std::move(finder.found);
}

} // namespace bellows
