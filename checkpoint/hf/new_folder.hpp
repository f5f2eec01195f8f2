// SPDX-License-Identifier: MIT
#pragma once

// A folder that appears when it is complete.

#include <filesystem>

namespace bellows {

class NewFolder {
public:
    /// Makes an empty folder beside `target`. Throws Error{InvalidArgument} if the target is there
    /// and is no empty folder, Error{Io}.
    explicit NewFolder(std::filesystem::path target);
    NewFolder(const NewFolder&) = delete;
    NewFolder& operator=(const NewFolder&) = delete;
    /// Removes what has not been committed.
    ~NewFolder();

    const std::filesystem::path& path() const noexcept { return path_; }
    /// Gives it the target's name. Throws Error{Io}.
    void commit();

private:
    std::filesystem::path target_, path_;
    bool committed_ = false;
};

} // namespace bellows
