// SPDX-License-Identifier: MIT
#pragma once

// A folder for what mpirun and MPI leave in shared memory and in the temporary folder, where one
// launch's ranks may be killed at any moment: it goes with the launcher, or, where that was killed
// itself, with the next one of this user.

#include <bellows/comm/file_descriptor.hpp>

#include <string>

namespace bellows {

class JobFolder {
public:
    /// Removes what launchers that are no more have left. Where no folder can be made, there is
    /// none.
    JobFolder() noexcept;
    ~JobFolder();
    JobFolder(const JobFolder&) = delete;
    JobFolder& operator=(const JobFolder&) = delete;

    /// In memory where the system has such a place. "" if there is none.
    const std::string& path() const noexcept { return path_; }

private:
    std::string path_;
    FileDescriptor lock_; ///< held while the launcher lives
};

} // namespace bellows
