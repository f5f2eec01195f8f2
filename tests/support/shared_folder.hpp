// SPDX-License-Identifier: MIT
#pragma once

// A temporary folder of all ranks of a test.

#include "mpi_test.hpp"
#include "temporary_folder.hpp"

#include <bellows/comm/host_collectives.hpp>

#include <filesystem>
#include <optional>
#include <span>
#include <string>

namespace bellows {

/// Collective. It goes with rank 0's: the others must have left it.
class SharedFolder {
public:
    SharedFolder() {
        HostCollectives everyone(testing::world(), Group::all(testing::world().size()));
        HostCollectives::Bytes name;
        if (testing::world().rank() == 0) {
            folder_.emplace();
            const std::string path = folder_->path().string();
            const auto bytes = std::as_bytes(std::span(path));
            name.assign(bytes.begin(), bytes.end());
        }
        everyone.broadcast(0, name);
        path_.assign(std::string(reinterpret_cast<const char*>(name.data()), name.size()));
    }
    const std::filesystem::path& path() const noexcept { return path_; }

private:
    std::optional<TemporaryFolder> folder_; ///< rank 0's
    std::filesystem::path path_;
};

} // namespace bellows
