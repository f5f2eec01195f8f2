// SPDX-License-Identifier: MIT
#pragma once

// Which checkpoint `train --resume` goes on from, and what it says about a damaged one.

#include <bellows/base/error.hpp>
#include <bellows/checkpoint/checkpoint.hpp>

#include <filesystem>
#include <functional>
#include <string>

namespace bellows {

/// `named` as Checkpoint::open() takes it. With fall_back, checkpoints are read through, from the
/// newest of the run or the named one to older ones, and the first whole one is it; `say` gets a
/// line for each that is damaged. Throws as Checkpoint::open(), and Error{Corrupt} if none is
/// whole.
Checkpoint open_resumed(const std::filesystem::path& named, bool fall_back,
                        const std::function<void(const std::string&)>& say);

/// What is wrong with a checkpoint of a run, and the way on: the next older one that is whole, if
/// there is any.
Error with_older(const Error& error, const std::filesystem::path& folder);

} // namespace bellows
