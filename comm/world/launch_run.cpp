// SPDX-License-Identifier: MIT

// The parent's side of launch.hpp: mpirun as a child, its standard error, the ranks' reports.

#include <bellows/comm/launch.hpp>

#include "deadline.hpp"
#include "job_folder.hpp"
#include "launch_io.hpp"
#include "launch_report.hpp"
#include "launched_ranks.hpp"
#include "listeners.hpp"
#include "mpirun_process.hpp"
#include "process_state.hpp"
#include "socket.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

namespace bellows {
namespace {

constexpr Milliseconds kTick{50};
constexpr Milliseconds kKillAfterTerm{5000};
constexpr Milliseconds kLookAtRanks{500};
constexpr Milliseconds kOneSignal{500};

/// Where OpenMPI 4 and 5 put the memory that ranks share, and their session's files.
constexpr std::array kFolderVariables = {"OMPI_MCA_btl_vader_backing_directory",
                                         "OMPI_MCA_btl_sm_backing_directory",
                                         "OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base"};

using Rank = LaunchedRanks::Rank;

bool has_started(const Rank& rank) {
    return rank.started;
}
bool is_met(const Rank& rank) {
    return rank.met;
}
bool has_reported_its_end(const Rank& rank) {
    return rank.exit_code.has_value();
}

class Launch {
public:
    explicit Launch(const LaunchOptions& options) : options_(options), ranks_(options.ranks) {
        std::array<std::byte, 16> random{};
        net::fill_random(random);
        socket_name_ = "bellows-launch-";
        for (const std::byte byte : random)
            socket_name_ += static_cast<char>('a' + std::to_integer<int>(byte) % 26);
        reports_ = net::bind_datagrams(socket_name_);
        phases_ = net::bind_datagrams(socket_name_ + kPhaseSocket);
    }

    LaunchResult run() {
        mpirun_ = start_mpirun(options_, environment(), signals_.mask_before(), errors_);
        const Deadline startup(options_.startup_timeout);
        int status = 0;
        while (::waitpid(mpirun_, &status, WNOHANG) == 0) {
            wait_for_events();
            end_if_due(startup);
        }
        relay_.take(errors_.read.get());
        relay_.finish();
        read_reports(phases_);
        read_reports(reports_);
        ranks_.signal(SIGKILL); // OpenMPI 5 ends without the ranks that are stopped
        return judge(status);
    }

private:
    std::vector<std::string> environment() const;

    void wait_for_events();
    void read_reports(const FileDescriptor& socket);
    void take_report(const LaunchReport& report, pid_t sender, std::string_view text);
    void take_exit(int rank, int exit_code, std::string_view reason);
    void take_silence(int rank);
    void take_signal(int number);
    void guard_mpirun();

    void end_if_due(const Deadline& startup);
    bool look_for_stopped();
    void look_for_late();
    void give_up(const std::vector<int>& ranks, const std::string& why);
    void end_ranks();

    LaunchResult judge(int status) const;
    LaunchResult silent_result() const;

