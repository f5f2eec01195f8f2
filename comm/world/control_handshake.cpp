// SPDX-License-Identifier: MIT
#include "control_handshake.hpp"

#include "socket.hpp"

#include <array>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

namespace bellows {
namespace {

constexpr Milliseconds kTimeout{5000};
constexpr std::uint32_t kMagic = 0x42454c32; // "BEL2"; its byte order tells foreign hosts apart
constexpr std::size_t kMostStrangers = 64;

using Nonce = std::array<std::byte, 16>;

struct Hello {
    std::uint32_t magic = kMagic;
    std::uint32_t reserved = 0;
    std::int32_t from = -1;
    std::int32_t to = -1;
    Nonce nonce{};
};

struct Challenge {
    Nonce nonce{};
    SipTag proof{};
};

template <typename T>
std::span<std::byte> bytes_of(T& value) {
    return std::as_writable_bytes(std::span(&value, 1));
}

// What a tag is for, so that none serves twice: proof of the accepting and of the connecting rank,
// key of the frames.
enum class Purpose : char { Accepting = 'A', Connecting = 'C', Frames = 'F' };

SipTag tag_of(const SipKey& key, Purpose purpose, const Hello& hello, const Nonce& accept_nonce) {
    std::array<std::byte, 1 + sizeof(Hello) + sizeof(Nonce)> message{};
    message[0] = static_cast<std::byte>(purpose);
    std::memcpy(message.data() + 1, &hello, sizeof hello);
    std::memcpy(message.data() + 1 + sizeof hello, accept_nonce.data(), sizeof accept_nonce);
    return siphash_128(key, message);
}

} // namespace

std::optional<FrameKey> introduce(int socket, const SipKey& key, int from, int to) {
    const Deadline deadline(kTimeout);
    Hello hello;
    hello.from = from;
    hello.to = to;
    net::fill_random(hello.nonce);
    Challenge challenge;
    if (!net::write_exact(socket, bytes_of(hello), deadline) ||
        !net::read_exact(socket, bytes_of(challenge), deadline) ||
        !equal_constant_time(challenge.proof,
                             tag_of(key, Purpose::Accepting, hello, challenge.nonce)))
        return std::nullopt;
    SipTag answer = tag_of(key, Purpose::Connecting, hello, challenge.nonce);
    std::byte accepted{};
    if (!net::write_exact(socket, bytes_of(answer), deadline) ||
        !net::read_exact(socket, bytes_of(accepted), deadline))
        return std::nullopt;
    return FrameKey{tag_of(key, Purpose::Frames, hello, challenge.nonce), 1, 0};
}

/// A caller that has not introduced itself yet.
struct Reception::Pending {
    enum class Step { Hello, Answer };
    enum class Read { All, More, Failed };

    Caller caller;
    Deadline limit{kTimeout};
    Step step = Step::Hello;
    std::size_t read = 0; ///< bytes of the step
    Hello hello{};
    Challenge challenge{};
    SipTag answer{};

    Read read_on(std::span<std::byte> bytes) {
        while (read < bytes.size()) {
            const ssize_t got =
                ::recv(caller.socket.get(), bytes.data() + read, bytes.size() - read, MSG_DONTWAIT);
            if (got < 0 && errno == EINTR)
                continue;
            if (got < 0 && errno == EAGAIN)
                return Read::More;
            if (got <= 0)
                return Read::Failed;
            read += static_cast<std::size_t>(got);
        }
        read = 0;
        return Read::All;
    }
    /// A few bytes: a new connection takes them at once.
    bool write(std::span<const std::byte> bytes) const {
        return ::send(caller.socket.get(), bytes.data(), bytes.size(),
                      MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
    }
};

Reception::Reception(const SipKey& key, int self, int size)
    : key_(key), self_(self), size_(size), most_(kMostStrangers + static_cast<std::size_t>(size)) {
}

Reception::~Reception() = default;

void Reception::serve(int unix_listener, int tcp_listener, Milliseconds time,
                      const Welcome& welcome) {
    std::vector<pollfd> entries{{unix_listener, POLLIN, 0}, {tcp_listener, POLLIN, 0}};
    for (const Pending& pending : pending_)
        entries.push_back({pending.caller.socket.get(), POLLIN, 0});
    ::poll(entries.data(), entries.size(), static_cast<int>(time.count()));
    for (std::size_t i = 0, left = pending_.size(); i < left; ++i) {
        Pending pending = std::move(pending_.front());
        pending_.pop_front();
        const bool speaks = entries[2 + i].revents != 0;
        if (speaks ? advance(pending, welcome) : !pending.limit.expired())
            pending_.push_back(std::move(pending));
    }
    accept_all(unix_listener, true);
    accept_all(tcp_listener, false);
}

/// At most as many as may wait, so that a flood of them leaves time for those that wait already.
void Reception::accept_all(int listener, bool is_unix) {
    for (std::size_t i = 0; listener >= 0 && i < most_; ++i) {
        FileDescriptor socket = net::accept(listener, Deadline(Milliseconds{0}));
        if (!socket)
            return;
        if (is_unix && net::peer_credentials(socket.get()).uid != ::geteuid())
            continue;
        if (pending_.size() == most_)
            pending_.pop_front();
        pending_.push_back(Pending{{std::move(socket), is_unix}});
    }
}

/// False when it is done with: a stranger, or a rank that has been welcomed.
bool Reception::advance(Pending& pending, const Welcome& welcome) {
    if (pending.step == Pending::Step::Hello) {
        const Pending::Read read = pending.read_on(bytes_of(pending.hello));
        if (read != Pending::Read::All)
            return read == Pending::Read::More && !pending.limit.expired();
        const Hello& hello = pending.hello;
        if (hello.magic != kMagic || hello.to != self_ || hello.from <= self_ ||
            hello.from >= size_)
            return false;
        net::fill_random(pending.challenge.nonce);
        pending.challenge.proof = tag_of(key_, Purpose::Accepting, hello, pending.challenge.nonce);
        if (!pending.write(bytes_of(pending.challenge)))
            return false;
        pending.step = Pending::Step::Answer;
    }
    const Pending::Read read = pending.read_on(bytes_of(pending.answer));
    if (read != Pending::Read::All)
        return read == Pending::Read::More && !pending.limit.expired();
    const Hello& hello = pending.hello;
    const Nonce& nonce = pending.challenge.nonce;
    const std::byte accepted{1};
    if (equal_constant_time(pending.answer, tag_of(key_, Purpose::Connecting, hello, nonce)) &&
        pending.write(std::span(&accepted, 1)))
        welcome(hello.from, std::move(pending.caller),
                {tag_of(key_, Purpose::Frames, hello, nonce), 0, 1});
    return false;
}

} // namespace bellows
