// SPDX-License-Identifier: MIT

// Transport between the ranks of a node through the segments of NodeMemory. Towards each peer a
// rank has an outbox at the head of its segment: slots, each of which says where in the segment a
// message stands, and a ring with the slots' numbers in the order of posting. The sender fills a
// free slot and counts it as posted; the receiver takes the message and empties the slot, which
// tells the sender. Nobody is called and nothing is locked.
// Bytes that do not stand in the segment are copied there first.

#include "node_memory.hpp"
#include "transports.hpp"
#include "world/deadline.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <utility>

namespace bellows {
namespace {

/// Messages to one peer that it has not received yet, in any order; more wait at the sender.
constexpr std::uint64_t kSlots = 4096;
/// What has been copied to be sent is done with, if it is not larger.
constexpr std::uint64_t kMostBuffered = std::uint64_t{64} << 10;
/// Copied at a look, so that other work of the thread gets its turn.
constexpr std::uint64_t kBytesPerLook = std::uint64_t{1} << 20;

enum class SlotState : std::uint32_t { Empty, Posted, Taken, Cancelled };

struct alignas(64) Slot {
    std::atomic<SlotState> state; ///< the sender posts and cancels, the receiver takes and empties
    std::uint32_t stream;
    std::uint64_t sequence;
    std::uint64_t offset, bytes; ///< in the sender's segment
    NodeMemory::Block block;     ///< in which they lie
    std::uint32_t lasts;         ///< the block is more than this message's
};
static_assert(sizeof(Slot) == 64 && std::atomic<SlotState>::is_always_lock_free);

struct Outbox {
    alignas(64) std::atomic<std::uint64_t> posted; ///< message n stands in slot order[n % kSlots]
    alignas(64) std::atomic<std::uint64_t> seen;   ///< by the receiver, whether or not received
    std::array<std::uint32_t, kSlots> order;
    std::array<Slot, kSlots> slots;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

using Key = std::pair<std::uint64_t, std::uint32_t>;

struct OutMessage {
    Tag tag;
    NodeMemory::Block block;
    std::uint64_t offset = 0, bytes = 0;
    // Set by whoever progresses, read by whoever describes.
    std::atomic<bool> owns_block{false}; ///< a copy of what was posted
    std::atomic<Slot*> slot{nullptr};    ///< null before it is posted
    std::atomic<bool> done{false};       ///< received or given up
};
using OutMessagePtr = std::shared_ptr<OutMessage>;

struct InMessage {
    std::span<std::byte> target;
    std::uint64_t expected = 0;
    bool in_place = false;
    Slot* slot = nullptr; ///< null before it has come, and after it was given back
    std::uint64_t copied = 0;
    bool cancelled = false;
};
using InMessagePtr = std::shared_ptr<InMessage>;

struct Matching {
    std::deque<Slot*> arrived;
    std::deque<InMessagePtr> posted;
};

struct Peer {
    Outbox* out = nullptr;                                        ///< in our segment
    Outbox* in = nullptr;                                         ///< in the peer's
    std::uint64_t num_sent = 0;                                   ///< to the peer
    std::uint64_t num_seen = 0;                                   ///< of the peer's
    std::vector<std::pair<std::uint32_t, OutMessagePtr>> in_slot; ///< not received yet
    std::vector<std::uint32_t> free_slots;
    std::deque<OutMessagePtr> waiting; ///< for a slot
    std::map<Key, Matching> matching;
};

/// What the transport and its transfers share.
struct Node {
    Node(World& world, const TransportOptions& options)
        : control(world.control()),
          memory(world, static_cast<std::uint64_t>(world.local_size()) * sizeof(Outbox),
                 options.share_memory, options.setup_timeout),
          peers(static_cast<std::size_t>(world.size())) {
        const auto outbox = [&](std::byte* segment, int of) {
            return reinterpret_cast<Outbox*>(segment) + world.topology().local_rank(of);
        };
        for (int peer = 0; peer < world.size(); ++peer) {
            if (!memory.reaches(peer))
                continue;
            peers[static_cast<std::size_t>(peer)] = std::make_unique<Peer>();
            at(peer).out = outbox(memory.mine(), peer);
            at(peer).in = outbox(memory.of(peer), world.rank());
            at(peer).free_slots.resize(kSlots);
            std::iota(at(peer).free_slots.rbegin(), at(peer).free_slots.rend(), 0u);
        }
    }

