// SPDX-License-Identifier: MIT
#include "socket.hpp"

#include <arpa/inet.h>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <system_error>
#include <unistd.h>

namespace bellows {

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
        reset();
        fd_ = other.release();
    }
    return *this;
}

void FileDescriptor::reset() noexcept {
    if (fd_ >= 0)
        ::close(std::exchange(fd_, -1));
}

FileDescriptor FileDescriptor::duplicate() const {
    FileDescriptor other(::fcntl(fd_, F_DUPFD_CLOEXEC, 0));
    if (!other)
        throw Error(ErrorCode::Io, "a file descriptor: " + std::generic_category().message(errno),
                    -1, errno);
    return other;
}

} // namespace bellows

namespace bellows::net {
namespace {

struct Address {
    sockaddr_storage storage{};
    socklen_t length = 0;
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Address abstract_address(const std::string& name) {
    Address address;
    auto* unix_address = reinterpret_cast<sockaddr_un*>(&address.storage);
    if (name.size() + 1 > sizeof unix_address->sun_path)
        throw Error(ErrorCode::Internal, "socket name too long: " + name);
    unix_address->sun_family = AF_UNIX;
    std::memcpy(unix_address->sun_path + 1, name.data(), name.size());
    address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    return address;
}

// An empty text means "any address".
bool internet_address(const std::string& text, std::uint16_t port, Address& address) {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
    if (text.find(':') == std::string::npos) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        address.length = sizeof(sockaddr_in);
        return inet_pton(AF_INET, text.c_str(), &v4->sin_addr) == 1;
    }
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    address.length = sizeof(sockaddr_in6);
    return inet_pton(AF_INET6, text.c_str(), &v6->sin6_addr) == 1;
}

FileDescriptor open_socket(int family) {
    return FileDescriptor(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// True when the socket is ready (or broken: the next call on it then tells).
bool wait_ready(int socket, short events, const Deadline& deadline) {
    for (;;) {
        pollfd entry{socket, events, 0};
        const int ready = ::poll(&entry, 1, static_cast<int>(deadline.remaining().count()));
        if (ready > 0)
            return true;
        if (ready < 0 && errno != EINTR)
            return false;
        if (deadline.expired())
            return false;
    }
}

FileDescriptor connect_to(const Address& address, const Deadline& deadline) {
    FileDescriptor socket = open_socket(address.storage.ss_family);
    if (!socket)
        throw errno_error("cannot create a socket", errno);
    for (;;) {
        if (::connect(socket.get(), address.get(), address.length) == 0)
            return socket;
        if (errno == EINPROGRESS) {
            int error_number = 0;
            socklen_t length = sizeof error_number;
            const bool ok =
                wait_ready(socket.get(), POLLOUT, deadline) &&
                ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error_number, &length) == 0 &&
                error_number == 0;
            return ok ? std::move(socket) : FileDescriptor();
        }
        // A Unix listener whose backlog is full says EAGAIN.
        if ((errno != EAGAIN && errno != EINTR) || deadline.expired())
            return {};
        std::this_thread::sleep_for(Milliseconds{1});
    }
}

} // namespace

Error errno_error(const std::string& what, int error_number) {
    return Error(ErrorCode::Io, what + ": " + std::generic_category().message(error_number), -1,
                 error_number);
}

FileDescriptor listen_unix(const std::string& name, int backlog) {
    const Address address = abstract_address(name);
    FileDescriptor socket = open_socket(AF_UNIX);
    if (!socket || ::bind(socket.get(), address.get(), address.length) != 0 ||
        ::listen(socket.get(), backlog) != 0)
        throw errno_error("cannot listen on a Unix socket", errno);
    return socket;
}

FileDescriptor listen_tcp(int backlog, std::uint16_t& port) {
    for (const char* any : {"::", "0.0.0.0"}) { // the first takes IPv4 connections, too
        Address address;
        internet_address(any, 0, address);
        FileDescriptor socket = open_socket(address.storage.ss_family);
        const int off = 0;
        if (socket && address.storage.ss_family == AF_INET6)
            ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
        if (!socket || ::bind(socket.get(), address.get(), address.length) != 0 ||
            ::listen(socket.get(), backlog) != 0)
            continue;
        Address bound;
        bound.length = sizeof bound.storage;
        if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound.storage),
                          &bound.length) != 0)
            continue;
        port = ntohs(bound.storage.ss_family == AF_INET6
                         ? reinterpret_cast<sockaddr_in6*>(&bound.storage)->sin6_port
                         : reinterpret_cast<sockaddr_in*>(&bound.storage)->sin_port);
        return socket;
    }
    throw errno_error("cannot listen on a TCP port", errno);
}

