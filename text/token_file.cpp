// SPDX-License-Identifier: MIT
#include "token_file.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>

#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace bellows::text {

namespace fs = std::filesystem;

namespace {

constexpr std::array<char, 8> kMagic = {'B', 'L', 'W', 'S', 'T', 'O', 'K', 'N'};
constexpr std::uint32_t kVersion = 1;

/// A new file that is removed unless it gets its name.
class NewFile {
public:
    explicit NewFile(const fs::path& target) : target_(target) {
        constexpr int kMostTries = 100;
        std::string begin = ".";
        begin.append(target.filename().string()).append(".");
        begin.append(std::to_string(::getpid())).append("-");
        for (int i = 0; i < kMostTries && file_.get() < 0; ++i) {
            path_ = target.parent_path() / (begin + std::to_string(i));
            file_ =
                FileHandle(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
            if (file_.get() < 0 && errno != EEXIST) {
                break;
            }
        }
        if (file_.get() < 0) {
            throw Error(ErrorCode::Io, errno_message("create", path_, errno));
        }
    }
    ~NewFile() {
        if (!path_.empty()) {
            ::unlink(path_.c_str());
        }
    }
    NewFile(const NewFile&) = delete;
    NewFile& operator=(const NewFile&) = delete;

    void write(const void* data, std::uint64_t bytes) {
        write_all(file_.get(), data, bytes, path_);
    }
    void write_first(const void* data, std::uint64_t bytes) {
        if (::lseek(file_.get(), 0, SEEK_SET) != 0) {
            throw Error(ErrorCode::Io, errno_message("write", path_, errno));
        }
        write(data, bytes);
    }
    void put_in_place() {
        if (::fsync(file_.get()) != 0 || ::close(file_.release()) != 0) {
            throw Error(ErrorCode::Io, errno_message("write", path_, errno));
        }
        std::error_code error;
        fs::rename(path_, target_, error);
        if (error) {
            throw Error(ErrorCode::Io, errno_message("rename", path_, error.value()));
        }
        path_.clear();
        sync_directory(target_.parent_path());
    }

private:
    fs::path target_;
    fs::path path_; ///< "": it has its name
    FileHandle file_;
};

bool is_whole(const TokenFileHeader& header, std::uint64_t bytes) {
    constexpr std::uint64_t kMost = std::uint64_t{1} << 56;
    return header.magic == kMagic && header.version == kVersion && header.vocabulary > 0 &&
           header.vocabulary <= UINT32_MAX &&
           header.token_bytes == token_bytes(static_cast<std::uint32_t>(header.vocabulary)) &&
           header.num_tokens > 0 && header.num_tokens < kMost && header.num_binary < kMost &&
           bytes == sizeof header + header.num_tokens * header.token_bytes +
                        header.num_binary * sizeof(std::uint64_t);
}

} // namespace

std::vector<std::uint64_t> TokenFile::binary() const {
    std::vector<std::uint64_t> places(header.num_binary);
    const std::uint64_t first = sizeof header + header.num_tokens * header.token_bytes;
    if (!places.empty()) {
        std::memcpy(places.data(), file.bytes().data() + first,
                    places.size() * sizeof(std::uint64_t));
    }
    return places;
}

std::optional<TokenFile> open_token_file(const fs::path& path) {
    TokenFile found{};
    try {
        found.file = MappedFile(path);
    } catch (const Error&) { // it is made anew, and an error of the folder shows then
        return std::nullopt;
    }
    const std::span<const std::byte> bytes = found.file.bytes();
    if (bytes.size() < sizeof found.header) {
        return std::nullopt;
    }
    std::memcpy(&found.header, bytes.data(), sizeof found.header);
    return is_whole(found.header, bytes.size()) ? std::optional(std::move(found)) : std::nullopt;
}

void write_token_file(const fs::path& path, std::uint64_t fingerprint, const TextFiles& text,
                      const Tokenizer& tokenizer, const TokeniseOptions& options) {
    TokenFileHeader header{};
    NewFile file(path);
    file.write(&header, sizeof header); // again when the numbers are known
    const Tokenised done =
        tokenise(text, tokenizer, options, [&](std::span<const std::uint8_t> tokens) {
            file.write(tokens.data(), tokens.size());
        });
    file.write(done.binary.data(), done.binary.size() * sizeof(std::uint64_t));
    header.magic = kMagic;
    header.version = kVersion;
    header.token_bytes = token_bytes(tokenizer.vocabulary());
    header.vocabulary = tokenizer.vocabulary();
    header.fingerprint = fingerprint;
    header.num_tokens = done.num_tokens;
    header.num_text_bytes = done.num_text_bytes;
    header.num_documents = done.num_documents;
    header.content = done.content;
    header.num_binary = done.binary.size();
    file.write_first(&header, sizeof header);
    file.put_in_place();
}

} // namespace bellows::text
