// SPDX-License-Identifier: MIT
#include "bpe.hpp"

#include <bellows/base/mix.hpp>

#include <algorithm>
#include <utility>

namespace bellows::text {

namespace {

constexpr std::uint64_t kFree = ~std::uint64_t{0};

std::uint64_t pair_of(std::uint32_t left, std::uint32_t right) noexcept {
    return std::uint64_t{left} << 32 | right;
}

/// For a heap whose top has the lowest rank, the leftmost of equal ones.
struct Later {
    bool operator()(const Bpe::Scratch::Candidate& a,
                    const Bpe::Scratch::Candidate& b) const noexcept {
        return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
    }
};

} // namespace

Bpe::Bpe(TokenIds tokens, bool whole_pieces)
    : tokens_(std::move(tokens)), whole_pieces_(whole_pieces) {
    for (int byte = 0; byte < 256; ++byte) {
        const char text = static_cast<char>(byte);
        const auto found = tokens_.find(std::string_view(&text, 1));
        of_byte_[static_cast<std::size_t>(byte)] =
            found == tokens_.end() ? -1 : std::int64_t{found->second};
    }
    reserve(0);
}

void Bpe::reserve(std::size_t merges) {
    std::size_t size = 16;
    while (size < 2 * merges) {
        size *= 2;
    }
    std::vector<Slot> old(size, Slot{kFree, {0, 0}});
    old.swap(table_);
    for (const Slot& slot : old) {
        if (slot.pair != kFree) {
            insert(slot);
        }
    }
}

void Bpe::insert(const Slot& slot) noexcept {
    const std::size_t mask = table_.size() - 1;
    std::size_t at = mix(slot.pair) & mask;
    while (table_[at].pair != kFree && table_[at].pair != slot.pair) {
        at = (at + 1) & mask;
    }
    table_[at] = slot;
}

void Bpe::add_merge(std::uint32_t left, std::uint32_t right, Merge merge) {
    if (2 * (num_merges_ + 1) > table_.size()) {
        reserve(2 * (num_merges_ + 1));
    }
    ++num_merges_;
    insert({pair_of(left, right), merge});
}

const Bpe::Merge* Bpe::find(std::uint32_t left, std::uint32_t right) const noexcept {
    const std::uint64_t pair = pair_of(left, right);
    const std::size_t mask = table_.size() - 1;
    for (std::size_t at = mix(pair) & mask;; at = (at + 1) & mask) {
        if (table_[at].pair == pair) {
            return &table_[at].merge;
        }
        if (table_[at].pair == kFree) {
            return nullptr;
        }
    }
}

/// The pair that begins at a symbol, if it can be joined.
void Bpe::offer(Scratch& scratch, std::int32_t at) const {
    const Scratch::Symbol& left = scratch.symbols[static_cast<std::size_t>(at)];
    if (left.next < 0) {
        return;
    }
    const Scratch::Symbol& right = scratch.symbols[static_cast<std::size_t>(left.next)];
    if (const Merge* merge = find(left.id, right.id)) {
        scratch.heap.push_back({merge->rank, static_cast<std::uint32_t>(at), merge->id});
        std::push_heap(scratch.heap.begin(), scratch.heap.end(), Later());
    }
}

void Bpe::encode(std::string_view piece, Scratch& scratch, std::vector<std::uint32_t>& ids) const {
    if (whole_pieces_) {
        if (const auto found = tokens_.find(piece); found != tokens_.end()) {
            ids.push_back(found->second);
            return;
        }
    }
    auto& symbols = scratch.symbols;
    symbols.clear();
    scratch.heap.clear();
    for (const char c : piece) {
        const std::int64_t id = of_byte_[static_cast<unsigned char>(c)];
        if (id >= 0) {
            const auto at = static_cast<std::int32_t>(symbols.size());
            symbols.push_back({static_cast<std::uint32_t>(id), at - 1, at + 1, false});
        }
    }
    if (symbols.empty()) {
        return;
    }
    symbols.back().next = -1;
    for (std::size_t at = 0; at + 1 < symbols.size(); ++at) {
        offer(scratch, static_cast<std::int32_t>(at));
    }
    while (!scratch.heap.empty()) {
        const Scratch::Candidate best = scratch.heap.front();
        std::pop_heap(scratch.heap.begin(), scratch.heap.end(), Later());
        scratch.heap.pop_back();
        Scratch::Symbol& left = symbols[best.at];
        if (left.gone || left.next < 0) {
            continue;
        }
        Scratch::Symbol& right = symbols[static_cast<std::size_t>(left.next)];
        const Merge* merge = find(left.id, right.id);
        if (merge == nullptr || merge->id != best.id) {
            continue; // one of the two has been joined with another since
        }
        left.id = best.id;
        right.gone = true;
        left.next = right.next;
        if (right.next >= 0) {
            symbols[static_cast<std::size_t>(right.next)].before =
                static_cast<std::int32_t>(best.at);
        }
        if (left.before >= 0) {
            offer(scratch, left.before);
        }
        offer(scratch, static_cast<std::int32_t>(best.at));
    }
    for (std::int32_t at = 0; at >= 0; at = symbols[static_cast<std::size_t>(at)].next) {
        ids.push_back(symbols[static_cast<std::size_t>(at)].id);
    }
}

} // namespace bellows::text