    Peer& at(int peer) const { return *peers[static_cast<std::size_t>(peer)]; }

    void post(Peer& peer, const OutMessagePtr& message) {
        if (!peer.waiting.empty() || !fill_slot(peer, message))
            peer.waiting.push_back(message);
    }

    bool fill_slot(Peer& peer, const OutMessagePtr& message) {
        clear_slots(peer);
        const std::uint64_t seen = peer.out->seen.load(std::memory_order_acquire);
        if (peer.free_slots.empty() || peer.num_sent - seen >= kSlots)
            return false;
        const std::uint32_t index = peer.free_slots.back();
        peer.free_slots.pop_back();
        Slot& slot = peer.out->slots[index];
        slot.stream = message->tag.stream;
        slot.sequence = message->tag.sequence;
        slot.offset = message->offset;
        slot.bytes = message->bytes;
        slot.block = message->block;
        slot.lasts = message->owns_block ? 0 : 1;
        slot.state.store(SlotState::Posted, std::memory_order_relaxed);
        message->slot = &slot;
        peer.in_slot.emplace_back(index, message);
        peer.out->order[peer.num_sent % kSlots] = index;
        peer.out->posted.store(++peer.num_sent, std::memory_order_release);
        return true;
    }

    void clear_slots(Peer& peer) {
        std::erase_if(peer.in_slot, [&](const auto& sent) {
            if (!received(*sent.second))
                return false;
            peer.free_slots.push_back(sent.first);
            return true;
        });
    }

    /// Whether the message's slot has been emptied; a message that was given up still has one.
    bool received(OutMessage& message) {
        const Slot* slot = message.slot;
        if (slot == nullptr)
            return message.done;
        if (slot->state.load(std::memory_order_acquire) != SlotState::Empty)
            return false;
        message.slot = nullptr;
        finish(message);
        return true;
    }

    void finish(OutMessage& message) {
        message.done = true;
        if (message.owns_block.exchange(false))
            memory.free(message.block);
    }

    /// Sends what waited for a slot and looks what has come.
    void progress() {
        for (std::size_t rank = 0; rank < peers.size(); ++rank)
            if (peers[rank])
                progress(static_cast<int>(rank));
    }

    void progress(int rank) {
        Peer& peer = at(rank);
        clear_slots(peer);
        while (!peer.waiting.empty() &&
               (peer.waiting.front()->done || fill_slot(peer, peer.waiting.front())))
            peer.waiting.pop_front();
        const std::uint64_t posted = peer.in->posted.load(std::memory_order_acquire);
        const std::uint64_t before = peer.num_seen;
        for (; peer.num_seen < posted; ++peer.num_seen) {
            const std::uint32_t index = peer.in->order[peer.num_seen % kSlots];
            Slot& slot = peer.in->slots[index % kSlots];
            require_inside(slot, rank);
            const Key key{slot.sequence, slot.stream};
            peer.matching[key].arrived.push_back(&slot);
            match(peer, key);
        }
        if (peer.num_seen != before)
            peer.in->seen.store(posted, std::memory_order_release);
    }

    /// Nothing outside of the sender's segment is ever read.
    void require_inside(const Slot& slot, int rank) const {
        const std::uint64_t size = memory.size_of(rank);
        const NodeMemory::Block& block = slot.block;
        const bool good = block.bytes <= size && block.offset <= size - block.bytes &&
                          slot.bytes <= block.bytes && slot.offset >= block.offset &&
                          slot.offset - block.offset <= block.bytes - slot.bytes;
        if (!good)
            throw Error(ErrorCode::Corrupt,
                        "rank " + std::to_string(rank) +
                            " has posted a message that lies outside of the memory it shares",
                        rank);
    }

