// SPDX-License-Identifier: MIT
// Reads any bytes as the state.json of a checkpoint, and as a run's metrics.jsonl.
#include "fuzz/input_file.hpp"

#include "checkpoint/state_file.hpp"

#include <bellows/base/error.hpp>
#include <bellows/train/metrics.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include <stdlib.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const bellows::fuzz::InputFile file(data, size);
    try {
        for (const bellows::StepMetrics& step : bellows::read_metrics(file.path()))
            (void)bellows::format_metrics(step);
        std::map<std::string, bellows::CheckpointFile> files;
        (void)bellows::parse_checkpoint_state(file.path(), files);
    } catch (const bellows::Error& error) {
        if (error.code() == bellows::ErrorCode::Internal)
            ::abort();
    }
    return 0;
}