    LaunchOptions options_;
    std::string socket_name_;
    FileDescriptor reports_, phases_;
    SignalWatch signals_;
    Pipe errors_;
    StderrRelay relay_;
    JobFolder folder_;
    pid_t mpirun_ = -1;
    LaunchedRanks ranks_;
    int first_silent_ = -1;
    std::optional<LaunchResult> first_failure_;
    std::optional<Deadline> all_there_by_, all_ended_by_; // since the first is or has
    std::optional<Deadline> mpirun_stopped_;              // when it counts as lost
    std::optional<Deadline> end_by_, kill_by_;
    Deadline looked_{kLookAtRanks}; // until ranks are looked at again
    int signal_ = 0;                // that ended the ranks
    std::optional<Deadline> asked_; // the ranks have got the stop signal; until here it is one
    bool stopped_ = false;          // a rank has ended because of that
    bool killed_ = false;
    bool guarded_ = false; // nobody can connect to mpirun any more
};

void Launch::wait_for_events() {
    std::vector<pollfd> entries{{reports_.get(), POLLIN, 0},
                                {errors_.read.get(), POLLIN, 0},
                                {signals_.fd(), POLLIN, 0},
                                {phases_.get(), POLLIN, 0}};
    // At once: where one dies, mpirun may end the others, and the first is to be named.
    for (const int rank :
         ranks_.those([](const Rank& r) { return r.process && !r.exit_code && !r.silent; }))
        entries.push_back({ranks_[rank].process.get(), POLLIN, 0});
    ::poll(entries.data(), entries.size(), static_cast<int>(kTick.count()));
    if (entries[1].revents & POLLHUP) // mpirun is about to end
        std::this_thread::sleep_for(Milliseconds{5});
    relay_.take(errors_.read.get());
    if (!ranks_.all(is_met))
        ranks_.meet_children_of(mpirun_);
    guard_mpirun();
    const std::vector<int> ended = ranks_.ended_processes(); // before their last reports are read
    read_reports(phases_);
    read_reports(reports_);
    for (const int rank : ended)
        if (!ranks_[rank].exit_code)
            take_silence(rank);
    if (const int number = signals_.take())
        take_signal(number);
}

/// Its ports open while it starts; once the ranks have connected, nobody else has to.
void Launch::guard_mpirun() {
    if (guarded_)
        return;
    guarded_ = ranks_.all(has_started);
    restrict_listeners(mpirun_, guarded_ ? Admit::Nobody : Admit::ThisHost);
}

/// The first one asks ranks that can still save their work; a later one ends them.
void Launch::take_signal(int number) {
    if (asked_ && !asked_->expired())
        return; // some programs send to a process and to its group
    const bool may_ask =
        options_.stop_signal != 0 && !asked_ && ranks_.all(has_started) && !end_by_;
    if (may_ask) {
        asked_.emplace(kOneSignal);
        ranks_.signal(options_.stop_signal);
        if (options_.on_stop_asked)
            options_.on_stop_asked();
        return;
    }
    signal_ = number;
    end_ranks();
}

void Launch::read_reports(const FileDescriptor& socket) {
    struct {
        LaunchReport head;
        std::array<char, kMaxReason> text;
    } message;
    for (;;) {
        pid_t sender = 0;
        const std::int64_t size = net::receive_datagram(
            socket.get(), std::as_writable_bytes(std::span(&message, 1)), sender);
        if (size < 0)
            return;
        if (size >= static_cast<std::int64_t>(sizeof message.head))
            take_report(
                message.head, sender,
                {message.text.data(), static_cast<std::size_t>(size) - sizeof message.head});
    }
}

void Launch::take_report(const LaunchReport& report, pid_t sender, std::string_view text) {
    if (!ranks_.has(report.rank))
        return;
    ranks_.meet(report.rank, sender);
    Rank& rank = ranks_[report.rank];
    if (report.exit_code == kPhase) {
        rank.phase = text;
        rank.phase_end.reset();
        if (report.limit_ms > 0)
            rank.phase_end.emplace(Milliseconds{report.limit_ms});
    } else if (report.exit_code != kAlive) {
        rank.started = true;
        if (report.exit_code != kStarted)
            take_exit(report.rank, report.exit_code, text);
    }
}

void Launch::take_exit(int rank, int exit_code, std::string_view reason) {
    ranks_[rank].exit_code = exit_code;
    if (exit_code != 0 && exit_code == options_.stopped_exit_code) {
        stopped_ = true;
    } else if (exit_code != 0 && !first_failure_) {
        first_failure_ = LaunchResult{exit_code, rank, std::string(reason)};
    }
    if ((first_failure_ || ranks_.all(has_reported_its_end)) && !end_by_)
        end_by_.emplace(options_.grace);
    if (!all_ended_by_)
        all_ended_by_.emplace(options_.together_timeout);
}

/// A process has ended without a report. The others may know more; they have the grace to tell.
void Launch::take_silence(int rank) {
    ranks_[rank].silent = true;
    if (first_silent_ < 0)
        first_silent_ = rank;
    if (!end_by_)
        end_by_.emplace(options_.grace);
}

/// Ranks, or mpirun, that do not move although they live. A rank that has reported its end may,
/// too.
bool Launch::look_for_stopped() {
    const std::string given_up =
        " and was given up after " + std::to_string(options_.stopped_timeout.count()) + " ms";
    const auto is_over = [&](pid_t process, std::optional<Deadline>& limit) {
        if (!is_stopped(process))
            limit.reset();
        else if (!limit)
            limit.emplace(options_.stopped_timeout);
        return limit && limit->expired();
    };
    for (int rank = 0; rank < options_.ranks; ++rank)
        if (Rank& one = ranks_[rank]; one.process && is_over(one.id, one.stopped)) {
            give_up({rank}, "is stopped " + one.phase + given_up);
            return true;
        }
    if (!is_over(mpirun_, mpirun_stopped_))
        return false;
    give_up({}, "mpirun (pid " + std::to_string(mpirun_) + ") is stopped " + ranks_[0].phase +
                    given_up);
    return true;
}

/// Ranks that live and move and yet do not come to an end.
void Launch::look_for_late() {
    std::vector<int> late = ranks_.those([](const Rank& rank) {
        return !rank.exit_code && rank.phase_end && rank.phase_end->expired();
    });
    if (!late.empty()) {
        // Where one is stopped, the others wait for it.
        const std::vector<int> stopped =
            ranks_.those([](const Rank& rank) { return rank.stopped.has_value(); });
        give_up(stopped.empty() ? late : stopped,
                stopped.empty() ? "did not come to an end in time " + ranks_[late[0]].phase
                                : "is stopped " + ranks_[stopped[0]].phase);
        return;
    }
    const std::string limit =
        " within " + std::to_string(options_.together_timeout.count()) + " ms of the first rank's";
    if (ranks_.any(is_met) && !all_there_by_)
        all_there_by_.emplace(options_.together_timeout);
    late = ranks_.those([](const Rank& rank) { return !rank.met; });
    if (all_there_by_ && all_there_by_->expired() && !late.empty()) {
        give_up(late, "did not start" + limit + " start");
        return;
    }
    late = ranks_.those([](const Rank& rank) { return !rank.exit_code && !rank.phase_end; });
    if (all_ended_by_ && all_ended_by_->expired() && !late.empty())
        give_up(late, "did not end" + limit + " end " + ranks_[late[0]].phase);
}

void Launch::give_up(const std::vector<int>& ranks, const std::string& why) {
    if (!first_failure_)
        first_failure_ = LaunchResult{kPeerLostExit, ranks.empty() ? -1 : ranks.front(),
                                      (ranks.empty() ? "" : ranks_.names(ranks) + " ") + why};
    end_ranks();
}

void Launch::end_if_due(const Deadline& startup) {
    if (looked_.expired() && !kill_by_) {
        looked_ = Deadline(kLookAtRanks);
        // Stopped ranks do not use the grace; those that have told their end do.
        const std::vector<int> untold = ranks_.those([](const Rank& r) { return !r.exit_code; });
        const bool all_stopped =
            std::ranges::all_of(untold, [this](int rank) { return is_stopped(ranks_[rank].id); });
        if (end_by_ && first_failure_ && !untold.empty() && all_stopped)
            end_ranks();
        else if (!end_by_ && !look_for_stopped())
            look_for_late();
    }
    if (!ranks_.all(has_started) && startup.expired() && !kill_by_) {
        const std::vector<int> missing =
            ranks_.those([](const Rank& rank) { return !rank.started; });
        give_up(missing, "did not start within " +
                             std::to_string(options_.startup_timeout.count()) + " ms: still " +
                             ranks_[missing.front()].phase);
    }
    if (end_by_ && end_by_->expired() && !kill_by_) {
        const std::vector<int> there =
            ranks_.those([](const Rank& rank) { return rank.exit_code && is_alive(rank.id); });
        if (!first_failure_ && first_silent_ < 0 && !there.empty())
            give_up(there, "reported the end of its work, but the process did not end within " +
                               std::to_string(options_.grace.count()) + " ms");
        end_ranks();
    }
    if (kill_by_ && kill_by_->expired())
        ::kill(mpirun_, SIGKILL);
}

void Launch::end_ranks() {
    if (kill_by_)
        return;
    killed_ = true;
    kill_by_.emplace(kKillAfterTerm);
    ranks_.signal(SIGKILL, [](const Rank& rank) { return is_stopped(rank.id); });
    ::kill(mpirun_, SIGTERM);
    ::kill(mpirun_, SIGCONT); // should it be stopped
}

int exit_status(int status) {
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

LaunchResult Launch::judge(int status) const {
    LaunchResult result;
    const std::vector<int> unheard = ranks_.those([](const Rank& rank) { return !rank.exit_code; });
    if (signal_ != 0)
        result = {128 + signal_, -1, std::string("ended by ") + ::strsignal(signal_)};
    else if (first_failure_)
        result = *first_failure_;
    else if (!killed_ && WIFSIGNALED(status) && !unheard.empty())
        result = {kPeerLostExit, -1,
                  options_.mpirun + " (pid " + std::to_string(mpirun_) +
                      ") was ended by a signal (" + ::strsignal(WTERMSIG(status)) + ") " +
                      ranks_[0].phase + ", and its ranks with it"};
    else if (first_silent_ >= 0)
        result = silent_result();
    else if (!ranks_.any(has_started))
        throw Error(ErrorCode::Mpi,
                    options_.mpirun + " ended with status " + std::to_string(exit_status(status)) +
                        " before any rank had started; its own message says why",
                    -1, exit_status(status));
    else if (!unheard.empty())
        result = {kPeerLostExit, unheard.front(),
                  ranks_.names(unheard) + " ended " + ranks_[unheard.front()].phase +
                      " without saying why"};
    else if (stopped_)
        result.exit_code = options_.stopped_exit_code;
    result.killed = killed_;
    return result;
}

LaunchResult Launch::silent_result() const {
    const std::string& phase = ranks_[first_silent_].phase;
    const std::vector<int> silent = ranks_.those([](const Rank& rank) { return rank.silent; });
    // While MPI starts, mpirun may end the others before the first is noticed: nobody is to blame
    // for certain.
    const bool is_certain = silent.size() == 1 || ranks_[first_silent_].started;
    return {kPeerLostExit, first_silent_,
            is_certain ? ranks_.name(first_silent_) + " ended " + phase + " without saying why"
                       : "one of the " + ranks_.names(silent) + ", most likely " +
                             std::to_string(first_silent_) + ", ended " + phase};
}

std::vector<std::string> Launch::environment() const {
    std::vector<std::pair<std::string, std::string>> additions = mpirun_environment();
    if (!folder_.path().empty())
        for (const char* name : kFolderVariables)
            additions.emplace_back(name, folder_.path());
    std::vector<std::string> result;
    for (char** entry = environ; *entry; ++entry)
        if (!std::string_view(*entry).starts_with(std::string(kLaunchSocket) + "="))
            result.emplace_back(*entry);
    for (const auto& [name, value] : additions)
        if (!std::getenv(name.c_str()))
            result.push_back(name + "=" + value);
    result.push_back(std::string(kLaunchSocket) + "=" + socket_name_);
    return result;
}

} // namespace

LaunchResult launch_ranks(const LaunchOptions& options) {
    if (options.ranks < 1 || options.command.empty())
        throw Error(ErrorCode::InvalidArgument,
                    "nothing to launch: " + std::to_string(options.ranks) + " ranks of " +
                        (options.command.empty() ? "no command" : options.command.front()));
    return Launch(options).run();
}

} // namespace bellows