    void match(Peer& peer, const Key& key) {
        const auto found = peer.matching.find(key);
        auto& [arrived, posted] = found->second;
        while (!arrived.empty() && !posted.empty()) {
            if (posted.front()->cancelled) {
                posted.pop_front();
                continue;
            }
            Slot* const slot = arrived.front();
            arrived.pop_front();
            SlotState expected = SlotState::Posted;
            if (!slot->state.compare_exchange_strong(expected, SlotState::Taken,
                                                     std::memory_order_acquire)) {
                give_back(*slot); // its sender has given it up
                continue;
            }
            posted.front()->slot = slot;
            posted.pop_front();
        }
        if (arrived.empty() && posted.empty())
            peer.matching.erase(found);
    }

    static void give_back(Slot& slot) noexcept {
        slot.state.store(SlotState::Empty, std::memory_order_release);
    }

    ControlPlane& control;
    NodeMemory memory;
    std::vector<std::unique_ptr<Peer>> peers; ///< by rank; null for those that are not reached
};
using NodePtr = std::shared_ptr<Node>;

class SendState final : public Transfer::State {
public:
    SendState(NodePtr node, int peer, OutMessagePtr message)
        : node_(std::move(node)), peer_(peer), message_(std::move(message)) {}
    ~SendState() override { cancel(); }

    bool test() override {
        node_->control.throw_if_failed();
        if (message_->slot == nullptr)
            node_->progress(peer_);
        if (message_->done || buffered() || node_->received(*message_))
            return true;
        node_->control.throw_if_lost(peer_);
        return false;
    }

    bool cancel() noexcept override {
        OutMessage& message = *message_;
        if (buffered())
            return true; // on its way
        if (message.done || message.slot == nullptr || node_->received(message)) {
            node_->finish(message);
            return true;
        }
        SlotState expected = SlotState::Posted;
        if (message.slot.load()->state.compare_exchange_strong(expected, SlotState::Cancelled)) {
            node_->finish(message); // the slot is in use until the peer has passed by
            return true;
        }
        const Deadline deadline(Milliseconds{100});
        Backoff backoff;
        while (!node_->received(message)) { // the peer is copying
            if (node_->control.failed())
                return true; // whatever it reads is of no use to it
            if (deadline.expired())
                return false;
            backoff.pause();
        }
        return true;
    }

    std::uint64_t seen_bytes() const noexcept override {
        return message_->done || buffered() ? message_->bytes : 0;
    }

private:
    /// The peer gets it whatever this rank does from here on.
    bool buffered() const noexcept {
        return message_->owns_block && message_->slot != nullptr &&
               message_->bytes <= kMostBuffered;
    }

    NodePtr node_;
    int peer_;
    OutMessagePtr message_;
};

class ReceiveState final : public Transfer::State {
public:
    ReceiveState(NodePtr node, int peer, InMessagePtr message)
        : node_(std::move(node)), peer_(peer), message_(std::move(message)) {}
    ~ReceiveState() override { cancel(); }

    bool test() override {
        node_->control.throw_if_failed();
        InMessage& message = *message_;
        if (message.slot == nullptr)
            node_->progress(peer_);
        if (message.slot == nullptr) {
            node_->control.throw_if_lost(peer_);
            return false;
        }
        if (message.slot->bytes != message.expected)
            throw_size(message.slot->bytes);
        if (message.in_place) {
            message.copied = message.expected;
            return true;
        }
        const std::uint64_t now = std::min(kBytesPerLook, message.expected - message.copied);
        if (now > 0)
            std::memcpy(message.target.data() + message.copied,
                        source(*message.slot) + message.copied, now);
        message.copied += now;
        if (message.copied < message.expected)
            return false;
        give_back();
        return true;
    }

    bool cancel() noexcept override {
        message_->cancelled = true;
        give_back();
        return true;
    }

    std::uint64_t seen_bytes() const noexcept override { return message_->copied; }

    InPlace in_place() const noexcept override {
        if (!message_->in_place || message_->slot == nullptr)
            return {};
        const Slot& slot = *message_->slot;
        return {{source(slot), slot.bytes},
                {node_->memory.of(peer_) + slot.block.offset, slot.block.bytes},
                slot.block.id,
                slot.lasts != 0,
                node_};
    }

private:
    const std::byte* source(const Slot& slot) const noexcept {
        return node_->memory.of(peer_) + slot.offset;
    }

    void give_back() noexcept {
        if (Slot* const slot = std::exchange(message_->slot, nullptr))
            Node::give_back(*slot);
    }

