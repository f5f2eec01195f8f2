// SPDX-License-Identifier: MIT
#include "app/train/training_text.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/comm/host_collectives.hpp>
#include <bellows/train/checkpoints.hpp>

#include <array>
#include <cstring>
#include <span>
#include <string>
#include <system_error>
#include <vector>

namespace bellows {

namespace fs = std::filesystem;

namespace {

TextFiles find_training_text(const TrainOptions& options) {
    const std::vector<std::string>& data = options.config.train.data;
    return find_text(std::vector<fs::path>(data.begin(), data.end()));
}

fs::path tokens_of(const TrainOptions& options) {
    return options.out / kTokensFile;
}

/// What runs that were ended while they tokenised have left. The run's folder is locked.
void remove_unfinished(const fs::path& folder) {
    std::vector<fs::path> found;
    std::error_code error;
    for (fs::directory_iterator at(folder, error); !error && at != fs::directory_iterator();
         at.increment(error)) {
        if (at->path().filename().string().starts_with(std::string(".") + kTokensFile)) {
            found.push_back(at->path());
        }
    }
    for (const fs::path& path : found) {
        fs::remove(path, error); // what stays does no harm
    }
}

struct Shared {
    std::uint64_t fingerprint = 0;
    std::uint64_t content = 0;
};

/// Runs `work` where `mine` and waits on the other ranks; what any threw is thrown on all.
template <class Work>
void together(World& world, bool mine, Work work) {
    std::optional<Error> error;
    try {
        if (mine) {
            work();
        }
    } catch (const Error& thrown) {
        error = thrown;
    }
    if (const auto worst = world.control().agree(error, kDiskPatience, "reading the text")) {
        throw Error(*worst);
    }
}

} // namespace

void check_training_text(const TrainOptions& options) {
    constexpr std::uint64_t kSoonRead = std::uint64_t{4} << 20; // bytes
    const Tokenizer tokenizer = tokenizer_of(options);
    const TextFiles text = find_training_text(options);
    std::optional<Corpus> corpus =
        Corpus::open(tokens_of(options), fingerprint(text, tokenizer), text);
    if (!corpus && text.bytes() <= kSoonRead) {
        corpus = Corpus::read(text, tokenizer);
    }
    if (corpus) {
        check_text(options.config.train, *corpus);
    }
}

Corpus training_text(const TrainOptions& options, const Tokenizer& tokenizer, World& world,
                     const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
    const fs::path file = tokens_of(options);
    std::optional<Corpus> corpus;
    Shared shared;
    together(world, world.rank() == 0, [&] {
        const TextFiles text = find_training_text(options);
        shared.fingerprint = fingerprint(text, tokenizer);
        corpus = Corpus::open(file, shared.fingerprint, text);
        if (!corpus) {
            remove_unfinished(options.out);
            corpus = Corpus::make(file, text, tokenizer, {.progress = progress});
        }
        shared.content = corpus->content();
        check_text(options.config.train, *corpus);
    });
    if (world.size() == 1) {
        return std::move(*corpus);
    }
    HostCollectives::Bytes bytes(sizeof shared);
    std::memcpy(bytes.data(), &shared, sizeof shared);
    HostCollectives(world, Group::all(world.size())).broadcast(0, bytes);
    std::memcpy(&shared, bytes.data(), sizeof shared);

    // Another host may see rank 0's file, or have a folder and a clock of its own.
    const auto open = [&](bool may_make) {
        corpus = Corpus::open(file, shared.fingerprint, {});
        if (corpus) {
            return;
        }
        const TextFiles text = find_training_text(options);
        corpus = Corpus::open(file, fingerprint(text, tokenizer), text);
        if (!corpus && may_make) {
            std::error_code error;
            fs::create_directories(options.out, error);
            corpus = Corpus::make(file, text, tokenizer);
        }
        if (!corpus) {
            throw Error(ErrorCode::Io,
                        in_quotes(file.string()) + " is not there any more; start the run again");
        }
    };
    const bool leads_host = world.local_rank() == 0;
    if (world.num_nodes() > 1) {
        together(world, leads_host && !corpus, [&] { open(true); });
    }
    together(world, !corpus, [&] { open(false); });
    together(world, true, [&] {
        if (corpus->content() != shared.content) {
            throw Error(ErrorCode::InvalidArgument,
                        "the training text is not the same on all hosts: rank " +
                            std::to_string(world.rank()) + " reads " + describe(*corpus));
        }
    });
    return std::move(*corpus);
}

} // namespace bellows
