// SPDX-License-Identifier: MIT
#pragma once

// The few socket operations that set-up and the launcher need, each with a time limit. All sockets
// are non-blocking and closed on exec.

#include "deadline.hpp"

#include <bellows/base/error.hpp>
#include <bellows/comm/file_descriptor.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace bellows::net {

/// Error{Io} with errno's text and number: "<what>: Connection refused".
Error errno_error(const std::string& what, int error_number);

/// Names in the abstract namespace: nothing is left on disk. Throw Error{Io}.
FileDescriptor listen_unix(const std::string& name, int backlog);
FileDescriptor listen_tcp(int backlog, std::uint16_t& port);

/// Empty if nobody accepts there before the deadline.
FileDescriptor connect_unix(const std::string& name, const Deadline& deadline);
FileDescriptor connect_tcp(const std::string& address, std::uint16_t port,
                           const Deadline& deadline);
/// Empty if nobody connected before the deadline.
FileDescriptor accept(int listener, const Deadline& deadline);

/// False if the peer closed, failed or was too slow.
bool read_exact(int socket, std::span<std::byte> bytes, const Deadline& deadline);
bool write_exact(int socket, std::span<const std::byte> bytes, const Deadline& deadline);

/// A datagram socket that takes messages of this user's processes only.
FileDescriptor bind_datagrams(const std::string& name);
/// Bytes of the next message that was sent by this user; -1 if none waits. sender: as the kernel
/// says, 0 if that process is out of sight.
std::int64_t receive_datagram(int socket, std::span<std::byte> bytes, pid_t& sender);

struct PeerCredentials {
    std::int64_t pid = 0;
    std::uint32_t uid = 0;
};
PeerCredentials peer_credentials(int unix_socket);

/// Textual addresses of the interfaces that are up, without loopback and link-local ones.
std::vector<std::string> interface_addresses();

/// Turns the TCP connection's send delay off.
void set_no_delay(int socket) noexcept;

/// Fills bytes from the system's random generator; throws Error{Io}.
void fill_random(std::span<std::byte> bytes);

} // namespace bellows::net