FileDescriptor connect_unix(const std::string& name, const Deadline& deadline) {
    return connect_to(abstract_address(name), deadline);
}

FileDescriptor connect_tcp(const std::string& text, std::uint16_t port, const Deadline& deadline) {
    Address address;
    return internet_address(text, port, address) ? connect_to(address, deadline) : FileDescriptor();
}

FileDescriptor accept(int listener, const Deadline& deadline) {
    while (wait_ready(listener, POLLIN, deadline)) {
        FileDescriptor socket(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (socket)
            return socket;
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM)
            throw errno_error("cannot accept a connection", errno);
    }
    return {};
}

bool read_exact(int socket, std::span<std::byte> bytes, const Deadline& deadline) {
    while (!bytes.empty()) {
        const ssize_t got = ::recv(socket, bytes.data(), bytes.size(), 0);
        if (got > 0)
            bytes = bytes.subspan(static_cast<std::size_t>(got));
        else if (got == 0 || (errno != EAGAIN && errno != EINTR))
            return false;
        else if (!wait_ready(socket, POLLIN, deadline))
            return false;
    }
    return true;
}

bool write_exact(int socket, std::span<const std::byte> bytes, const Deadline& deadline) {
    while (!bytes.empty()) {
        const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (sent > 0)
            bytes = bytes.subspan(static_cast<std::size_t>(sent));
        else if (errno != EAGAIN && errno != EINTR)
            return false;
        else if (!wait_ready(socket, POLLOUT, deadline))
            return false;
    }
    return true;
}

FileDescriptor bind_datagrams(const std::string& name) {
    const Address address = abstract_address(name);
    FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int on = 1;
    if (!socket || ::bind(socket.get(), address.get(), address.length) != 0 ||
        ::setsockopt(socket.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0)
        throw errno_error("cannot open a Unix datagram socket", errno);
    return socket;
}

std::int64_t receive_datagram(int socket, std::span<std::byte> bytes, pid_t& sender) {
    for (;;) {
        iovec part{bytes.data(), bytes.size()};
        alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(ucred))> buffer;
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = buffer.data();
        message.msg_controllen = buffer.size();
        const ssize_t got = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got < 0 && errno != EINTR)
            return -1;
        const cmsghdr* item = got < 0 ? nullptr : CMSG_FIRSTHDR(&message);
        if (!item || item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_CREDENTIALS)
            continue;
        ucred credentials{};
        std::memcpy(&credentials, CMSG_DATA(item), sizeof credentials);
        sender = credentials.pid;
        if (credentials.uid == ::geteuid())
            return got;
    }
}

PeerCredentials peer_credentials(int unix_socket) {
    ucred credentials{};
    socklen_t length = sizeof credentials;
    if (::getsockopt(unix_socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
        throw errno_error("cannot read a Unix peer's credentials", errno);
    return {credentials.pid, credentials.uid};
}

std::vector<std::string> interface_addresses() {
    ifaddrs* list = nullptr;
    if (::getifaddrs(&list) != 0)
        throw errno_error("cannot list network interfaces", errno);
    std::vector<std::string> v4, v6;
    for (const ifaddrs* entry = list; entry; entry = entry->ifa_next) {
        if (!entry->ifa_addr || !(entry->ifa_flags & IFF_UP) || (entry->ifa_flags & IFF_LOOPBACK))
            continue;
        char text[INET6_ADDRSTRLEN] = {};
        if (entry->ifa_addr->sa_family == AF_INET) {
            const auto* address = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
            if (::inet_ntop(AF_INET, &address->sin_addr, text, sizeof text))
                v4.emplace_back(text);
        } else if (entry->ifa_addr->sa_family == AF_INET6) {
            const auto* address = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr);
            if (!IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr) &&
                ::inet_ntop(AF_INET6, &address->sin6_addr, text, sizeof text))
                v6.emplace_back(text);
        }
    }
    ::freeifaddrs(list);
    v4.insert(v4.end(), v6.begin(), v6.end());
    return v4;
}

void set_no_delay(int socket) noexcept {
    const int on = 1;
    ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void fill_random(std::span<std::byte> bytes) {
    while (!bytes.empty()) {
        const ssize_t got = ::getrandom(bytes.data(), bytes.size(), 0);
        if (got < 0 && errno != EINTR)
            throw errno_error("cannot read random bytes", errno);
        if (got > 0)
            bytes = bytes.subspan(static_cast<std::size_t>(got));
    }
}

} // namespace bellows::net
