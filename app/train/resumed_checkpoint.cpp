// SPDX-License-Identifier: MIT
#include "app/train/resumed_checkpoint.hpp"

#include <bellows/base/files.hpp>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace bellows {

namespace fs = std::filesystem;

namespace {

/// A run's checkpoints from the named one on, newest first; at least the named one.
std::vector<fs::path> from_named_on(const fs::path& named) {
    std::error_code error;
    const fs::path folder = fs::weakly_canonical(named, error);
    std::vector<fs::path> all = list_checkpoints(folder);
    if (all.empty()) {
        if (const auto run = run_of_checkpoint(folder)) {
            all = list_checkpoints(*run);
            all.erase(all.begin(), std::ranges::find(all, folder));
        } else if (folder.filename() == "checkpoints") {
            all = list_checkpoints(folder.parent_path());
        }
    }
    return all.empty() ? std::vector{named} : all;
}

/// Nothing if it is whole.
std::optional<Error> damage_of(const fs::path& folder) {
    try {
        Checkpoint::open(folder).verify();
        return std::nullopt;
    } catch (const Error& error) {
        return error;
    }
}

/// The error may be another than damage: then nothing older is looked for.
bool is_damage(const Error& error) {
    return error.code() == ErrorCode::Corrupt || error.code() == ErrorCode::Io;
}

std::string name_of(const fs::path& folder) {
    return folder.filename().string();
}

} // namespace

Error with_older(const Error& error, const fs::path& folder) {
    if (!is_damage(error))
        return error;
    const std::vector<fs::path> all = from_named_on(folder);
    for (std::size_t i = 1; i < all.size(); ++i) {
        if (!damage_of(all[i]))
            return Error(error.code(),
                         error.message() + "; " + name_of(all[i]) +
                             " of this run is whole: add --fall-back to go on from there",
                         error.rank(), error.detail());
    }
    return error;
}

Checkpoint open_resumed(const fs::path& named, bool fall_back,
                        const std::function<void(const std::string&)>& say) {
    const std::vector<fs::path> all = from_named_on(named);
    if (!fall_back) {
        try {
            return Checkpoint::open(named);
        } catch (const Error& error) {
            throw with_older(error, all.front());
        }
    }
    std::optional<Error> newest;
    for (const fs::path& folder : all) {
        const std::optional<Error> damage = damage_of(folder);
        if (!damage)
            return Checkpoint::open(folder);
        if (!is_damage(*damage))
            throw *damage;
        say(name_of(folder) + " is damaged: " + damage->message());
        if (!newest)
            newest = damage;
    }
    throw Error(newest->code(), newest->message() + "; no older checkpoint of this run is whole");
}

} // namespace bellows
