// SPDX-License-Identifier: MIT
#include <bellows/comm/launch.hpp>

#include "launch_report.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

namespace bellows {
namespace {

// The first of these variables that holds a number; fallback if none does.
template <std::size_t N>
int first_number(const std::array<const char*, N>& names, int fallback) noexcept {
    for (const char* name : names) {
        const char* text = std::getenv(name);
        int value = 0;
        if (text && std::from_chars(text, text + std::strlen(text), value).ec == std::errc{})
            return value;
    }
    return fallback;
}

enum class Patience { Second, None };

void send_report(const LaunchReport& report, std::string_view reason,
                 Patience patience = Patience::Second) noexcept {
    const char* name = std::getenv(kLaunchSocket);
    const std::string_view suffix = report.exit_code == kPhase ? kPhaseSocket : "";
    sockaddr_un address{};
    if (!name || std::strlen(name) + suffix.size() + 1 > sizeof address.sun_path)
        return;
    const std::size_t name_length = std::strlen(name) + suffix.size();
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name, std::strlen(name));
    std::copy(suffix.begin(), suffix.end(), address.sun_path + 1 + std::strlen(name));
    std::array<char, sizeof report + kMaxReason> message{};
    const std::size_t length = std::min(reason.size(), kMaxReason);
    std::memcpy(message.data(), &report, sizeof report);
    std::copy_n(reason.begin(), length, message.begin() + sizeof report);
    const int socket = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (socket < 0)
        return;
    // Many ranks at once may fill the launcher's queue; one that does not read is no reason to
    // hang.
    const timeval second{1, 0};
    ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof second);
    ::sendto(socket, message.data(), sizeof report + length,
             MSG_NOSIGNAL | (patience == Patience::None ? MSG_DONTWAIT : 0),
             reinterpret_cast<const sockaddr*>(&address),
             static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name_length));
    ::close(socket);
}

} // namespace

std::vector<std::string> mpirun_arguments(int ranks) {
    return {"--enable-recovery", "--bind-to", "none", "-n", std::to_string(ranks)};
}

std::vector<std::pair<std::string, std::string>> mpirun_environment() {
    return {
        {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
        {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
        {"PRTE_ALLOW_RUN_AS_ROOT", "1"},
        {"PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
        {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
        {"PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"},
        {"OMPI_MCA_mpi_yield_when_idle", "1"},
        // On one host messages go through shared memory, and nothing need listen to a network.
        {"OMPI_MCA_pml", "ob1"},
        {"OMPI_MCA_btl", "^tcp,ofi,openib,uct,usnic"},
        {"OMPI_MCA_oob_tcp_if_include", "lo"},
        {"PRTE_MCA_oob_tcp_if_include", "lo"},
        {"PRTE_MCA_prte_if_include", "lo"},
        {"OMPI_MCA_btl_vader_single_copy_mechanism", "none"},
        {"OMPI_MCA_btl_base_warn_component_unused", "0"},
    };
}

int launched_rank() noexcept {
    return first_number(std::array{"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"},
                        -1);
}

int launched_size() noexcept {
    return first_number(std::array{"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"}, 0);
}

// A shell inside a Slurm allocation has SLURM_PROCID as well, but no step of its own.
bool is_launched() noexcept {
    if (std::getenv("OMPI_COMM_WORLD_RANK") || std::getenv("PMIX_RANK") || std::getenv("PMI_RANK"))
        return true;
    return std::getenv("SLURM_PROCID") && std::getenv("SLURM_STEP_ID") && launched_size() > 0;
}

bool has_launcher() noexcept {
    return std::getenv(kLaunchSocket) != nullptr;
}

void report_exit(int rank, int exit_code, std::string_view reason) noexcept {
    send_report({rank, std::max(exit_code, 0)}, reason);
}

void report_alive(int rank) noexcept {
    send_report({rank, kAlive}, {});
}

void report_started(int rank) noexcept {
    send_report({rank, kStarted}, {});
}

void report_phase(int rank, std::string_view phase, std::chrono::milliseconds limit) noexcept {
    // The launcher may be suspended, which is no reason for the ranks to be slow.
    send_report({rank, kPhase, limit.count()}, phase,
                limit.count() > 0 ? Patience::Second : Patience::None);
}

} // namespace bellows
