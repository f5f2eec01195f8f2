// SPDX-License-Identifier: MIT
#include "block_reader.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <utility>

namespace bellows::text {

namespace {

constexpr std::size_t kBlock = std::size_t{512} << 10;

bool is_binary(std::string_view content) {
    return content.find('\0') != std::string_view::npos;
}

bool is_binary(int fd, const TextFile& file) {
    std::string part;
    for (std::uint64_t at = 0; at < file.bytes; at += part.size()) {
        part.resize(std::min<std::uint64_t>(kBlock, file.bytes - at));
        read_exactly(fd, part.data(), part.size(), at, file.path);
        if (is_binary(part)) {
            return true;
        }
    }
    return false;
}

} // namespace

bool BlockReader::next(Block& block) {
    block.text.clear();
    block.parts.clear();
    while (open_.get() < 0 && block.text.size() < kBlock) {
        if (!open_next(block)) {
            break;
        }
    }
    if (!block.parts.empty()) {
        return true;
    }
    if (open_.get() < 0) {
        return false;
    }
    read_more(kBlock + kLongestBlockTail + 1);
    const std::size_t end = block_end(buffer_, kBlock, unread_ == 0, cut_);
    block.text.assign(buffer_, 0, end);
    buffer_.erase(0, end);
    const bool ends = buffer_.empty() && unread_ == 0;
    block.parts.push_back({0, end, before_, ends});
    before_ = static_cast<unsigned char>(block.text.back());
    if (ends) {
        open_ = FileHandle();
    }
    return true;
}

/// Takes in the next file if it is small, opens it otherwise.
bool BlockReader::open_next(Block& block) {
    if (next_ == text_->files.size()) {
        return false;
    }
    const TextFile& next = text_->files[next_++];
    std::uint64_t bytes = 0;
    FileHandle opened = open_regular_file(next.path, bytes);
    if (next.bytes <= kBlock) {
        std::string content(next.bytes, '\0');
        read_exactly(opened.get(), content.data(), content.size(), 0, next.path);
        if (is_binary(content)) {
            leave_out();
            return true;
        }
        const std::size_t first = block.text.size();
        block.text += content;
        block.parts.push_back({first, block.text.size(), -1, true});
    } else {
        if (is_binary(opened.get(), next)) {
            leave_out();
            return true;
        }
        open_ = std::move(opened);
        unread_ = next.bytes;
        before_ = -1;
    }
    ++num_documents_;
    num_text_bytes_ += next.bytes;
    return true;
}

void BlockReader::leave_out() {
    if (file().named) {
        throw Error(ErrorCode::InvalidArgument,
                    "data " + in_quotes(file().path.string()) + " is a binary file, not text");
    }
    binary_.push_back(next_ - 1);
}

/// Until the buffer holds so many bytes, or the rest of the document.
void BlockReader::read_more(std::size_t bytes) {
    const std::size_t held = buffer_.size();
    const std::uint64_t more = std::min<std::uint64_t>(bytes - std::min(held, bytes), unread_);
    buffer_.resize(held + more);
    read_exactly(open_.get(), buffer_.data() + held, more, file().bytes - unread_, file().path);
    unread_ -= more;
}

} // namespace bellows::text
