// SPDX-License-Identifier: MIT
#include "app/launcher.hpp"

#include "app/file_io.hpp"
#include "app/launch_folder.hpp"
#include "app/mpirun.hpp"

#include <bellows/engine/error.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include <poll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

namespace bellows {

namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kPollInterval{100};

std::optional<int> number_from_environment(const char* name) {
    const char* text = std::getenv(name);
    int value = 0;
    if (text == nullptr ||
        std::from_chars(text, text + std::strlen(text), value).ec != std::errc()) {
        return std::nullopt;
    }
    return value;
}

/// A fresh folder that goes with the object.
class PrivateFolder {
public:
    PrivateFolder() {
        std::string name = (fs::temp_directory_path() / "bellows-launch-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) {
            throw Error(ErrorCode::Io, errno_message("create", name, errno));
        }
        path_ = name;
    }
    PrivateFolder(const PrivateFolder&) = delete;
    PrivateFolder& operator=(const PrivateFolder&) = delete;
    ~PrivateFolder() {
        std::error_code ignored;
        fs::remove_all(path_, ignored);
    }
    const fs::path& path() const noexcept { return path_; }

private:
    fs::path path_;
};

/// Takes the signals that end a program as readable events; gives them back at the end.
class EndingSignals {
public:
    EndingSignals() {
        sigset_t set;
        sigemptyset(&set);
        for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
            sigaddset(&set, signal);
        }
        if (::pthread_sigmask(SIG_BLOCK, &set, &before_) != 0) {
            throw Error(ErrorCode::Internal, "cannot block signals");
        }
        file_ = FileHandle(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
        if (file_.get() < 0) {
            throw Error(ErrorCode::Io, "cannot open a signalfd");
        }
    }
    EndingSignals(const EndingSignals&) = delete;
    EndingSignals& operator=(const EndingSignals&) = delete;
    ~EndingSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

    int fd() const noexcept { return file_.get(); }
    const sigset_t& before() const noexcept { return before_; }
    /// The signal that has come, if one has.
    std::optional<int> take() const {
        signalfd_siginfo info{};
        if (::read(file_.get(), &info, sizeof info) != sizeof info) {
            return std::nullopt;
        }
        return static_cast<int>(info.ssi_signo);
    }

private:
    sigset_t before_{};
    FileHandle file_;
};

/// Why the ranks are being ended, and how far that is.
struct Ending {
    Clock::time_point begin = Clock::now();
    bool all_began = false;
    std::vector<bool> lost;                       // by rank, before anybody was asked to end
    std::optional<Clock::time_point> first_fault; // a rank was lost or failed
    std::optional<Clock::time_point> asked;       // mpirun was asked to end
    std::optional<int> signal;                    // we were told to
    bool killed = false;
};

bool is_fault(const RankReport& report) {
    return report.is_lost() || report.exit_code.value_or(0) != 0;
}

bool have_begun(const std::vector<RankReport>& reports) {
    return std::all_of(reports.begin(), reports.end(),
                       [](const RankReport& report) { return report.process.has_value(); });
}

void kill_ranks(const std::vector<RankReport>& reports) {
    for (const RankReport& report : reports) {
        if (report.process && report.process->is_alive()) {
            ::kill(report.process->pid, SIGKILL);
        }
    }
}

/// What goes after we asked for the end is our doing, not a loss.
void note_losses(Ending& ending, const std::vector<RankReport>& reports) {
    ending.lost.resize(reports.size());
    for (std::size_t rank = 0; rank < reports.size() && !ending.asked; ++rank) {
        ending.lost[rank] = reports[rank].is_lost();
    }
}

/// One round of the watch: turns faults and signals into requests, later into force.
void drive_ending(Ending& ending, const LauncherOptions& options, const MpirunProcess& mpirun,
                  const std::vector<RankReport>& reports) {
    const Clock::time_point now = Clock::now();
    note_losses(ending, reports);
    if (!ending.first_fault && std::any_of(reports.begin(), reports.end(), is_fault)) {
        ending.first_fault = now;
    }
    ending.all_began = ending.all_began || have_begun(reports);
    const bool never_began = !ending.all_began && now - ending.begin > options.start_limit;
    const bool out_of_grace = ending.first_fault && now - *ending.first_fault > options.grace;
    if (!ending.asked && (ending.signal || out_of_grace || never_began)) {
        ending.asked = now;
        mpirun.send(ending.signal.value_or(SIGTERM));
    }
    if (!ending.killed && ending.asked && now - *ending.asked > options.kill_after) {
        ending.killed = true;
        mpirun.send(SIGKILL);
        kill_ranks(reports);
    }
}

/// The lost ranks in words, empty if there are none.
std::string describe_losses(const Ending& ending, const std::vector<RankReport>& reports) {
    std::string out;
    for (std::size_t rank = 0; rank < reports.size(); ++rank) {
        if (ending.lost[rank]) {
            out += (out.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (process " +
                   std::to_string(reports[rank].process->pid) + ")";
        }
    }
    return out;
}

LauncherResult judge(const std::vector<RankReport>& reports, const Ending& ending, int mpirun_code) {
    if (ending.signal) {
        return {128 + *ending.signal, "ended by signal " + std::to_string(*ending.signal)};
    }
    if (const std::string lost = describe_losses(ending, reports); !lost.empty()) {
        return {4, "lost " + lost + ": it ended without an exit code"};
    }
    int code = 0;
    for (const RankReport& report : reports) {
        const int own = report.exit_code.value_or(0);
        if (own != 0 && (code == 0 || code == 4)) {
            code = own; // a rank that only saw others go (4) does not hide why they went
        }
    }
    if (code == 0 && !have_begun(reports)) {
        return {3, "mpirun did not start all ranks (it answered " + std::to_string(mpirun_code) +
                       "); its own messages stand above"};
    }
    return {code, {}};
}

} // namespace

std::optional<int> ranks_from_environment() {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
        if (const std::optional<int> ranks = number_from_environment(name)) {
            return ranks;
        }
    }
    // Slurm sets its counts in a batch script, too; only inside srun is there a step.
    return std::getenv("SLURM_STEP_ID") ? number_from_environment("SLURM_STEP_NUM_TASKS")
                                        : std::nullopt;
}

bool is_started_by_mpi() {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"}) {
        if (std::getenv(name) != nullptr) {
            return true;
        }
    }
    return ranks_from_environment().value_or(1) > 1;
}

