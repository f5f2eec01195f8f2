// SPDX-License-Identifier: MIT
#include "control_mesh.hpp"

#include "control_handshake.hpp"
#include "deadline.hpp"
#include "siphash.hpp"
#include "socket.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <limits.h>
#include <optional>
#include <sstream>
#include <unistd.h>

namespace bellows {
namespace {

constexpr Milliseconds kAddressTimeout{1500};
constexpr int kBacklog = 128; // of connections that nobody has taken yet

// What a rank publishes about itself; travels as lines of text.
struct Card {
    std::string key_hex, locality, host, unix_name;
    std::int64_t pid = 0;

    std::string encode() const {
        return key_hex + "\n" + locality + "\n" + host + "\n" + unix_name + "\n" +
               std::to_string(pid) + "\n";
    }
    static Card decode(const std::string& text, int rank) {
        std::istringstream in(text);
        Card card;
        std::getline(in, card.key_hex);
        std::getline(in, card.locality);
        std::getline(in, card.host);
        std::getline(in, card.unix_name);
        in >> card.pid;
        if (!in || card.key_hex.size() != 2 * sizeof(SipKey))
            throw Error(ErrorCode::Corrupt,
                        "rank " + std::to_string(rank) + " sent a set-up card that cannot be read",
                        rank);
        return card;
    }
};

std::string to_hex(std::span<const std::byte> bytes) {
    static constexpr char digits[] = "0123456789abcdef";
    std::string text;
    for (const std::byte byte : bytes) {
        text += digits[std::to_integer<unsigned>(byte) >> 4];
        text += digits[std::to_integer<unsigned>(byte) & 15];
    }
    return text;
}

SipKey key_from_hex(const std::string& text) {
    SipKey key{};
    for (std::size_t i = 0; i < key.size(); ++i)
        key[i] = static_cast<std::uint8_t>(std::stoul(text.substr(2 * i, 2), nullptr, 16));
    return key;
}

// Equal exactly for processes that can reach each other's abstract Unix sockets.
std::string locality() {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    std::array<char, 128> name{};
    const ssize_t length = ::readlink("/proc/self/ns/net", name.data(), name.size() - 1);
    return boot + " " +
           std::string(name.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
}

std::string host_name() {
    std::array<char, HOST_NAME_MAX + 1> name{};
    ::gethostname(name.data(), name.size() - 1);
    return name.data();
}

struct TcpAddress {
    std::uint16_t port = 0;
    std::vector<std::string> addresses;

    std::string encode() const {
        std::string text = std::to_string(port);
        for (const std::string& address : addresses)
            text += " " + address;
        return text;
    }
    static TcpAddress decode(const std::string& text) {
        std::istringstream in(text);
        TcpAddress result;
        in >> result.port;
        for (std::string address; in >> address;)
            result.addresses.push_back(address);
        return result;
    }
};

class MeshBuilder {
public:
    MeshBuilder(int rank, int size, const ControlOptions& options,
                const ControlPlane::AllGather& all_gather)
        : rank_(rank), size_(size), deadline_(options.setup_timeout),
          connections_(static_cast<std::size_t>(size)) {
        exchange_cards(options, all_gather);
        for (int peer = 0; peer < rank_; ++peer)
            connect(peer);
        accept_higher_ranks();
    }

    std::vector<MeshConnection> take() { return std::move(connections_); }

private:
    void exchange_cards(const ControlOptions& options, const ControlPlane::AllGather& all_gather) {
        std::array<std::byte, sizeof(SipKey)> secret{};
        std::array<std::byte, 12> name{};
        net::fill_random(secret);
        net::fill_random(name);
        Card mine{to_hex(secret), locality(), host_name(),
                  "bellows-" + to_hex(name) + "-" + std::to_string(rank_), ::getpid()};
        if (options.force_tcp)
            mine.locality += " rank " + std::to_string(rank_);
        unix_listener_ = net::listen_unix(mine.unix_name, size_ + kBacklog);

        const std::vector<std::string> texts = all_gather(mine.encode());
        bool all_local = true;
        for (int peer = 0; peer < size_; ++peer) {
            cards_.push_back(Card::decode(texts[static_cast<std::size_t>(peer)], peer));
            all_local = all_local && cards_.back().locality == cards_.front().locality;
        }
        key_ = key_from_hex(cards_.front().key_hex);
        for (int peer = 0; peer < size_; ++peer) {
            auto& connection = connections_[static_cast<std::size_t>(peer)];
            connection.pid = card(peer).pid;
            connection.host = card(peer).host;
        }
        if (!all_local)
            exchange_tcp_addresses(all_gather);
    }

    // Loopback comes last: it serves ranks that share a host but not a network namespace's Unix
    // sockets, and a wrong rank found there fails the handshake.
    void exchange_tcp_addresses(const ControlPlane::AllGather& all_gather) {
        TcpAddress mine;
        tcp_listener_ = net::listen_tcp(size_ + kBacklog, mine.port);
        mine.addresses = net::interface_addresses();
        mine.addresses.emplace_back("127.0.0.1");
        for (const std::string& text : all_gather(mine.encode()))
            tcp_.push_back(TcpAddress::decode(text));
    }

    const Card& card(int peer) const { return cards_[static_cast<std::size_t>(peer)]; }
    bool is_local(int peer) const { return card(peer).locality == card(rank_).locality; }

    void connect(int peer) {
        while (!deadline_.expired()) {
            if (is_local(peer) ? connect_unix(peer) : connect_tcp(peer))
                return;
            std::this_thread::sleep_for(Milliseconds{20});
        }
        throw Error(ErrorCode::Timeout,
                    "rank " + std::to_string(rank_) + " could not connect to rank " +
                        std::to_string(peer) + " (pid " + std::to_string(card(peer).pid) + " on " +
                        card(peer).host + ") within " +
                        std::to_string(deadline_.elapsed().count()) +
                        " ms; check that the hosts reach each other over TCP on any port",
                    peer);
    }

    bool connect_unix(int peer) {
        FileDescriptor socket = net::connect_unix(card(peer).unix_name, deadline_);
        if (!socket || net::peer_credentials(socket.get()).uid != ::geteuid())
            return false;
        return keep_if_introduced(peer, std::move(socket), true);
    }

    bool connect_tcp(int peer) {
        const TcpAddress& target = tcp_[static_cast<std::size_t>(peer)];
        for (const std::string& address : target.addresses) {
            const Deadline limit(std::min(kAddressTimeout, deadline_.remaining()));
            FileDescriptor socket = net::connect_tcp(address, target.port, limit);
            if (socket && keep_if_introduced(peer, std::move(socket), false))
                return true;
        }
        return false;
    }

    bool keep_if_introduced(int peer, FileDescriptor socket, bool is_unix) {
        const std::optional<FrameKey> key = introduce(socket.get(), key_, rank_, peer);
        if (key)
            keep(peer, {std::move(socket), is_unix}, *key);
        return key.has_value();
    }

    // A peer that came again gave its first connection up: the newest one counts.
    void keep(int peer, Caller caller, const FrameKey& key) {
        auto& connection = connections_[static_cast<std::size_t>(peer)];
        if (!caller.is_unix)
            net::set_no_delay(caller.socket.get());
        connection.socket = std::move(caller.socket);
        connection.frame_key = key;
        connection.passes_fds = caller.is_unix;
    }

    void accept_higher_ranks() {
        Reception reception(key_, rank_, size_);
        while (is_anyone_missing()) {
            if (deadline_.expired())
                throw Error(ErrorCode::Timeout, missing_text());
            reception.serve(unix_listener_.get(), tcp_listener_.get(), Milliseconds{20},
                            [this](int peer, Caller caller, const FrameKey& key) {
                                if (is_local(peer) == caller.is_unix)
                                    keep(peer, std::move(caller), key);
                            });
        }
    }

    bool is_anyone_missing() const {
        return std::any_of(connections_.begin() + rank_ + 1, connections_.end(),
                           [](const MeshConnection& c) { return !c.socket; });
    }

    std::string missing_text() const {
        std::string text = "rank " + std::to_string(rank_) + " waited " +
                           std::to_string(deadline_.elapsed().count()) +
                           " ms for the control connection of rank";
        for (int peer = rank_ + 1; peer < size_; ++peer)
            if (!connections_[static_cast<std::size_t>(peer)].socket)
                text += " " + std::to_string(peer);
        return text + "; check that the hosts reach each other over TCP on any port";
    }

    int rank_;
    int size_;
    Deadline deadline_;
    SipKey key_{};
    std::vector<Card> cards_;
    std::vector<TcpAddress> tcp_;
    FileDescriptor unix_listener_;
    FileDescriptor tcp_listener_;
    std::vector<MeshConnection> connections_;
};

} // namespace

std::vector<MeshConnection> connect_mesh(int rank, int size, const ControlOptions& options,
                                         const ControlPlane::AllGather& all_gather) {
    return MeshBuilder(rank, size, options, all_gather).take();
}

} // namespace bellows
