// SPDX-License-Identifier: MIT
#include "link_transfer.hpp"

#include "seal.hpp"

#include <bellows/base/error.hpp>

#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>

namespace bellows {

namespace {

/// What a source tells: the block's id and bytes, the message's bytes, then each run's offset;
/// sealed.
constexpr std::size_t kId = 0, kBlockBytes = 1, kBytes = 2, kOffsets = 3;

/// What the two tell each other, where a transfer may still touch it after it was given up.
struct Words {
    std::vector<std::uint64_t> told;
    std::uint64_t taken = 0; ///< bytes, as the destination says
};
using WordsPtr = std::shared_ptr<Words>;

/// Gives both up; false, and the words stay for ever, if that cannot be known of both.
bool give_up(Transfer& where, Transfer& answer, const WordsPtr& words) noexcept {
    const bool told = where.cancel(), answered = answer.cancel();
    if (!told || !answered)
        static_cast<void>(new (std::nothrow) WordsPtr(words));
    return told && answered;
}

Tag answer_to(Tag tag) noexcept {
    return {tag.sequence, tag.stream + Tag::kStreams / 2};
}

class LinkSend final : public Transfer::State {
public:
    LinkSend(Transport& transport, int peer, Tag tag, std::shared_ptr<LinkBlock> from,
             const std::vector<MemoryRun>& runs)
        : from_(std::move(from)), bytes_(total_bytes(runs)) {
        transport.device_link()->pass(peer, *from_);
        words_->told = {from_->id(), from_->bytes(), bytes_};
        for (const MemoryRun& run : runs)
            words_->told.push_back(run.offset);
        seal(words_->told, tag.sequence, transport.rank());
        where_ = transport.post_send(peer, tag, std::as_bytes(std::span(words_->told)));
        answer_ = transport.post_recv(peer, answer_to(tag),
                                      std::as_writable_bytes(std::span(&words_->taken, 1)));
    }

    bool test() override {
        const bool told = where_.test();
        return answer_.test() && told;
    }
    /// The peer has the block open for as long as it copies.
    bool cancel() noexcept override { return give_up(where_, answer_, words_); }
    std::uint64_t seen_bytes() const noexcept override { return answer_.done() ? bytes_ : 0; }

private:
    std::shared_ptr<LinkBlock> from_;
    std::uint64_t bytes_;
    WordsPtr words_ = std::make_shared<Words>();
    Transfer where_, answer_; // gone before the words
};

class LinkReceive final : public Transfer::State {
public:
    LinkReceive(Transport& transport, int peer, Tag tag, std::shared_ptr<LinkBlock> to,
                std::vector<MemoryRun> runs, OpenedBlocks& opened, std::function<void()> on_copy)
        : transport_(transport), peer_(peer), tag_(tag), to_(std::move(to)), runs_(std::move(runs)),
          bytes_(total_bytes(runs_)), opened_(opened), on_copy_(std::move(on_copy)),
          words_(std::make_shared<Words>()) {
        words_->told.resize(kOffsets + runs_.size() + 1);
        words_->taken = bytes_;
        where_ = transport.post_recv(peer, tag, std::as_writable_bytes(std::span(words_->told)));
    }

    bool test() override {
        if (!taken_) {
            if (!copy_ && !begin_copy())
                return false;
            if (!copy_->done())
                return false;
            copy_.reset();
            answer_ = transport_.post_send(peer_, answer_to(tag_),
                                           std::as_bytes(std::span(&words_->taken, 1)));
            taken_ = true;
        }
        return answer_.test();
    }
    bool cancel() noexcept override {
        copy_.reset(); // ends it
        return give_up(where_, answer_, words_);
    }
    std::uint64_t seen_bytes() const noexcept override { return taken_ ? bytes_ : 0; }

private:
    /// False: the source has not told where, or its block has not come.
    bool begin_copy() {
        if (!where_.test())
            return false;
        const std::vector<std::uint64_t>& told = words_->told;
        if (!heard_)
            unsealed<std::uint64_t>(told, tag_.sequence, peer_);
        heard_ = true;
        DeviceLink& link = *transport_.device_link();
        source_ = link.open(peer_, told[kId], told[kBlockBytes], opened_);
        if (!source_)
            return false;
        std::vector<LinkRange> ranges;
        bool good = told[kBytes] == bytes_;
        for (std::size_t i = 0; good && i < runs_.size(); ++i) {
            const std::uint64_t offset = told[kOffsets + i];
            good =
                runs_[i].bytes <= source_->bytes() && offset <= source_->bytes() - runs_[i].bytes;
            ranges.push_back(
                {to_->address() + runs_[i].offset, source_->address() + offset, runs_[i].bytes});
        }
        if (!good)
            throw Error(ErrorCode::Corrupt,
                        "rank " + std::to_string(transport_.rank()) + " expected " +
                            std::to_string(bytes_) + " bytes from rank " + std::to_string(peer_) +
                            ", which offers " + std::to_string(told[kBytes]) + " of a block of " +
                            std::to_string(source_->bytes()) +
                            ": the two disagree about the exchange",
                        peer_);
        copy_ = link.copy_from(peer_, std::move(ranges));
        if (on_copy_)
            on_copy_();
        return true;
    }

    Transport& transport_;
    int peer_;
    Tag tag_;
    std::shared_ptr<LinkBlock> to_;
    std::vector<MemoryRun> runs_;
    std::uint64_t bytes_;
    OpenedBlocks& opened_;
    std::function<void()> on_copy_;
    WordsPtr words_;
    bool heard_ = false, taken_ = false;
    std::shared_ptr<LinkMemory> source_; ///< kept until the copy is done
    Transfer where_, answer_;            // gone before the words
    std::unique_ptr<LinkCopy> copy_;
};

} // namespace

Transfer post_link_send(Transport& transport, int peer, Tag tag, std::shared_ptr<LinkBlock> from,
                        const std::vector<MemoryRun>& runs) {
    auto state = std::make_unique<LinkSend>(transport, peer, tag, std::move(from), runs);
    return Transfer(Direction::Send, peer, tag, total_bytes(runs), std::move(state));
}

Transfer post_link_recv(Transport& transport, int peer, Tag tag, std::shared_ptr<LinkBlock> to,
                        std::vector<MemoryRun> runs, OpenedBlocks& opened,
                        std::function<void()> on_copy) {
    const std::uint64_t bytes = total_bytes(runs);
    auto state = std::make_unique<LinkReceive>(transport, peer, tag, std::move(to), std::move(runs),
                                               opened, std::move(on_copy));
    return Transfer(Direction::Receive, peer, tag, bytes, std::move(state));
}

} // namespace bellows