    [[noreturn]] void throw_size(std::uint64_t came) {
        message_->copied = came;
        give_back();
        throw Error(ErrorCode::Corrupt,
                    "rank " + std::to_string(node_->control.rank()) + " expected " +
                        std::to_string(message_->expected) + " bytes from rank " +
                        std::to_string(peer_) + ", but " + std::to_string(came) +
                        " came: the two disagree about the exchange",
                    peer_);
    }

    NodePtr node_;
    int peer_;
    InMessagePtr message_;
};

class NodeTransport final : public Transport {
public:
    NodeTransport(World& world, NodePtr node, std::unique_ptr<Transport> network)
        : Transport(world), node_(std::move(node)), network_(std::move(network)) {
        for (int peer = 0; peer < size(); ++peer)
            needs_network_ = needs_network_ || (peer != rank() && !reads_in_place(peer));
    }

    std::string_view name() const noexcept override {
        return needs_network_ ? "shared memory and mpi" : "shared memory";
    }

    Transfer post_send(int peer, Tag tag, std::span<const std::byte> bytes) override {
        require(peer, tag);
        if (!reads_in_place(peer))
            return network_->post_send(peer, tag, bytes);
        auto message = std::make_shared<OutMessage>();
        message->tag = tag;
        message->bytes = bytes.size();
        const auto at = [&](std::uint64_t offset) { return node_->memory.mine() + offset; };
        if (const auto block = node_->memory.holding(bytes)) {
            message->block = *block;
            message->offset = static_cast<std::uint64_t>(bytes.data() - at(0));
        } else {
            message->block = node_->memory.allocate(bytes.size());
            message->owns_block = true;
            message->offset = message->block.offset;
            if (!bytes.empty())
                std::memcpy(at(message->offset), bytes.data(), bytes.size());
        }
        node_->post(node_->at(peer), message);
        return Transfer(Direction::Send, peer, tag, bytes.size(),
                        std::make_unique<SendState>(node_, peer, std::move(message)));
    }

    Transfer post_recv(int peer, Tag tag, std::span<std::byte> bytes) override {
        require(peer, tag);
        if (!reads_in_place(peer))
            return network_->post_recv(peer, tag, bytes);
        return receive(peer, tag, {.target = bytes, .expected = bytes.size()});
    }

    Transfer post_recv_in_place(int peer, Tag tag, std::uint64_t bytes) override {
        require(peer, tag);
        if (!reads_in_place(peer))
            return Transport::post_recv_in_place(peer, tag, bytes);
        return receive(peer, tag, {.target = {}, .expected = bytes, .in_place = true});
    }

    void progress() override {
        control().throw_if_failed();
        node_->progress();
        if (needs_network_)
            network_->progress();
    }

    bool reads_in_place(int peer) const noexcept override { return node_->memory.reaches(peer); }

    SharedMemory share(std::uint64_t bytes) override {
        struct Owner {
            NodePtr node;
            NodeMemory::Block block;
            ~Owner() { node->memory.free(block); }
        };
        const NodeMemory::Block block = node_->memory.allocate(bytes);
        return {{node_->memory.mine() + block.offset, block.bytes},
                std::shared_ptr<Owner>(new Owner{node_, block})};
    }

private:
    Transfer receive(int peer, Tag tag, InMessage wanted) {
        const std::uint64_t bytes = wanted.expected;
        auto message = std::make_shared<InMessage>(std::move(wanted));
        const Key key{tag.sequence, tag.stream};
        Peer& from = node_->at(peer);
        from.matching[key].posted.push_back(message);
        node_->match(from, key);
        return Transfer(Direction::Receive, peer, tag, bytes,
                        std::make_unique<ReceiveState>(node_, peer, std::move(message)));
    }

    NodePtr node_;
    std::unique_ptr<Transport> network_; ///< to this rank itself and to other nodes
    bool needs_network_ = false;
};

} // namespace

std::unique_ptr<Transport> make_node_transport(World& world, const TransportOptions& options,
                                               std::unique_ptr<Transport> network) {
    auto node = std::make_shared<Node>(world, options);
    if (!node->memory.reaches_any())
        return network;
    return std::make_unique<NodeTransport>(world, std::move(node), std::move(network));
}

} // namespace bellows
