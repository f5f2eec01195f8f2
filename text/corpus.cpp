// SPDX-License-Identifier: MIT
#include <bellows/text/corpus.hpp>

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/base/memory_sizes.hpp>

#include <algorithm>
#include <map>
#include <set>
#include <system_error>

namespace bellows {

namespace fs = std::filesystem;

namespace {

constexpr std::uint64_t kLargestTextFile = std::uint64_t{1} << 36;

bool is_binary(std::string_view content) {
    return content.find('\0') != std::string_view::npos;
}

[[noreturn]] void throw_io(const fs::path& path, const std::error_code& error) {
    throw Error(ErrorCode::Io, "cannot read " + in_quotes(path.string()) + ": " + error.message());
}

/// The regular files below a folder, sorted by path; others go to `skipped`.
std::vector<fs::path> files_below(const fs::path& folder, std::vector<SkippedFile>& skipped) {
    std::vector<fs::path> files;
    std::error_code error;
    fs::recursive_directory_iterator at(folder, error);
    while (!error && at != fs::recursive_directory_iterator()) {
        const fs::path path = at->path();
        const fs::file_status status = at->symlink_status(error);
        if (error) {
            throw_io(path, error);
        }
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
    if (error) {
        throw_io(folder, error);
    }
    std::sort(files.begin(), files.end(), [](const fs::path& a, const fs::path& b) {
        return a.native() < b.native(); // bytes, whatever the locale
    });
    return files;
}

} // namespace

Corpus::Corpus(const Tokenizer& tokenizer)
    : token_bytes_(tokenizer.vocabulary() <= 256     ? 1
                   : tokenizer.vocabulary() <= 65536 ? 2
                                                     : 4),
      vocabulary_(tokenizer.vocabulary()) {
}

void Corpus::append(std::string_view text, const Tokenizer& tokenizer) {
    std::vector<std::uint32_t> ids = tokenizer.encode(text);
    ids.push_back(tokenizer.end_of_document());
    for (const std::uint32_t id : ids) {
        for (std::uint32_t byte = 0; byte < token_bytes_; ++byte) {
            tokens_.push_back(static_cast<std::uint8_t>(id >> (8 * byte)));
        }
    }
    num_text_bytes_ += text.size();
    ++num_documents_;
}

Corpus Corpus::from_text(std::string_view text, const Tokenizer& tokenizer) {
    Corpus corpus(tokenizer);
    corpus.append(text, tokenizer);
    return corpus;
}

Corpus Corpus::read(std::span<const fs::path> paths, const Tokenizer& tokenizer) {
    if (paths.empty()) {
        throw Error(ErrorCode::InvalidArgument, "no data: name at least one text file or folder");
    }
    Corpus corpus(tokenizer);
    std::set<fs::path> seen;
    const auto add = [&](const fs::path& file, bool named) {
        std::error_code error;
        const fs::path real = fs::canonical(file, error);
        if (!error && !seen.insert(real).second) {
            corpus.skipped_.push_back({file, "already read"});
            return;
        }
        const std::string content = read_file(file, kLargestTextFile);
        if (is_binary(content)) {
            if (named) {
                throw Error(ErrorCode::InvalidArgument,
                            "data " + in_quotes(file.string()) + " is a binary file, not text");
            }
            corpus.skipped_.push_back({file, "binary"});
        } else if (content.empty()) {
            corpus.skipped_.push_back({file, "empty"});
        } else {
            corpus.append(content, tokenizer);
        }
    };
    std::string listed;
    for (const fs::path& path : paths) {
        listed += (listed.empty() ? "" : ", ") + in_quotes(path.string());
        std::error_code error;
        const fs::file_status status = fs::status(path, error);
        if (status.type() == fs::file_type::not_found) {
            throw Error(ErrorCode::InvalidArgument,
                        "data " + in_quotes(path.string()) + " does not exist");
        }
        if (error) {
            throw_io(path, error);
        }
        if (!fs::is_directory(status)) {
            add(path, true);
            continue;
        }
        for (const fs::path& file : files_below(path, corpus.skipped_)) {
            add(file, false);
        }
    }
    if (corpus.num_documents_ == 0) {
        throw Error(ErrorCode::InvalidArgument,
                    "no text in " + listed + " (" + std::to_string(corpus.skipped_.size()) +
                        " files skipped as empty, binary, hidden or links)");
    }
    return corpus;
}

double Corpus::bytes_per_token() const noexcept {
    return static_cast<double>(num_text_bytes_) / static_cast<double>(num_tokens());
}

void Corpus::copy(std::uint64_t first, std::span<std::uint32_t> out) const {
    if (first > num_tokens() || out.size() > num_tokens() - first) {
        throw Error(ErrorCode::InvalidArgument,
                    "tokens " + std::to_string(first) + " + " + std::to_string(out.size()) +
                        " leave a corpus of " + std::to_string(num_tokens()));
    }
    const std::uint8_t* at = tokens_.data() + first * token_bytes_;
    for (std::uint32_t& token : out) {
        token = 0;
        for (std::uint32_t byte = 0; byte < token_bytes_; ++byte) {
            token |= static_cast<std::uint32_t>(*at++) << (8 * byte);
        }
    }
}

std::string describe(const Corpus& corpus) {
    std::map<std::string, std::uint64_t> skipped;
    for (const SkippedFile& file : corpus.skipped()) {
        ++skipped[file.reason];
    }
    std::string text = std::to_string(corpus.num_documents()) +
                       (corpus.num_documents() == 1 ? " document, " : " documents, ") +
                       format_bytes(corpus.num_text_bytes());
    std::string reasons;
    for (const auto& [reason, count] : skipped) {
        reasons += (reasons.empty() ? "" : ", ") + reason + " " + std::to_string(count);
    }
    return reasons.empty() ? text
                           : text + "; skipped " + std::to_string(corpus.skipped().size()) + " (" +
                                 reasons + ")";
}

DataSplit split_corpus(const Corpus& corpus, double holdout_fraction) {
    if (!(holdout_fraction >= 0 && holdout_fraction < 1)) {
        throw Error(ErrorCode::InvalidArgument, "the held-out fraction is " +
                                                    std::to_string(holdout_fraction) +
                                                    "; it must be at least 0 and below 1");
    }
    const std::uint64_t total = corpus.num_tokens();
    const auto held = static_cast<std::uint64_t>(static_cast<double>(total) * holdout_fraction);
    return {{0, total - held}, {total - held, held}};
}

} // namespace bellows