LauncherResult run_ranks(const LauncherOptions& options) {
    if (options.ranks < 1) {
        throw Error(ErrorCode::InvalidArgument,
                    "cannot start " + std::to_string(options.ranks) + " ranks");
    }
    const PrivateFolder folder;
    const EndingSignals signals;
    MpirunProcess mpirun(options, folder.path(), signals.before());
    Ending ending;
    std::vector<RankReport> reports;
    std::optional<int> mpirun_code;
    while (!mpirun_code) {
        std::array<pollfd, 2> events = {
            {{signals.fd(), POLLIN, 0}, {mpirun.errors_fd(), POLLIN, 0}}};
        ::poll(events.data(), events.size(), static_cast<int>(kPollInterval.count()));
        mpirun.pass_errors();
        if (const std::optional<int> signal = signals.take(); signal && !ending.signal) {
            ending.signal = signal;
        }
        mpirun_code = mpirun.exit_code();
        reports = read_reports(folder.path(), options.ranks);
        drive_ending(ending, options, mpirun, reports);
    }
    mpirun.pass_errors();
    reports = read_reports(folder.path(), options.ranks);
    note_losses(ending, reports);
    kill_ranks(reports); // they end before mpirun, unless it was killed
    return judge(reports, ending, *mpirun_code);
}

LaunchedRank::LaunchedRank() {
    const char* folder = std::getenv(kLaunchFolderVariable);
    const std::optional<int> rank = number_from_environment("OMPI_COMM_WORLD_RANK");
    if (folder != nullptr && rank) {
        folder_ = folder;
        rank_ = *rank;
        report_start(folder_, rank_);
    }
}

void LaunchedRank::finish(int exit_code) noexcept {
    if (folder_.empty()) {
        return;
    }
    try {
        report_exit(folder_, rank_, exit_code);
    } catch (...) { // the launcher will call this rank lost: true enough when it cannot write
        return;
    }
}

} // namespace bellows
