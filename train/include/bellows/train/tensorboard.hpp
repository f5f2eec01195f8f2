// SPDX-License-Identifier: MIT
#pragma once

// The figures of a run's steps as an event file of TensorBoard: records of the framing of TFRecord
// (length, data, masked CRC-32C of each), whose data is an Event of protobuf. Rank 0 only, one
// thread.

#include <bellows/base/files.hpp>
#include <bellows/train/metrics.hpp>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace bellows {

/// The checksum of Castagnoli, as TFRecord and iSCSI have it.
std::uint32_t crc32c(std::string_view data) noexcept;

class TensorboardLog {
public:
    /// Begins a file events.out.tfevents.SECONDS.bellows in the folder. Viewers drop what earlier
    /// files of the folder have of steps after steps_done. Throws Error{Io}.
    TensorboardLog(const std::filesystem::path& folder, std::uint64_t steps_done);
    /// A scalar for each figure of the step. Throws Error{Io}: then the file ends with a whole
    /// record as before, and the next call writes this step's, too.
    void add(const StepMetrics& metrics);
    const std::filesystem::path& path() const noexcept { return path_; }

private:
    void write();

    std::filesystem::path path_;
    FileHandle file_;
    std::uint64_t written_ = 0; ///< bytes of whole records in the file
    std::string missing_;       ///< records that are not in the file yet
};

} // namespace bellows
