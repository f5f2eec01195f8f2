// SPDX-License-Identifier: MIT
#include "listeners.hpp"

#include <bellows/comm/file_descriptor.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <linux/filter.h>
#include <net/if.h>
#include <netinet/in.h>
#include <string>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>

namespace bellows {
namespace {

bool listens(const FileDescriptor& socket) {
    int value = 0;
    socklen_t length = sizeof value;
    return ::getsockopt(socket.get(), SOL_SOCKET, SO_ACCEPTCONN, &value, &length) == 0 &&
           value != 0;
}

struct Listener {
    bool is_tcp = false;
    bool on_all_interfaces = false;
};

Listener address_of(const FileDescriptor& socket) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
        return {};
    if (address.ss_family == AF_INET)
        return {true, reinterpret_cast<sockaddr_in*>(&address)->sin_addr.s_addr == INADDR_ANY};
    if (address.ss_family == AF_INET6)
        return {true,
                IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<sockaddr_in6*>(&address)->sin6_addr)};
    return {};
}

void filter(const FileDescriptor& socket, Admit admit) {
    constexpr auto kInterface = static_cast<std::uint32_t>(SKF_AD_OFF + SKF_AD_IFINDEX);
    constexpr std::uint32_t kWhole = 0xffffffff, kNothing = 0;
    // What one host sends to itself, to whichever of its addresses, comes by the loopback
    // interface.
    std::array<sock_filter, 4> this_host{
        sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kInterface),
        sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ::if_nametoindex("lo"), 0, 1),
        sock_filter BPF_STMT(BPF_RET | BPF_K, kWhole),
        sock_filter BPF_STMT(BPF_RET | BPF_K, kNothing)};
    std::array<sock_filter, 1> nobody{sock_filter BPF_STMT(BPF_RET | BPF_K, kNothing)};
    const sock_fprog program =
        admit == Admit::Nobody
            ? sock_fprog{static_cast<unsigned short>(nobody.size()), nobody.data()}
            : sock_fprog{static_cast<unsigned short>(this_host.size()), this_host.data()};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
}

} // namespace

void restrict_listeners(pid_t process, Admit admit) noexcept {
    const FileDescriptor handle(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
    if (!handle)
        return;
    std::error_code none;
    const std::string folder = "/proc/" + std::to_string(process) + "/fd";
    for (std::filesystem::directory_iterator entry(folder, none), end; !none && entry != end;
         entry.increment(none)) {
        const std::string name = entry->path().filename().string();
        std::error_code gone;
        if (!std::filesystem::read_symlink(entry->path(), gone).string().starts_with("socket:"))
            continue;
        int number = -1;
        std::from_chars(name.data(), name.data() + name.size(), number);
        const FileDescriptor socket(
            static_cast<int>(::syscall(SYS_pidfd_getfd, handle.get(), number, 0)));
        if (!socket || !listens(socket))
            continue;
        const Listener listener = address_of(socket);
        if (listener.is_tcp && (admit == Admit::Nobody || listener.on_all_interfaces))
            filter(socket, admit);
    }
}

} // namespace bellows
